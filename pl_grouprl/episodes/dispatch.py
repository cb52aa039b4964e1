"""Runs operations on tools and environments: async ones on an event loop, all others on lanes."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, TypeVar

from pl_grouprl.episodes.environment_host import EnvironmentHost
from pl_grouprl.episodes.lanes import HangingThreads, Lanes, Task
from pl_grouprl.episodes.operations import (
    Operation,
    OperationCancelledError,
    OperationExitError,
    OperationTimeoutError,
)
from pl_grouprl.episodes.tools import run_coroutine
from pl_grouprl.episodes.workers import ToolWorkers
from pl_grouprl.utilities.background_loop import GRACE_SECONDS, BackgroundLoop, OverTimeError, run_with_limit

T = TypeVar("T")

MAX_THREADS = 256
"""Most sync calls that run in threads at the same time."""


@dataclass(eq=False)
class Started:
    """An operation that has started, and its result."""

    operation: Operation
    future: Future[Any]
    task: Task | None = None
    loop: BackgroundLoop | None = None

    def result(self) -> Any:
        """What it returned.

        Raises:
            OperationTimeoutError: If it took too long.
            OperationExitError: If its process ended.
            RuntimeError: What `EnvironmentHost` raises.
        """
        try:
            return self.future.result()
        except CancelledError:
            if self.loop is None:
                raise OperationExitError("was not called, because the tools were closed") from None
            raise OperationTimeoutError("did not end, because its event loop was blocked", is_stuck=True) from None

    def may_run(self) -> bool:
        """Whether it may still be running, so that its environment cannot be used again."""
        if not self.future.done() or self.future.cancelled():
            return True
        error = self.future.exception()
        return isinstance(error, OperationTimeoutError) and error.is_stuck


class _InProcess:
    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host

    def run(self, operation: Operation) -> Any:
        return run_coroutine(operation.coroutine(self._host))


class Dispatcher:
    """Runs operations: async ones on an event loop, others on lanes, which are threads or worker processes.

    An environment stays in one lane. In a worker, its async methods run there, one at a time.

    Args:
        host: The tools, and the environments of this process.
        workers: The worker processes; None to use threads.

    Attributes:
        process: Id of the process that created it.
    """

    def __init__(self, host: EnvironmentHost, workers: ToolWorkers | None = None) -> None:
        self.process = os.getpid()
        self._host = host
        self._workers = workers
        self._hanging = HangingThreads()
        self._loops: list[BackgroundLoop] = []  # the current one, if any
        self._lock = threading.Lock()
        executors = [_InProcess(host)] * MAX_THREADS if workers is None else workers
        self._lanes = Lanes(executors, "tools" if workers is None else "tool-workers")
        # This priority runs it before multiprocessing joins child processes at exit.
        self._shut_down = Finalize(self, _shut_down, (self._lanes, workers, self._loops), exitpriority=100)
        if workers is not None:
            self._start_workers()

    def start(self, operation: Operation) -> Started:
        """Start an operation. Sync operations of one environment run in order."""
        if operation.is_async and not (self._workers is not None and operation.uses_environment):
            loop = self._current_loop()
            coroutine = _run_with_limit(operation.coroutine(self._host), operation.limit)
            return Started(operation, loop.submit(operation.name, coroutine), loop=loop)
        task = Task(
            operation.name,
            lambda executor: executor.run(operation),
            operation.limit if self._workers is None else None,
            on_abandon=lambda: self._drop_environment(operation),
        )
        lane = None if operation.number is None else operation.number % len(self._lanes)
        self._lanes.submit(task, lane)
        return Started(operation, task.future, task)

    def wait(self, started: Sequence[Started]) -> None:
        """Wait until all have a result.

        Raises:
            RuntimeError: If too many threads hang.
        """
        try:
            self._lanes.wait([one.task for one in started if one.task is not None], self._hanging)
            on_loop = [one for one in started if one.loop is not None]
            while pending := self._pending(on_loop):
                self._abandon_blocked(pending)
        except BaseException:
            for one in started:
                one.future.cancel()
            raise
        finally:
            for one in started:
                if one.may_run():
                    self._drop_environment(one.operation)

    def environment(self, number: int | None) -> Any:
        """The environment of that number, if it is in this process."""
        return None if number is None else self._host.instances.get(number)

    def close(self) -> None:
        """Stop the workers and the threads that do not hang, and drop the environments."""
        self._shut_down()
        self._host.instances.clear()

    def _start_workers(self) -> None:
        starts = [Task("tool workers", lambda worker: worker.start()) for _ in range(len(self._lanes))]
        try:
            for number, task in enumerate(starts):
                self._lanes.submit(task, number)
            for task in starts:
                task.future.result()
        except BaseException:
            self._shut_down()
            raise

    def _current_loop(self) -> BackgroundLoop:
        with self._lock:
            if not self._loops:
                self._loops.append(BackgroundLoop("async-tools"))
            return self._loops[0]

    def _pending(self, started: Sequence[Started]) -> list[Started]:
        """Wait at most as long as the longest limit; returns the operations that are not done."""
        running = [one for one in started if not one.future.done()]
        limit = max((one.operation.limit or math.inf for one in running), default=0.0)
        wait_for_futures([one.future for one in running], None if limit == math.inf else limit)
        return [one for one in running if not one.future.done()]

    def _abandon_blocked(self, pending: Sequence[Started]) -> None:
        """Abandon loops that no longer respond, and every operation on them."""
        for one in pending:
            assert one.loop is not None
            if one.future.done() or one.loop.answers(one.operation.limit):
                continue
            label = one.loop.abandon()
            with self._lock:
                if one.loop in self._loops:
                    self._loops.remove(one.loop)
            for other in pending:
                if other.loop is one.loop:
                    other.future.cancel()
            self._hanging.add(one.loop.thread, label)

    def _drop_environment(self, operation: Operation) -> None:
        if operation.uses_environment and operation.number is not None:
            self._host.drop(operation.number)


def _shut_down(lanes: Lanes, workers: ToolWorkers | None, loops: list[BackgroundLoop]) -> None:
    if workers is not None:
        workers.kill()
    lanes.close(wait_for_busy=workers is not None)
    if workers is not None:
        workers.close()
    for loop in loops:
        loop.close(2 * GRACE_SECONDS)


async def _run_with_limit(coroutine: Coroutine[Any, Any, T], limit: float | None) -> T:
    try:
        task = await run_with_limit(coroutine, limit)
    except OverTimeError as error:
        is_stuck = error.task is not None
        raise OperationTimeoutError(f"took longer than {limit} seconds", is_stuck=is_stuck) from None
    if task.cancelled():
        raise OperationCancelledError("raised CancelledError")
    return task.result()
