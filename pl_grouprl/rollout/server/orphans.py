"""A process that outlives the server, to end vLLM's: they go on where the server is killed, and keep its memory."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time

_INTERVAL = 0.5
"""Seconds between two looks."""


def start_guard() -> None:
    """Start it beside this process, which it needs no telling about."""
    command = [sys.executable, __file__, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 (our own)


def watch(server: int) -> None:
    """Wait until the server has ended, then kill what is left of the processes that it has started.

    Args:
        server: The parent of this process.
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


if __name__ == "__main__":
    watch(int(sys.argv[1]))
