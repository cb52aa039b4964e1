"""The processes that this one has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

import psutil

from pl_grouprl.utilities.reaper import is_running, kill_tree, own_children


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_own_children_are_those_that_run():
    before = own_children()
    started = [sleeper()]
    thread = threading.Thread(target=lambda: started.append(sleeper()))
    thread.start()
    thread.join()
    try:
        assert own_children() - before == {process.pid for process in started}
        started[0].kill()
        started[0].wait()
        assert own_children() - before == {started[1].pid}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert own_children() == before


def test_a_process_without_children_has_none():
    code = "import os; from pl_grouprl.utilities.reaper import own_children; print(own_children())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["set()"]


def test_zombies_neither_count_nor_are_reaped():
    process = sleeper()
    process.kill()
    while is_running(psutil.Process(process.pid)):
        time.sleep(0.01)
    assert process.pid not in own_children()
    assert process.wait() == -signal.SIGKILL  # its exit code is still there


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
