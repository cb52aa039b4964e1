"""Kills the process groups of reward workers when the process that started them is gone, however it ended.

Run as a script, by its path, so that it imports nothing but the standard library. It reads lines `+ID` and `-ID` from
its standard input, which say which groups there are; the end of the input is the end of that process. A worker cannot
see to this itself: a function that holds the interpreter's lock keeps all of its threads from running.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys


def guard() -> None:
    """Read until the input ends, then kill what is left."""
    groups: set[int] = set()
    for line in sys.stdin:
        change = groups.add if line[0] == "+" else groups.discard
        change(int(line[1:]))
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    guard()
