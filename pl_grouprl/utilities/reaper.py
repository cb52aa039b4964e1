"""Kills process trees: on request, and, as a script, when the process that started them is gone.

It imports only the standard library, so it can be run by path. The script reads lines `+ID` and `-ID` from standard
input as workers start and end. End of input means that the training process is gone, however it ended. A worker cannot
watch for that itself: a function that holds the GIL stops all of its threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of processes orphaned by this one's children (on Linux); see `kill_tree`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(parent: int) -> set[int]:
    """The running child processes of a process, according to /proc."""
    try:
        listed = [_read(f"/proc/{parent}/task/{thread}/children") for thread in os.listdir(f"/proc/{parent}/task")]
    except OSError:  # not every kernel lists them
        return {process for process, its_parent in _parents().items() if its_parent == parent}
    return {int(child) for child in b" ".join(listed).split() if _parent(int(child)) == parent}


def own_children() -> set[int]:
    """The running child processes of this one; a single system call if there are none."""
    if hasattr(os, "waitid"):
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # reaps nothing
        except ChildProcessError:
            return set()
    return children(os.getpid())


def kill_tree(root: int) -> None:
    """Kill a process with its group and all of its descendants, including those in other sessions.

    The root is stopped first, so it starts nothing more and, if it has called `adopt_orphans`, remains the parent
    of orphaned descendants until all are killed.
    """
    _send(os.kill, root, signal.SIGSTOP)
    killed: set[int] = set()
    while found := _descendants(root) - killed:
        for process in found:
            _send(os.kill, process, signal.SIGKILL)
        killed |= found
    _send(os.killpg, root, signal.SIGKILL)
    _send(os.kill, root, signal.SIGKILL)  # in case it does not lead a process group yet


def reap() -> None:
    """Read standard input until it ends, then kill the workers that are left."""
    workers: set[int] = set()
    for line in sys.stdin:
        change = workers.add if line[0] == "+" else workers.discard
        change(int(line[1:]))
    for worker in workers:
        kill_tree(worker)


def _descendants(root: int) -> set[int]:
    """All living descendants; zombies are left to their parents."""
    parents = _parents()
    found: set[int] = set()
    fresh = {root}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def process_status(process: int) -> list[str]:
    """Fields of `/proc/PID/stat` from the third on: state, parent, ...; empty if there is no such running process.

    See proc_pid_stat(5). Zombies do not count as running.
    """
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            status = file.read().rpartition(b")")[2].decode().split()  # its name, in brackets, may have spaces
    except OSError:
        return []
    return [] if status[0] in "ZX" else status


def _parents() -> dict[int, int]:
    """The parent of each running process."""
    names = os.listdir("/proc") if os.path.isdir("/proc/self") else ()
    found = {int(name): _parent(int(name)) for name in names if name.isdigit()}
    return {process: parent for process, parent in found.items() if parent is not None}


def _parent(process: int) -> int | None:
    status = process_status(process)
    return int(status[1]) if status else None


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _send(kill: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, number)


if __name__ == "__main__":
    reap()
