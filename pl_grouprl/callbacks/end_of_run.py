"""Detects the end of a fit, and counts an unfinished epoch correctly."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer


def run_ends(trainer: Trainer) -> bool:
    """Whether the fit ends with this epoch; for `on_train_epoch_end`, before Lightning decides."""
    loop: Any = trainer.fit_loop
    limits = ((trainer.global_step, loop.max_steps), (loop.epoch_progress.current.processed, loop.max_epochs))
    reached = any(limit is not None and limit != -1 and count >= limit for count, limit in limits)
    return reached or (trainer.should_stop and loop._can_stop_early)


@contextlib.contextmanager
def epoch_as_it_stands(trainer: Trainer) -> Iterator[None]:
    """Context whose checkpoints count an interrupted epoch as unfinished, where Lightning counts it as done.

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
