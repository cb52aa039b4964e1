"""What this process is doing: for the progress display, plain log lines and the watchdog."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from pl_grouprl.utilities.text import encodable


class Progress:
    """Counts a process's progress and names its current phase.

    The watchdog and the progress display read it from other threads. Any thread may write; a lost count does no harm.

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


# Progress of long loops as plain lines, for output that goes to a file.


def shows_bars(**console_options: Any) -> bool:
    """Whether standard output can redraw a progress bar: true of a terminal or notebook, not of a file or pipe.

    Args:
        console_options: Passed to `rich.console.Console`.
    """
    from rich.console import Console

    console = Console(**console_options)
    return console.is_interactive or console.is_jupyter


class ProgressLines:
    """Prints a line at the start of a loop, at every tenth of it, and at its end. A failure to print is a warning.

    Args:
        title: Title of the loop.
        total: Total number of steps.
        done: Steps already done, in a resumed run.
    """

    def __init__(self, title: str, total: float, done: int = 0) -> None:
        self.title = title
        self.total = total
        self._first = done
        self._tenth = int(10 * done / total) if total else 0
        self._start = time.monotonic()
        from pl_grouprl.utilities.checkpoint_files import OptionalWrites  # Lightning, which reward workers do without

        self._writes = OptionalWrites("The progress display")
        self._print(done)

    def update(self, done: int, numbers: Mapping[str, Any] | None = None) -> None:
        """Print a line if another tenth is done.

        Args:
            done: Steps done so far.
            numbers: Metrics by name; floats are printed.
        """
        tenth = int(10 * done / self.total) if self.total else 0
        if tenth > self._tenth:
            self._tenth = tenth
            self._print(done, numbers)

    def _print(self, done: int, numbers: Mapping[str, Any] | None = None) -> None:
        parts = [f"{self.title}: {done}/{self.total:g}"]
        if done > self._first:
            elapsed = time.monotonic() - self._start
            parts.append(f"{timedelta(seconds=round(elapsed))} elapsed")
            if done < self.total < float("inf"):
                left = elapsed / (done - self._first) * (self.total - done)
                parts.append(f"{timedelta(seconds=round(left))} left")
        parts += [f"{name} {number:.3f}" for name, number in (numbers or {}).items() if isinstance(number, float)]
        with self._writes.to("standard output"):
            print(encodable(", ".join(parts)), flush=True)


# Tells the user what this process is doing when a phase takes long.

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
