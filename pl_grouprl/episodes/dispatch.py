"""Runs operations on tools and environments: async ones on an event loop, all others on lanes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass
from typing import Any, TypeVar

from pl_grouprl.episodes.environments import EnvironmentHost
from pl_grouprl.episodes.lanes import HangingThreads, Lanes, OperationCancelledError, OperationTimeoutError, Task
from pl_grouprl.episodes.tools import run_coroutine
from pl_grouprl.utilities.background_loop import BackgroundLoop

T = TypeVar("T")

MAX_THREADS = 64
"""How many calls of plain tools and environments run at the same time in threads."""

GRACE_SECONDS = 1.0
"""How long an async tool may take to end once it is cancelled."""


@dataclass(frozen=True)
class Operation:
    """A call of a method of `EnvironmentHost`.

    Attributes:
        name: Of the tool or environment, for errors.
        method: Name of the method.
        arguments: Its arguments.
        limit: Seconds that it may take; None for any time.
        waits: Whether it needs an event loop, because it calls an async function.
        number: Of the episode's environment, if there is one: plain operations with the same number run in order.
        uses_environment: Whether it uses that environment, which is lost if the operation does not end.
    """

    name: str
    method: str
    arguments: tuple[Any, ...]
    limit: float | None
    waits: bool = False
    number: int | None = None
    uses_environment: bool = True

    def make(self, host: EnvironmentHost) -> Coroutine[Any, Any, Any]:
        """The coroutine that does it."""
        coroutine: Coroutine[Any, Any, Any] = getattr(host, self.method)(*self.arguments)
        return coroutine


@dataclass(eq=False)
class Started:
    """An operation that has started, and its result."""

    operation: Operation
    future: Future[Any]
    task: Task | None = None

    def result(self) -> Any:
        """What it returned.

        Raises:
            OperationTimeoutError: If it took too long.
            OperationExitError: If its process ended.
            RuntimeError: What `EnvironmentHost` raises.
        """
        try:
            return self.future.result()
        except CancelledError:  # together with a loop that was abandoned
            raise OperationTimeoutError("was on an event loop that was blocked", is_stuck=True) from None

    def may_run(self) -> bool:
        """Whether it may still run."""
        if not self.future.done() or self.future.cancelled():
            return True
        error = self.future.exception()
        return isinstance(error, OperationTimeoutError) and error.is_stuck


class ThreadDispatcher:
    """Runs operations in this process.

    Args:
        host: Whose methods are called.
    """

    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host
        self._lanes = Lanes([host] * MAX_THREADS, "tools")
        self._hanging = HangingThreads()
        self._loop: BackgroundLoop | None = None

    def start(self, operation: Operation) -> Started:
        """Start an operation. Plain ones of an environment run in order."""
        if operation.waits:
            self._loop = self._loop or BackgroundLoop("async-tools")
            coroutine = _within(operation.make(self._host), operation.limit)
            return Started(operation, self._loop.submit(operation.name, coroutine))
        task = Task(
            operation.name,
            lambda host: run_coroutine(operation.make(host)),
            operation.limit,
            on_abandon=lambda: self._lose(operation),
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
            self._wait_for_loop({one.future for one in started if one.task is None}, started)
        except BaseException:
            for one in started:
                one.future.cancel()
            raise
        finally:
            self._lose_stuck(started)

    def environment(self, number: int | None) -> Any:
        """The environment of that number, if it is in this process."""
        return None if number is None else self._host.instances.get(number)

    def close(self) -> None:
        """End the threads that do not hang, and drop the environments."""
        self._lanes.close()
        if self._loop is not None:
            self._loop.close(GRACE_SECONDS)
            self._loop = None
        self._host.instances.clear()

    def _wait_for_loop(self, pending: Collection[Future[Any]], started: Sequence[Started]) -> None:
        limits = [math.inf if one.operation.limit is None else one.operation.limit for one in started if not one.task]
        limit = None if math.inf in limits else max(limits, default=0.0)
        while pending:
            _, pending = wait_for_futures(pending, limit)
            if pending and self._loop is not None and not self._loop.answers(limit):
                loop, self._loop = self._loop, None
                label = loop.abandon()
                for future in pending:
                    future.cancel()
                self._hanging.add(loop.thread, label)
                return

    def _lose_stuck(self, started: Sequence[Started]) -> None:
        """Forget the environments whose calls may still run."""
        for one in started:
            if one.may_run():
                self._lose(one.operation)

    def _lose(self, operation: Operation) -> None:
        if operation.uses_environment and operation.number is not None:
            self._host.lose(operation.number)


async def _within(coroutine: Coroutine[Any, Any, T], limit: float | None) -> T:
    """Wait for a coroutine, and cancel it if it takes too long."""
    clock = asyncio.get_running_loop().time
    began = clock()
    task = asyncio.ensure_future(coroutine)
    await asyncio.wait({task}, timeout=limit)
    if limit is None or (task.done() and clock() - began <= limit):  # it may have blocked the loop
        return task.result() if not task.cancelled() else _raise_cancelled()
    task.cancel()
    await asyncio.wait({task}, timeout=GRACE_SECONDS)
    raise OperationTimeoutError(f"took longer than {limit} seconds", is_stuck=not task.done())


def _raise_cancelled() -> Any:
    raise OperationCancelledError("was cancelled")
