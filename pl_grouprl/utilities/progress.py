"""Progress of this process, which the watchdog and the progress display read from other threads."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Counts a process's progress and names its current phase. Any thread may write; a lost count does no harm.

    Attributes:
        count: Incremented by any progress, such as a decoding step or a reward call.
        phase: The main thread's current phase.
        since: When the phase began, by `time.monotonic`.
        tokens: Tokens sampled in this phase; some samplers also count the padding of finished sequences.
        step: The optimizer step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.phase = "start"
        self.since = time.monotonic()
        self.tokens = 0
        self.step = 0

    def enter(self, phase: str) -> None:
        """Begin a phase, or continue it."""
        if phase != self.phase:
            self.phase, self.since, self.tokens = phase, time.monotonic(), 0
        self.count += 1

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Set the phase inside this context, then restore the previous one."""
        previous = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)


PROGRESS = Progress()
"""The progress of this process."""


def tick(tokens: int = 0) -> None:
    """Count progress. Long loops without communication call it, so they do not look hung.

    Args:
        tokens: Tokens sampled since the last call.
    """
    PROGRESS.count += 1
    PROGRESS.tokens += tokens
