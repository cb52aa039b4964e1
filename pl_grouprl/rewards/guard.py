"""Kills reward workers with all that they started, also when the process that trains is gone, however it ended.

Run as a script, by its path, so that it imports nothing but the standard library. It reads lines `+ID` and `-ID` from
its standard input, which say which workers there are; the end of the input is the end of that process. A worker cannot
see to this itself: a function that holds the interpreter's lock keeps all of its threads from running.
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
    """Become the parent of what this process's children leave, where the system has that (Linux): see `kill_tree`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children(parent: int) -> set[int]:
    """The processes that have this parent, as far as /proc tells."""
    return {child for child, own in _parents().items() if own == parent}


def kill_tree(root: int) -> None:
    """Kill a process with its group and all of its descendants, those in sessions of their own too.

    The root is stopped first: it starts nothing more, and while it is there the orphans of its descendants stay its
    own, if it has called `adopt_orphans`.
    """
    _send(os.kill, root, signal.SIGSTOP)
    killed: set[int] = set()
    while found := _descendants(root) - killed:
        for process in found:
            _send(os.kill, process, signal.SIGKILL)
        killed |= found
    _send(os.killpg, root, signal.SIGKILL)
    _send(os.kill, root, signal.SIGKILL)  # before it has a group


def guard() -> None:
    """Read until the input ends, then kill what is left."""
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


def _parents() -> dict[int, int]:
    """The parent of each process that has not ended."""
    parents = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state not in b"ZX":
            parents[int(name)] = int(parent)
    return parents


def _send(kill: Callable[[int, int], None], target: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill(target, number)


if __name__ == "__main__":
    guard()
