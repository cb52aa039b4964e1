"""Tells the user what this process is doing when a phase takes long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from pl_grouprl.utilities.progress import PROGRESS, Progress

SHOWN_AFTER = 2.0
"""Seconds after which a phase is shown."""

REPEATED_AFTER = 30.0
"""Seconds between lines; also before the first line of a phase that an earlier line has named."""

TITLES = {
    "setup": "Setting up",
    "training batch": "Preparing a training batch",
    "rollout": "Sampling rollouts",
    "reward": "Waiting for rewards",
    "exchange": "Exchanging rollouts between ranks",
    "old_logprobs": "Scoring rollouts: log-probabilities before the update",
    "ref_logprobs": "Scoring rollouts: reference policy",
    "teacher_logprobs": "Scoring rollouts: teacher",
    "values": "Scoring rollouts: critic",
    "advantages": "Computing advantages",
    "update": "Updating the policy",
    "other": "Rest of the training step",
    "end of a training batch": "Callbacks after the training step",
    "saving a checkpoint": "Saving a checkpoint",
    "loading a checkpoint": "Loading a checkpoint",
    "end of the run": "Ending the run",
    "validation": "Validation",
    "test": "Test",
}
"""Titles of phases; a phase without one is shown by its name."""

_SILENT = ("start", "warm start")
"""Phases that are never shown: `start` says nothing, and the warm start shows its own progress."""

_SAMPLING = ("rollout", "validation", "test")
"""Phases shown with the number of tokens sampled."""


class PhaseDisplay:
    """Shows the current phase of a process, from a thread, once it has lasted two seconds.

    The first time that a phase lasts so long, a line is printed at once; later only every half minute, so a long run
    does not print a line for every short phase.

    Args:
        print_line: Called with each line.
        refresh: Called about once a second, for a display that shows `text`.
        progress: The progress to show.
        now: Clock of `progress`.
    """

    def __init__(
        self,
        print_line: Callable[[str], None],
        refresh: Callable[[], None] = lambda: None,
        progress: Progress = PROGRESS,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._print_line = print_line
        self._refresh = refresh
        self._progress = progress
        self._now = now
        self._since = 0.0
        self._due = 0.0
        self._named: set[str] = set()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._progress.enter("start")
        self._stopped.clear()
        self._thread = threading.Thread(target=self._run, name="phase display", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None

    def text(self) -> str:
        """The current phase, such as `Sampling rollouts: 4,096 tokens, 12 s`; empty if it began less than 2 s ago."""
        phase, tokens, seconds = self._progress.phase, self._progress.tokens, self._now() - self._progress.since
        if phase in _SILENT or seconds < SHOWN_AFTER:
            return ""
        counted = f"{tokens:,} tokens, " if tokens and phase in _SAMPLING else ""
        return f"{TITLES.get(phase, phase)}: {counted}{seconds:.0f} s"

    def check(self) -> None:
        """Print a line if one is due."""
        phase, since = self._progress.phase, self._progress.since
        if since != self._since:
            self._since = since
            self._due = since + (REPEATED_AFTER if phase in self._named else SHOWN_AFTER)
        text = self.text()
        if text and self._now() >= self._due:
            self._named.add(phase)
            self._due = self._now() + REPEATED_AFTER
            self._print_line(text)

    def _run(self) -> None:
        while not self._stopped.wait(1.0):
            self.check()
            self._refresh()
