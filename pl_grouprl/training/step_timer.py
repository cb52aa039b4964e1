"""Breaks a training step's time down into parts that add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.progress import PROGRESS


class StepTimer:
    """Charges all time of a step to the innermost running part, or to `other` if none is running.

    A nested part pauses the outer one, so no time counts twice. For the main thread only.

    Time is charged by `enter`, `leave` and `mark`; time after the last of them belongs to no part. A step that ends
    with `mark` thus excludes later callbacks.

    Args:
        now: Monotonic clock in seconds; None is `time.perf_counter`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.perf_counter
        self._seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin a step. Parts of earlier steps stay listed, with 0 seconds."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._running = ["other"]
        self._charged_until = self._now()

    def enter(self, name: str) -> None:
        """Begin a part; see `part` for a context manager."""
        self.mark()
        self._running.append(name)
        self._seconds.setdefault(name, 0.0)
        PROGRESS.enter(name)

    def leave(self) -> None:
        """End the innermost part."""
        self.mark()
        self._running.pop()
        PROGRESS.enter(self._running[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside this context to a part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def mark(self) -> None:
        """Charge the time until now to the running part, without ending it."""
        now = self._now()
        name = self._running[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._charged_until
        self._charged_until = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of the current step, with `other` and the sum, `step`."""
        parts = {"other": 0.0} | self._seconds
        return parts | {"step": sum(parts.values())}


class Throughput:
    """Tokens per second, from the start of a rollout to its last update."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._is_whole = False

    def start(self) -> None:
        """Begin a rollout."""
        self._seconds, self._is_whole = 0.0, True

    def after_step(self, seconds: float, buffer: RolloutBuffer, updates_per_rollout: int) -> dict[str, float]:
        """Add a step; after the last one of a rollout, return `perf/tokens_per_second`.

        This is the rollout's tokens over the time to sample and train them. It is not returned for the first rollout of
        a run that was resumed after sampling it.

        Args:
            seconds: How long the step took.
            buffer: The rollouts that it trained.
            updates_per_rollout: Steps per rollout.
        """
        self._seconds += seconds
        if not self._is_whole or buffer.updates_done < updates_per_rollout:
            return {}
        return {"perf/tokens_per_second": buffer.num_tokens / self._seconds}
