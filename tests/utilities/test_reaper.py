"""The processes that this one has started."""

from __future__ import annotations

import signal
import subprocess
import sys

import psutil

from pl_grouprl.utilities.reaper import is_running, kill_tree


def test_a_group_is_killed_even_if_its_leader_has_ended():
    """Nobody knows any more that its members descend from the leader."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True)"
    leader = subprocess.Popen(
        [sys.executable, "-c", code + "; input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    member, root = psutil.Process(int(leader.stdout.readline())), psutil.Process(leader.pid)
    leader.communicate(b"\n")
    assert not root.is_running()
    assert is_running(member)
    kill_tree(root)
    member.wait(60)


def test_nothing_is_killed_if_another_process_has_the_id():
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    root = psutil.Process(process.pid)
    root._ident = (process.pid, 0.0)  # it started at another time
    kill_tree(root)
    assert is_running(psutil.Process(process.pid))
    assert psutil.Process(process.pid).status() != psutil.STATUS_STOPPED
    process.kill()
    assert process.wait() == -signal.SIGKILL
