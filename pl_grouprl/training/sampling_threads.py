"""Threads that sample the prompts of a queue."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from pl_grouprl.training.queued_group import QueuedGroup
from pl_grouprl.training.rollout_queue import RolloutQueue
from pl_grouprl.types import RolloutGroup

Sample = Callable[[Sequence[QueuedGroup]], list[RolloutGroup]]
"""Samples the entries that a thread has started."""

NAME = "rollouts-ahead"
"""Name of the threads."""


class SamplingThreads:
    """Threads that sample until their queue is closed. Errors go to the queue.

    They do not keep the process alive.

    Args:
        queue: The queue.
        sample: Samples; called by several threads at once.
        whole_batches: Whether a thread samples all prompts of a batch together.
    """

    def __init__(self, queue: RolloutQueue, sample: Sample, *, whole_batches: bool) -> None:
        self._queue, self._sample, self._whole_batches = queue, sample, whole_batches
        self._threads: list[threading.Thread] = []

    def grow(self, count: int) -> None:
        """Start threads until there are `count`."""
        while len(self._threads) < count:
            thread = threading.Thread(target=self._run, name=f"{NAME}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the threads to end after the queue was closed.

        Args:
            seconds: Longest wait; None waits as long as it takes.

        Returns:
            Whether all have ended.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while entries := self._queue.start(self._whole_batches):
            try:
                groups = self._sample(entries)
            except BaseException as error:
                self._queue.fail(entries, error)
            else:
                self._queue.finish(entries, groups)
                del groups
            del entries
