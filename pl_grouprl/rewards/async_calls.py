"""Runs coroutine reward functions on an event loop in a separate thread, which is abandoned if a function blocks it.

The loop is kept across batches, because HTTP clients that a reward function keeps are bound to it. It has its own
thread because this one may already run a loop, as in notebooks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any

from pl_grouprl.rewards.call import Call, Failure, Outcome, attempt_async, too_slow
from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.utilities.background_loop import BackgroundLoop, OverTimeError, run_with_limit
from pl_grouprl.utilities.exit_gate import exits_refused

log = logging.getLogger(__name__)

MAX_ABANDONED_CALLS = 256
"""The run ends when this many cancelled calls are still running."""

MAX_BLOCKED_THREADS = 8
"""Number of threads stuck in blocking functions at which the run ends."""


class AsyncCalls:
    """Calls of a coroutine function, started on construction.

    Args:
        reward: The function.
        calls: The calls, which run concurrently.
        retries: Retries of a call that raised.
        timeout: Seconds that each attempt may take; None for no limit.
    """

    def __init__(self, reward: PreparedReward, calls: Sequence[Call], retries: int, timeout: float | None) -> None:
        self._reward = reward
        self._calls = calls
        self._retries = retries
        self._timeout = timeout
        self._futures: dict[int, Future[Outcome]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._begin(range(len(calls)))

    def wait(self) -> list[Outcome]:
        """Wait for the outcomes.

        Raises:
            RuntimeError: If too many threads are stuck in blocking functions.
            RewardConfigurationError: If the function raises it.
            ValueError: If it returned the wrong type or length.
        """
        while pending := self._pending():
            if self._loop.answers(self._timeout):
                continue
            name = _abandon(self._loop)
            if name in ("", self._reward.name):
                blocked = Failure(
                    f"took longer than reward_timeout={self._timeout} seconds and blocked its event loop; await "
                    "whatever takes time (asyncio.sleep, an asynchronous client), or make it a plain function"
                )
                self._outcomes |= dict.fromkeys(pending, blocked)
            else:
                self._begin(pending)
        return [
            self._outcomes[number] if number in self._outcomes else self._futures[number].result()
            for number in range(len(self._calls))
        ]

    def cancel(self) -> None:
        """Cancel calls that are still running."""
        for future in self._futures.values():
            future.cancel()

    def _begin(self, numbers: Sequence[int]) -> None:
        self._loop = _current_loop()
        for number in numbers:
            attempts = _attempt_in_time(self._reward, self._calls[number], self._retries, self._timeout)
            self._futures[number] = self._loop.submit(self._reward.name, attempts)

    def _pending(self) -> list[int]:
        """Wait for at most one call's timeout; returns the calls without an outcome, cancelled ones included."""
        waited = {number: future for number, future in self._futures.items() if number not in self._outcomes}
        wait_for_futures(waited.values(), self._timeout)
        return [number for number, future in waited.items() if not future.done() or future.cancelled()]


async def _attempt_in_time(reward: PreparedReward, call: Call, retries: int, timeout: float | None) -> Outcome:
    failure = Failure("was not called")
    for _ in range(retries + 1):
        with exits_refused():
            try:
                task = await run_with_limit(attempt_async(reward, call), timeout)
            except OverTimeError as error:
                if error.task is not None:
                    _abandon_task(reward.name, error.task)
                return too_slow(timeout)
        outcome = Failure("raised CancelledError") if task.cancelled() else task.result()
        if not isinstance(outcome, Failure):
            return outcome
        failure = outcome
    return failure


_loops: dict[int, BackgroundLoop] = {}
_blocked: list[threading.Thread] = []
_abandoned: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""Calls that did not end when they were cancelled."""
_lock = threading.Lock()


def _current_loop() -> BackgroundLoop:
    """The loop of this process; forks do not inherit threads, so they get their own."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = BackgroundLoop("reward-functions")
        return _loops[os.getpid()]


def _abandon_task(name: str, task: asyncio.Task[Any]) -> None:
    _abandoned.add(task)
    running = sum(not other.done() for other in _abandoned)
    if running >= MAX_ABANDONED_CALLS:
        raise RuntimeError(
            f"{running} calls of async reward functions are still running after they were cancelled, the last one of "
            f"{name!r}; let it end when it is cancelled (no bare `except`, no long `await` in `finally`)."
        )
    log.warning("Reward function %r is still running after it was cancelled; the call is abandoned.", name)


def _abandon(loop: BackgroundLoop) -> str:
    """Give later calls a new loop, unless too many threads are stuck; returns the function that blocks this one."""
    name = loop.abandon()
    with _lock:
        if _loops.get(os.getpid()) is not loop:  # already done
            return name
        del _loops[os.getpid()]
        _blocked[:] = [thread for thread in (*_blocked, loop.thread) if thread.is_alive()]
        if len(_blocked) >= MAX_BLOCKED_THREADS:
            raise RuntimeError(
                f"{len(_blocked)} threads are stuck in async reward functions that block their event loop, the last "
                f"one in {name!r}; await whatever takes time, or make it a plain function and set reward_workers."
            )
    log.warning("Reward function %r blocks its event loop; its thread is abandoned.", name)
    return name
