"""Identifies processes by more than their pid, so a process that reuses a pid is never killed."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

from pl_grouprl.utilities.reaper import process_status

_PROC = Path("/proc")


def process_identity(pid: int) -> str:
    """Return a string that identifies a process across machines and reused pids.

    Returns:
        Machine, pid namespace and start time; empty if there is no such process, or the system has no `/proc`.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink(_PROC / "self/ns/pid")
    except OSError:
        return ""
    status = process_status(pid)
    return f"{boot} {namespace} {status[19]}" if status else ""


def is_here(identity: str) -> bool:
    """Whether the process with this identity runs or ran on this machine."""
    this = process_identity(os.getpid())
    return bool(this) and this.rpartition(" ")[0] == identity.rpartition(" ")[0]


def kill_process(pid: int, identity: str) -> bool:
    """Kill a process of this machine (SIGKILL) if its identity still matches; returns whether it was killed."""
    if not is_here(identity) or process_identity(pid) != identity:
        return False
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False
