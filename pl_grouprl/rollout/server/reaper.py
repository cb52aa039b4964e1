"""A process that outlives the server: it kills vLLM's processes, which survive a killed server, and cleans up."""

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
"""Seconds between two checks."""


def start_reaper(leftovers: Sequence[str] = ()) -> None:
    """Start the reaper; it finds this process as its parent.

    Args:
        leftovers: Patterns of folders that it removes in the end.
    """
    command = [sys.executable, __file__, str(os.getpid()), *leftovers]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 (this file)


def watch(server: int, leftovers: Sequence[str] = ()) -> None:
    """Wait until the server has ended, then kill its remaining processes and remove its folders.

    Args:
        server: Process id of the server, the parent of this process.
        leftovers: Patterns of folders to remove.
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
            with contextlib.suppress(psutil.NoSuchProcess):  # psutil checks that the pid was not reused
                process.kill()
    for pattern in leftovers:
        for folder in glob.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2:])
