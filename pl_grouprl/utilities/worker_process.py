"""Worker processes: each answers one message at a time, and is killed if that takes too long.

A worker leads its own session, and dies together with the processes that it started (on Linux including those in other
sessions), even if the process that started it is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from types import ModuleType
from typing import Any

import psutil

from pl_grouprl.utilities import reaper
from pl_grouprl.utilities.reaper import adopt_orphans, kill_tree
from pl_grouprl.utilities.systems import require_system

START_SECONDS = 600.0
"""Seconds that a worker may take to start, with all imports of the program and of its functions."""


class WorkerTimeoutError(RuntimeError):
    """A worker took too long to answer, and was killed."""


class WorkerExitError(RuntimeError):
    """A worker ended before it answered."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"ended its process with exit code {code}")


class Reaper:
    """A process that kills workers once this process is gone, however it ended."""

    def __init__(self) -> None:
        command = [sys.executable, reaper.__file__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)  # noqa: S603 (our own)

    def watch(self, pid: int) -> None:
        """Kill this worker when this process ends."""
        self._tell(f"+{pid}")

    def forget(self, pid: int) -> None:
        """Stop watching a worker, which has ended."""
        self._tell(f"-{pid}")

    def close(self) -> None:
        """Kill the workers that are still watched, and end the reaper."""
        self._process.communicate()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())  # unbuffered, and whole lines


class WorkerProcess:
    """A process that starts with the first message and is replaced if it dies. Only one thread may call `ask`.

    Args:
        name: Name of the process, such as `reward-worker`.
        serve: Runs in the process with a pipe and `arguments`. It must call `lead_session` first, send a message once
            it is ready, and then answer each message.
        arguments: Arguments of `serve`; pickled.
        check_start: Called with the first message; raises if the process cannot serve.
        watchdog: Kills the process once this one is gone.
        imports_main: Whether the process imports the user's script, as `serve` may need functions of it. A script that
            is imported needs `if __name__ == "__main__":`.
    """

    # multiprocessing's list of children is not thread-safe, and garbage collection may close a pool on any thread.
    _forking = threading.RLock()

    def __init__(
        self,
        name: str,
        serve: Callable[..., None],
        arguments: tuple[Any, ...],
        check_start: Callable[[bytes], object],
        watchdog: Reaper,
        imports_main: bool = True,
    ) -> None:
        self._name = name
        self._imports_main = imports_main
        self._serve = serve
        self._arguments = arguments
        self._check_start = check_start
        self._reaper = watchdog
        self._closing = False
        self._process: Any = None
        self._root: Any = None
        self._pipe: Any = None

    @property
    def pid(self) -> int | None:
        """Id of the current process; None if there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start a process if none runs, and wait until it is ready.

        Raises:
            RuntimeError: If it does not start, or workers are being closed.
        """
        if self._process is not None and connection.wait([self._process.sentinel], 0):
            self.end()  # it died between two calls
        if self._process is not None:
            return
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._forking:
            if self._closing:
                raise RuntimeError(f"the {self._name}s are being closed.")
            process: Any = context.Process(target=self._serve, args=(theirs, *self._arguments), name=self._name)
            main = sys.modules["__main__"]
            if not self._imports_main:
                sys.modules["__main__"] = ModuleType("__main__")
            try:
                process.start()
            finally:
                sys.modules["__main__"] = main
            self._process, self._root, self._pipe = process, psutil.Process(process.pid), ours
            self._reaper.watch(process.pid)
        theirs.close()
        try:
            first = self._receive(START_SECONDS)
        except (WorkerTimeoutError, WorkerExitError) as error:
            raise RuntimeError(f"A {self._name} did not start: it {error}; see its error output.") from error
        self._check_start(first)

    def ask(self, message: bytes, timeout: float | None) -> bytes:
        """Send a message, and wait for the answer.

        Raises:
            WorkerTimeoutError: If it took longer than `timeout` seconds.
            WorkerExitError: If the process ended.
            RuntimeError: If it does not start.
        """
        self.start()
        with contextlib.suppress(OSError):  # if it dies meanwhile, `_receive` reports it
            self._pipe.send_bytes(message)
        return self._receive(timeout)

    def kill(self) -> None:
        """Kill the process for good; callable from any thread. A thread waiting in `ask` sees that it is dead."""
        with self._forking:
            self._closing = True
            if self._process is not None:
                kill_tree(self._root)

    def end(self) -> int | None:
        """Kill the process; returns its exit code."""
        process, pipe = self._process, self._pipe
        if process is None:
            return None
        with self._forking:
            kill_tree(self._root)
            self._reaper.forget(process.pid)
            process.join()
            self._process = None
        pipe.close()
        code: int | None = process.exitcode
        return code

    def _receive(self, timeout: float | None) -> bytes:
        ready = connection.wait([self._pipe, self._process.sentinel], timeout)
        if not ready:
            self.end()
            raise WorkerTimeoutError(f"took longer than {timeout} seconds")
        try:
            answer: bytes = self._pipe.recv_bytes()
        except (EOFError, OSError):
            connection.wait([self._process.sentinel], 1.0)  # lets a process that ends by itself set its exit code
            raise WorkerExitError(self.end()) from None
        return answer


def lead_session() -> None:
    """Start a session, so that processes the worker starts are killed with it. Workers call this first.

    If the system runs out of memory, Linux kills workers and their children before the training process.
    """
    os.setsid()
    adopt_orphans()
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")


def limit_memory(limit_mb: int | None) -> None:
    """Limit the address space of this process, and of each that it starts, in MiB."""
    if limit_mb is not None:
        import resource  # not on Windows; see `check_memory_limit`

        highest = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit_mb * 2**20 if highest == resource.RLIM_INFINITY else min(limit_mb * 2**20, highest)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def check_process_groups(option: str, count: int) -> None:
    """Refuse workers on a system that cannot kill them together with the processes they started (Windows).

    Raises:
        ValueError: Names the option.
    """
    why = "without process groups, a worker could not be killed together with what it started"
    require_system(hasattr(os, "killpg"), f"{option}={count}", why, "set it to 0")


def check_memory_limit(option: str, limit_mb: int | None) -> None:
    """Refuse a limit of the address space outside Linux; macOS accepts one and does not enforce it.

    Raises:
        ValueError: Names the option.
    """
    why = "only Linux limits the address space of a process"
    require_system(limit_mb is None or sys.platform == "linux", f"{option}={limit_mb}", why, "set it to None")
