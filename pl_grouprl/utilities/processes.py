"""Identifies processes by more than their pid, so a process that reuses a pid is never killed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from pl_grouprl.utilities.reaper import is_running


def process_identity(pid: int) -> str:
    """Return a string that identifies a process across machines and reused pids.

    Returns:
        Machine, pid namespace and start time; empty if there is no such process, or the system is not Linux.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # psutil names neither of these two
        namespace = os.readlink("/proc/self/ns/pid")
        started = _seconds_since_boot(pid)
        return f"{boot} {namespace} {started:.3f}" if is_running(psutil.Process(pid)) else ""
    except (OSError, psutil.Error):
        return ""


def is_here(identity: str) -> bool:
    """Whether the process with this identity runs or ran on this machine."""
    this = process_identity(os.getpid())
    return bool(this) and this.rpartition(" ")[0] == identity.rpartition(" ")[0]


def kill_process(pid: int, identity: str) -> bool:
    """Kill a process of this machine (SIGKILL) if its identity still matches; returns whether it was killed."""
    if not is_here(identity) or process_identity(pid) != identity:
        return False
    with contextlib.suppress(psutil.Error):
        psutil.Process(pid).kill()
        return True
    return False


def _seconds_since_boot(pid: int) -> float:
    """When a process started. `create_time` alone changes when the system's clock is set."""
    while True:
        boot = psutil.boot_time()
        started = psutil.Process(pid).create_time() - boot
        if psutil.boot_time() == boot:
            return started
