"""Progress of this process, read by a watchdog on another thread."""

from __future__ import annotations


class Progress:
    """Counts a process's progress and names its current phase. Any thread may write; a lost count does no harm.

    Attributes:
        count: Incremented by any progress, such as a decoding step or a reward call.
        phase: The main thread's current phase.
        step: The optimizer step.
    """

    def __init__(self) -> None:
        self.count = 0
        self.phase = "start"
        self.step = 0

    def enter(self, phase: str) -> None:
        """Begin a phase."""
        self.phase = phase
        self.count += 1


PROGRESS = Progress()
"""The progress of this process."""


def tick() -> None:
    """Count progress. Long loops without communication call it, so they do not look hung."""
    PROGRESS.count += 1
