"""Kills process trees: on request, and, as a script, when the process that started them is gone.

It imports nothing of this package, so it can be run by path. The script reads lines `+ID` and `-ID` from standard
input as workers start and end. End of input means that the training process is gone, however it ended. A worker cannot
watch for that itself: a function that holds the GIL stops all of its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import psutil

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes orphaned by this one's children (on Linux); see `kill_tree`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def is_running(process: psutil.Process) -> bool:
    """Whether a process runs; zombies do not."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def kill_tree(root: psutil.Process) -> None:
    """Kill a process with its group and all of its descendants, including those in other sessions.

    The root is stopped first, so it starts nothing more and, if it has called `adopt_orphans`, remains the parent
    of orphaned descendants until all are killed. Its group is killed even if the root has ended, but nothing is if
    another process has its id by now.
    """
    with contextlib.suppress(psutil.Error):
        root.suspend()
    killed: set[psutil.Process] = set()
    with contextlib.suppress(psutil.Error):
        while found := set(root.children(recursive=True)) - killed:
            for process in found:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            killed |= found
    if root.is_running() or not psutil.pid_exists(root.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(root.pid, signal.SIGKILL)
    with contextlib.suppress(psutil.Error):  # in case it does not lead a process group yet
        root.kill()


def reap() -> None:
    """Read standard input until it ends, then kill the workers that are left."""
    workers: dict[int, psutil.Process] = {}
    for line in sys.stdin:
        pid = int(line[1:])
        workers.pop(pid, None)
        if line[0] == "+":
            with contextlib.suppress(psutil.NoSuchProcess):
                workers[pid] = psutil.Process(pid)
    for worker in workers.values():
        kill_tree(worker)


if __name__ == "__main__":
    reap()
