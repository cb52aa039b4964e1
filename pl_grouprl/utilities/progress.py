"""What this process is doing, for a watchdog on another thread to read."""

from __future__ import annotations


class Progress:
    """Counts a process's progress and names its current phase. Any thread may write; a lost count does no harm.

    Attributes:
        count: Grows with everything that gets done, such as a decoding step or a reward call.
        phase: What the main thread is doing.
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
    """Count one more thing done. Long loops without communication call it, so that they do not look hung."""
    PROGRESS.count += 1
