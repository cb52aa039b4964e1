"""A process that outlives the server, to end vLLM's, which go on where the server is killed, and to clear up."""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

_INTERVAL = 0.5
"""Seconds between two looks."""


def start_guard(leftovers: Sequence[str] = ()) -> None:
    """Start it beside this process, which it needs no telling about.

    Args:
        leftovers: Patterns of folders that are removed in the end.
    """
    command = [sys.executable, __file__, str(os.getpid()), *leftovers]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 (our own)


def watch(server: int, leftovers: Sequence[str] = ()) -> None:
    """Wait until the server has ended, then kill what is left of the processes that it has started, and clear up.

    Args:
        server: The parent of this process.
        leftovers: Patterns of folders that are removed.
    """
    import psutil  # vLLM needs it too

    started = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(server)
        while os.getppid() == server:
            started.update(parent.children(recursive=True))
            time.sleep(_INTERVAL)
    for process in started:
        if process.pid != os.getpid():
            with contextlib.suppress(psutil.NoSuchProcess):  # it looks whether another has the number now
                process.kill()
    for pattern in leftovers:
        for folder in glob.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2:])
