"""Runs an untrusted Python program without network and with limits, and leaves nothing of it behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.sandbox.seccomp import REFUSED, seccomp_filter
from pl_grouprl.utilities.options import check_options

MIB = 2**20


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


_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


def interpreter_view() -> tuple[list[str], dict[str, str]]:
    """What this Python needs: the system's libraries, its own folder and its virtual environment.

    Returns:
        The files and folders to mount, none inside another, and the symbolic links on the way to them, with their
        targets; all by absolute paths.

    Raises:
        ValueError: If that would expose a home folder or the whole machine.
    """
    mounts: set[str] = set()
    links: dict[str, str] = {}

    def add(path: str) -> None:
        here = Path("/")
        for place, part in enumerate(Path(path).parts[1:], start=2):
            here = Path(os.path.normpath(here / part))
            if here.is_symlink():
                links.setdefault(str(here), os.readlink(here))
                add(os.path.normpath(here.parent.joinpath(os.readlink(here), *Path(path).parts[place:])))
                return
        if here.exists():
            mounts.add(str(here))

    def inside(path: str, folders: Sequence[str]) -> bool:
        return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)

    for path in (*_SYSTEM, *_DEVICES, sys.base_prefix, sys.prefix, sys.executable):
        add(path)
    outermost: list[str] = []
    for path in sorted(mounts):
        if not inside(path, outermost):
            outermost.append(path)
    if exposed := {"/", "/root", "/home", os.path.expanduser("~")}.intersection(outermost):
        raise ValueError(f"this Python is installed in {sorted(exposed)}, so programs could read all files there")
    return outermost, {link: target for link, target in links.items() if not inside(link, outermost)}


START_SECONDS = 60.0
"""Time allowed for building the sandbox, on a busy machine."""

_DIRECTORY = "/sandbox"  # not /tmp, where Python itself may be installed
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "HOME": _DIRECTORY,
    "TMPDIR": _DIRECTORY,
    "OMP_NUM_THREADS": "1",
}

Ending = Literal["exit", "timeout", "output", "killed"]


class SandboxUnavailableError(RewardConfigurationError):
    """This system does not allow the sandbox, so programs are not run."""


@dataclass(frozen=True)
class ProgramResult:
    """The outcome of a program.

    Attributes:
        ending: `exit`: it ended by itself, or one of its limits (memory, CPU time) killed it. `timeout`: it took too
            long. `output`: it wrote too much. `killed`: the system killed it, for example because memory ran out.
        exit_code: Exit code, or minus the number of the signal that killed it; None if it was stopped before. It
            says nothing about correctness: the program chooses it.
        stdout: What it wrote, up to the limit; bytes that are not UTF-8 are replaced.
        stderr: Likewise.
        seconds: Run time.
    """

    ending: Ending
    exit_code: int | None
    stdout: str
    stderr: str
    seconds: float


class Sandbox:
    """Runs one Python program per call; calls from several threads run in parallel.

    A program sees the system's libraries and this Python with its packages (read-only), an empty working directory in
    memory, and no other file. It has no network, none of our environment variables, no open files but its three
    streams, no root rights, and a process namespace that ends with everything it started. If the system does not allow
    any one of these, nothing is run.

    Needs Linux 5.14 or later on x86_64 or aarch64, and user namespaces, with or without root.

    Args:
        limits: Limits of each run.
    """

    def __init__(self, limits: SandboxLimits | None = None) -> None:
        self.limits = SandboxLimits(**limits) if isinstance(limits, Mapping) else limits or SandboxLimits()
        self._request: dict[str, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Omit what is recomputed after unpickling."""
        return vars(self) | {"_request": None}

    def check(self) -> None:
        """Run a trial program.

        Raises:
            SandboxUnavailableError: If the system does not allow the sandbox, or programs do not run in it; says why.
        """
        result = self.run("print(input())", stdin="trial")
        if result.stdout != "trial\n":
            raise SandboxUnavailableError(
                f"programs do not run in the sandbox: a trial ended with {result.ending}, exit code {result.exit_code} "
                f"and {result.stderr[-500:]!r}; raise its limits (memory_limit_mb={self.limits.memory_limit_mb}, "
                f"timeout={self.limits.timeout})."
            )

    def run(self, program: str, stdin: str = "", files: Mapping[str, str] | None = None) -> ProgramResult:
        """Run a program and wait for it to end.

        Args:
            program: Source code in Python.
            stdin: Standard input.
            files: Contents of further files that it can read, by absolute path.

        Raises:
            SandboxUnavailableError: If the system does not allow the sandbox.
        """
        if self._request is None:
            self._request = self._prepare()
        request = {
            **self._request,
            "files": {path: _encodable(text) for path, text in {"/program.py": program, **(files or {})}.items()},
            "stdin": _encodable(stdin),
        }
        command = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launcher.py"))]
        pipe = subprocess.PIPE
        readable, writable = os.pipe()
        with open(readable, "rb", buffering=0):
            try:
                process = subprocess.Popen(  # noqa: S603 (our own)
                    command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, pass_fds=[writable], env=_ENVIRONMENT,
                    cwd="/", start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(writable)
            with process:
                run = _Run(process, readable, self.limits)
                run.send({**request, "status": writable})
                run.collect()
        return run.result()

    def _prepare(self) -> dict[str, Any]:
        """The part that all requests share."""
        if sys.platform != "linux":
            raise SandboxUnavailableError(
                f"the sandbox for programs needs Linux, and this is {sys.platform}; grade in a Linux container or "
                "virtual machine, or with a reward function that runs no programs."
            )
        try:
            (mounts, links), code = interpreter_view(), seccomp_filter()
        except ValueError as error:
            raise SandboxUnavailableError(f"the sandbox for programs cannot be built: {error}.") from error
        column = 0 if platform.machine() == "x86_64" else 1
        return {
            "mounts": mounts,
            "links": links,
            "filter": code.hex(),
            "pivot_root": REFUSED["pivot_root"][column],
            "mount_setattr": REFUSED["mount_setattr"][column],
            "rlimits": self.limits.rlimits(),
            "disk": self.limits.disk_limit_mb * MIB,
            "directory": _DIRECTORY,
            "environment": _ENVIRONMENT,
            "command": [sys.executable, "-I", "/program.py"],
        }


class _Run:
    """One launcher process: sends it the request, reads its output, and stops it in time."""

    def __init__(self, process: subprocess.Popen[bytes], status: int, limits: SandboxLimits) -> None:
        self._process = process
        self._limits = limits
        self._ending: Ending | None = None
        self._deadline = time.monotonic() + START_SECONDS
        self._started: float | None = None
        assert process.stdout is not None
        assert process.stderr is not None
        self._status = status
        self._read: dict[int, bytearray] = {
            file: bytearray() for file in (process.stdout.fileno(), process.stderr.fileno(), status)
        }

    def send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        rest = memoryview(json.dumps(request).encode() + b"\n")
        with contextlib.suppress(BrokenPipeError):  # its stderr says why
            while rest:
                rest = rest[self._process.stdin.write(rest) :]

    def collect(self) -> None:
        """Read until all processes are gone."""
        try:
            with selectors.DefaultSelector() as selector:
                for file in self._read:
                    selector.register(file, selectors.EVENT_READ)
                while selector.get_map():
                    ready = selector.select(max(0.0, self._deadline - time.monotonic()))
                    for key, _ in ready:
                        self._receive(selector, key.fd)
                    if time.monotonic() > self._deadline:
                        self._stop("timeout")
        finally:
            self._process.kill()  # harmless if it has ended
            self._process.wait()

    def _receive(self, selector: selectors.BaseSelector, file: int) -> None:
        part = os.read(file, 65536)
        if not part:
            selector.unregister(file)
            return
        if self._ending is not None:
            return
        self._read[file] += part
        if file == self._status:
            if self._started is None and b"started" in part:
                self._started = time.monotonic()
                self._deadline = self._started + self._limits.timeout
        elif len(self._read[file]) > self._limits.max_output_mb * MIB:
            self._stop("output")

    def _stop(self, ending: Ending) -> None:
        """Tell the launcher to kill the program. If called again because that takes too long, kill the launcher."""
        if self._ending is not None:
            self._process.kill()
        self._ending = self._ending or ending
        self._deadline = time.monotonic() + START_SECONDS
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(b".")

    def result(self) -> ProgramResult:
        out, err, reports = (bytes(read[: self._limits.max_output_mb * MIB]) for read in self._read.values())
        stdout, stderr = out.decode(errors="replace"), err.decode(errors="replace")
        status: dict[str, Any] = {}
        for line in reports.splitlines():
            status |= json.loads(line)
        if "refused" in status:
            raise SandboxUnavailableError(
                f"this system does not allow a sandbox for programs: {status['refused']}. It needs user namespaces "
                "(in a container, a seccomp profile that allows unshare and mount) on Linux 5.14 or later; "
                "without them no program is run."
            )
        if self._started is None:
            raise RuntimeError(f"the sandbox's launcher ended without a report; it wrote {stderr[-2000:]!r}.")
        ending = self._ending or ("exit" if "exit" in status else "killed")
        return ProgramResult(ending, status.get("exit"), stdout, stderr, time.monotonic() - self._started)


def _encodable(text: str) -> str:
    """Replace lone surrogates, which cannot be written to a file."""
    return text.encode("utf-8", "replace").decode()
