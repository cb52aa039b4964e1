"""Processes and threads beside the trainer's: identified, limited, killed."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import multiprocessing
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from multiprocessing import connection
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, TypeVar

import psutil

from pl_grouprl.utilities import reaper
from pl_grouprl.utilities.reaper import adopt_orphans, is_running, kill_tree

T = TypeVar("T")

# Identifies processes by more than their pid, so a process that reuses a pid is never killed.


def process_identity(pid: int) -> str:
    """Return a string that identifies a process across machines and reused pids.

    Returns:
        Machine, pid namespace and start time; empty if there is no such process, or the system is not Linux.
    """
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()  # psutil names neither of these two
        namespace = os.readlink("/proc/self/ns/pid")
        process = psutil.Process(pid)
        while True:  # `create_time` alone changes when the system's clock is set
            boot = psutil.boot_time()
            started = psutil.Process(pid).create_time() - boot
            if psutil.boot_time() == boot:
                return f"{machine} {namespace} {started:.3f}" if is_running(process) else ""
    except (OSError, psutil.Error):
        return ""


def is_here(identity: str) -> bool:
    """Whether the process with this identity runs or ran on this machine."""
    this = process_identity(os.getpid())
    return bool(this) and this.rpartition(" ")[0] == identity.rpartition(" ")[0]


def kill_process(pid: int, identity: str) -> bool:
    """Kill a process of this machine (SIGKILL) if its identity still matches; returns whether it was killed."""
    if is_here(identity) and process_identity(pid) == identity:
        with contextlib.suppress(psutil.Error):
            psutil.Process(pid).kill()
            return True
    return False


# What an operating system can do.


def require_system(possible: bool, what: str, why: str, instead: str) -> None:
    """Raise an error for an option that this operating system cannot honor.

    Args:
        possible: Whether it can.
        what: The option and its value, or the class.
        why: What the system lacks.
        instead: The remedy.

    Raises:
        ValueError: With all of these and the name of the system, if it cannot.
    """
    if not possible:
        raise ValueError(f"{what} does not work on {sys.platform}: {why}; {instead}.")


def check_process_groups(option: str, count: int) -> None:
    """Reject workers on a system that cannot kill them together with the processes they started (Windows).

    Raises:
        ValueError: Names the option.
    """
    why = "without process groups, a worker could not be killed together with what it started"
    require_system(hasattr(os, "killpg"), f"{option}={count}", why, "set it to 0")


def max_open_files() -> int:
    """Maximum number of files that this process may have open, sockets included; 512 if the system does not say."""
    with contextlib.suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return 512


# Keeps user functions from ending the run with `os._exit`; after `os._exit(0)` the run would look finished.

_real_exit = os._exit
_refused_in: ContextVar[int] = ContextVar("refused_in", default=0)  # id of the process; 0 outside of the context


def _exit(status: int) -> NoReturn:
    if _refused_in.get() != os.getpid():  # another thread or a forked child may exit
        _real_exit(status)
    raise SystemExit(f"os._exit({status}), which would have ended the run")


@contextlib.contextmanager
def exits_refused() -> Iterator[None]:
    """Turn `os._exit` into `SystemExit` inside this context, for this process and thread only."""
    os._exit = _exit  # type: ignore[assignment]  # stays, since other threads may still be inside the context
    token = _refused_in.set(os.getpid())
    try:
        yield
    finally:
        _refused_in.reset(token)


def run_concurrently(functions: Sequence[Callable[[], None]]) -> None:
    """Run each function in a thread that does not keep the process alive, and wait for all.

    The threads are daemons, named after the calling thread.

    Raises:
        BaseException: The first error of a function, once all functions have ended.
    """
    errors: list[BaseException] = []

    def run(function: Callable[[], None]) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    name = threading.current_thread().name
    threads = [
        threading.Thread(target=run, args=(function,), name=f"{name}-{index}", daemon=True)
        for index, function in enumerate(functions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# An event loop in a separate thread that can be abandoned if a task blocks it.

GRACE_SECONDS = 1.0
"""How long a task may take to end once it is canceled; then it is abandoned."""

_STOP_SECONDS = 6.0
"""The same for tasks of `keep_task`."""

_label: ContextVar[str] = ContextVar("label", default="")


class BackgroundLoop:
    """An event loop in a daemon thread; it remembers the label of each task.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._labels: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

        def make_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
            task = asyncio.Task(coroutine, loop=loop, **kwargs)
            self._labels[task] = _label.get()
            return task

        self._loop.set_task_factory(make_task)
        self._blocked_by: str | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, label: str, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine. Tasks that it starts inherit its label."""
        context = contextvars.copy_context()
        context.run(_label.set, label)
        return context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def answers(self, seconds: float | None) -> bool:
        """Whether the loop responds within that time; False if it was abandoned."""
        if self._blocked_by is not None:
            return False
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(seconds)

    def abandon(self) -> str:
        """Give up the thread; returns the label of the task that blocks it, or "" if unknown.

        Once nothing blocks the thread, its tasks are canceled and it ends.
        """
        if self._blocked_by is None:
            task = asyncio.current_task(self._loop)
            self._blocked_by = "" if task is None else self._labels.get(task, "")
            self._stop()
        return self._blocked_by

    def close(self, seconds: float | None = None) -> None:
        """Cancel all tasks and end the thread, waiting at most `seconds` for it; without limit if None.

        Tasks of `keep_task` get more time.
        """
        self._stop()
        if seconds is not None and any(task.get_loop() is self._loop for task in list(_kept)):
            seconds += _STOP_SECONDS
        if threading.current_thread() is not self.thread:  # garbage collection may call this on any thread
            self.thread.join(seconds)

    def _stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        while not self._stopping:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a task, they leave run_forever
                self._loop.run_forever()

        async def cancel_all() -> None:
            tasks = asyncio.all_tasks(self._loop) - {asyncio.current_task()}
            for task in tasks:
                _kept.get(task, task.cancel)()
            grace = _STOP_SECONDS if tasks & _kept.keys() else GRACE_SECONDS
            await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=grace)

        self._loop.run_until_complete(cancel_all())
        self._loop.close()


_kept: dict[asyncio.Task[Any], Callable[[], None]] = {}
"""Tasks of `keep_task`, and what ends each."""


def keep_task(coroutine: Coroutine[Any, Any, None], end: Callable[[], None]) -> asyncio.Task[None]:
    """Start a task that nobody awaits and that may take seconds to end, such as to stop a process.

    Args:
        coroutine: What it runs.
        end: Makes it end, in place of a cancellation, which would break off a task that is already ending.
    """
    task = asyncio.get_running_loop().create_task(coroutine)
    _kept[task] = end  # event loops only keep weak references
    task.add_done_callback(_kept.pop)
    return task


class OverTimeError(Exception):
    """A coroutine exceeded its time limit.

    Attributes:
        task: Its task, if it did not end when it was canceled; else None.
    """

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        super().__init__(task)
        self.task = task


async def run_with_limit(coroutine: Coroutine[Any, Any, T], seconds: float | None) -> asyncio.Task[T]:
    """Await a coroutine, and return its finished task; cancel it if it takes too long, and abandon it if that fails.

    Raises:
        OverTimeError: If it took longer, even if it has a result by now, as a task that blocked the loop may.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if seconds is not None and (clock() - began > seconds or not task.done()):
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
        raise OverTimeError(None if task.done() else task)
    return task


# Worker processes: each answers one message at a time, and is killed if that takes too long.
#
# A worker leads its own session, and dies together with the processes that it started (on Linux including those in
# other sessions), even if the process that started it is killed.

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

    def tell(self, line: str) -> None:
        """Say `+ID` of a worker that is to be killed when this process ends, and `-ID` once it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n".encode())  # unbuffered, and whole lines

    def close(self) -> None:
        """Kill the workers that are still watched, and end the reaper."""
        self._process.communicate()


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
        self._serve = serve
        self._arguments = arguments
        self._check_start = check_start
        self._reaper = watchdog
        self._imports_main = imports_main
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
            self._reaper.tell(f"+{process.pid}")
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
        process = self._process
        if process is None:
            return None
        with self._forking:
            kill_tree(self._root)
            self._reaper.tell(f"-{process.pid}")
            process.join()
            self._process = None
        self._pipe.close()
        code: int | None = process.exitcode
        return code

    def _receive(self, timeout: float | None) -> bytes:
        if not connection.wait([self._pipe, self._process.sentinel], timeout):
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
    """Limit the address space of this process, and of each that it starts, in MiB. Linux only."""
    if limit_mb is not None:
        import resource  # not on Windows

        highest = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = limit_mb * 2**20 if highest == resource.RLIM_INFINITY else min(limit_mb * 2**20, highest)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
