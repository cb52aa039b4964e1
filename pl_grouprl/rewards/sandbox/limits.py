"""Resource limits of a program in the sandbox."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options

MIB = 2**20


@checked_arguments
@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run of a program.

    Attributes:
        timeout: Seconds from start to end; also, plus one, the CPU seconds of each process.
        memory_limit_mb: Address space of each process, in MiB; all together may use `max_processes` times as much.
        max_processes: Processes and threads at a time.
        disk_limit_mb: MiB of all files in the working directory, which is in memory.
        max_output_mb: MiB of standard output and of standard error, each.

    Raises:
        ValueError: If one is out of range.
    """

    timeout: float = 10.0
    memory_limit_mb: int = 512
    max_processes: int = 8
    disk_limit_mb: int = 16
    max_output_mb: int = 1

    def __post_init__(self) -> None:
        finite = 0 < self.timeout < math.inf
        checks = {"timeout": (self.timeout, finite, "a number of seconds, larger than 0")}
        for name in ("memory_limit_mb", "max_processes", "disk_limit_mb", "max_output_mb"):
            value = getattr(self, name)
            checks[name] = (value, value >= 1, "a whole number, at least 1")
        check_options(checks)

    def rlimits(self) -> dict[str, int]:
        """The limits of each process, by the name of the constant in `resource`."""
        return {
            "RLIMIT_AS": self.memory_limit_mb * MIB,
            "RLIMIT_CORE": 0,
            "RLIMIT_CPU": math.ceil(self.timeout) + 1,
            "RLIMIT_FSIZE": self.disk_limit_mb * MIB,
            "RLIMIT_MEMLOCK": 0,
            "RLIMIT_MSGQUEUE": 0,
            "RLIMIT_NICE": 0,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_NPROC": self.max_processes,
            "RLIMIT_RTPRIO": 0,
        }
