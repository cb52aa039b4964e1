"""Where the time of a training step goes: parts that add up to the whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.progress import PROGRESS


class StepTimer:
    """Charges every moment of a step to one part: the innermost that is running, or `other` where none is.

    A part that is entered inside another stops the outer one meanwhile, so no time counts twice, and the parts add up
    to the step whatever calls whatever. It belongs to the main thread.

    Time counts when it is charged, which `enter`, `leave` and `mark` do. What passes after the last of them is in no
    part: a step that ends with a `mark` leaves out what callbacks do behind it.

    Args:
        now: Gives the time in seconds, monotonic; None is `time.perf_counter`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.perf_counter
        self._seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin a step. Parts of earlier steps are known still, with 0 seconds."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._running = ["other"]
        self._charged_until = self._now()

    def enter(self, name: str) -> None:
        """Begin a part; `part` does so for a block of code."""
        self.mark()
        self._running.append(name)
        self._seconds.setdefault(name, 0.0)
        PROGRESS.enter(name)

    def leave(self) -> None:
        """End the part that was entered last."""
        self.mark()
        self._running.pop()
        PROGRESS.enter(self._running[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge what runs inside to a part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def mark(self) -> None:
        """Charge the time until now to the part that is running; it goes on running."""
        now = self._now()
        name = self._running[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._charged_until
        self._charged_until = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of the present step, `other` and their sum `step` among them."""
        parts = {"other": 0.0} | self._seconds
        return parts | {"step": sum(parts.values())}


class Throughput:
    """Tokens per second from the start of a rollout to its last update."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._is_whole = False

    def start(self) -> None:
        """Begin a rollout."""
        self._seconds, self._is_whole = 0.0, True

    def after_step(self, seconds: float, buffer: RolloutBuffer, updates_per_rollout: int) -> dict[str, float]:
        """Add a step; after the last one of a rollout, return `perf/tokens_per_second`.

        That is the number of sampled and trained tokens over the time for both. A resumed run does not know it for the
        rollout that it begins with.

        Args:
            seconds: How long the step took.
            buffer: The rollouts that it trained.
            updates_per_rollout: Steps of each rollout.
        """
        self._seconds += seconds
        if not self._is_whole or buffer.updates_done < updates_per_rollout:
            return {}
        return {"perf/tokens_per_second": buffer.num_tokens / self._seconds}
