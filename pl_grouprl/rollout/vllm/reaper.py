"""A process that outlives the server, kills the vLLM processes that it leaves running, and removes its folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time

import psutil

_INTERVAL = 1.0
"""Seconds between two checks."""


def start_reaper(folder: str) -> None:
    """Start the reaper of this process, or of the program that replaces it by `exec`.

    Args:
        folder: Folder to remove when the process has ended.
    """
    command = [sys.executable, __file__, str(os.getpid()), folder]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)  # noqa: S603 (this file)


def watch(server: int, folder: str) -> None:
    """Wait until the server has ended, then kill its remaining processes and remove its folder.

    Args:
        server: Process id of the server, the parent of this process.
        folder: Folder to remove.
    """
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
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
