"""The end of a run: by a signal, or with the current epoch; and how an unfinished epoch is counted."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)
"""Windows has neither SIGHUP, which a closed terminal sends, nor SIGUSR1."""

REPEAT_SECONDS = 5.0
"""A launcher and a scheduler may both pass a signal on; the same signal that much later is meant as another one."""


class StopRequest:
    """Remembers the first signal that asks to stop.

    A second Ctrl-C ends the process at once, and so does another signal that is repeated after `REPEAT_SECONDS`.

    Attributes:
        signum: The signal; 0 if there was none.
    """

    def __init__(self) -> None:
        self.signum = 0
        self._came_at: dict[int, float] = {}

    def listen(self) -> None:
        """Handle the signals, replacing handlers that act at once. Does nothing outside the main thread."""
        if threading.current_thread() is threading.main_thread():
            for signum in STOP_SIGNALS:
                if signum == signal.SIGINT or signal.getsignal(signum) != signal.SIG_IGN:  # nohup ignores SIGHUP
                    signal.signal(signum, self._remember)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # works even inside a collective, where no Python code runs
        elif time.monotonic() - self._came_at.setdefault(signum, time.monotonic()) > REPEAT_SECONDS:
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        if not self.signum:
            self.signum = signum
            name = signal.Signals(signum).name
            _write(2, f"\n{name}: the run saves a checkpoint after this batch and stops.\n")
            if name == "SIGHUP":
                _write(1, "\n")


def _write(descriptor: int, text: str) -> None:
    """Write to a terminal; if it is closed, discard this and all that follows, which would raise an error."""
    try:
        os.write(descriptor, text.encode())  # not print(): the signal may have interrupted one
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def stop_together(trainer: Trainer) -> None:
    """Make all ranks stop if one sets `trainer.should_stop`, wherever in a fit. Calling this again changes nothing.

    The ranks agree each time before Lightning's loops read it; otherwise the others would wait for that rank forever.
    """
    fit: Any = trainer.fit_loop
    if "run" in vars(fit):
        return

    def agree() -> None:
        trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)

    def agreeing(part: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any) -> None:
            agree()
            part(*args)
            agree()

        return run

    for name in ("run", "on_run_start", "on_advance_start", "on_advance_end"):
        setattr(fit, name, agreeing(getattr(fit, name)))
    fit.epoch_loop.on_advance_end = agreeing(fit.epoch_loop.on_advance_end)  # after a batch, and after a validation


def run_ends(trainer: Trainer) -> bool:
    """Whether the fit ends with this epoch; for `on_train_epoch_end`, where Lightning has not decided. Collective."""
    loop: Any = trainer.fit_loop
    limits = ((trainer.global_step, loop.max_steps), (loop.epoch_progress.current.processed, loop.max_epochs))
    reached = any(limit is not None and limit != -1 and count >= limit for count, limit in limits)
    stops = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)  # set in this hook, on any rank
    return reached or (stops and loop._can_stop_early)


@contextlib.contextmanager
def unfinished_epoch_counted(trainer: Trainer) -> Iterator[None]:
    """In checkpoints saved inside this context, count an interrupted epoch as unfinished; Lightning counts it as done.

    A run resumed from such a checkpoint continues with the rest of the epoch.
    """
    loop: Any = trainer.fit_loop
    progress = loop.epoch_progress
    if loop.epoch_loop.batch_progress.is_last_batch:
        yield
        return
    counts = (progress.current, progress.total)
    done = [(count.processed, count.completed) for count in counts]
    for count in counts:
        count.processed = min(count.processed, count.started - 1)
        count.completed = min(count.completed, count.started - 1)
    try:
        yield
    finally:
        for count, (processed, completed) in zip(counts, done, strict=True):
            count.processed, count.completed = processed, completed
