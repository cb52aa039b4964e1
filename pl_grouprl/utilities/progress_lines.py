"""Progress of long loops as plain lines, for output that goes to a file."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from pl_grouprl.utilities.text import encodable
from pl_grouprl.utilities.writes import OptionalWrites


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
        self._tenth = self._tenth_of(done)
        self._start = time.monotonic()
        self._writes = OptionalWrites("The progress display")
        self._print(done)

    def update(self, done: int, numbers: Mapping[str, Any] | None = None) -> None:
        """Print a line if another tenth is done.

        Args:
            done: Steps done so far.
            numbers: Metrics by name; those that are floats are printed.
        """
        if self._tenth_of(done) > self._tenth:
            self._tenth = self._tenth_of(done)
            self._print(done, numbers)

    def _tenth_of(self, done: int) -> int:
        return int(10 * done / self.total) if self.total else 0

    def _print(self, done: int, numbers: Mapping[str, Any] | None = None) -> None:
        parts = [f"{self.title}: {done}/{self.total:g}"]
        if done > self._first:
            elapsed = time.monotonic() - self._start
            parts.append(f"{_clock(elapsed)} elapsed")
            if done < self.total < float("inf"):
                parts.append(f"{_clock(elapsed / (done - self._first) * (self.total - done))} left")
        parts += [f"{name} {number:.3f}" for name, number in (numbers or {}).items() if isinstance(number, float)]
        with self._writes.to("standard output"):
            print(encodable(", ".join(parts)), flush=True)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
