"""A sandbox with limits that tests meet quickly, and how to find what is left of a program."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.watched_processes import until  # noqa: F401 (tests import it from here)

from pl_grouprl.rewards import Sandbox, SandboxLimits
from pl_grouprl.rewards.sandbox import SandboxUnavailableError

PROCESSES = 6
LIMITS = SandboxLimits(timeout=20.0, memory_limit_mb=256, max_processes=PROCESSES, disk_limit_mb=8)


def make_sandbox(**limits):
    sandbox = Sandbox(SandboxLimits(**{**vars(LIMITS), **limits}))
    try:
        sandbox.check()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return sandbox


def survivors(marker):
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found
