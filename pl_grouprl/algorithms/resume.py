"""What Lightning's checkpoints get wrong for runs that end amid an epoch."""

from __future__ import annotations

from typing import Any


def mark_epoch_unfinished(checkpoint: dict[str, Any]) -> None:
    """Take back that an epoch was completed where the run only stopped in it, by `max_steps` for one.

    Lightning counts the epoch as done before it saves the last checkpoint of a run. A run that goes on from there would
    skip the rest of the epoch, or do nothing at all under `max_epochs: 1`. After this the checkpoint says what one
    says that was saved at the same step amid the epoch.

    Args:
        checkpoint: What Lightning is about to save; changed in place.
    """
    loop = checkpoint.get("loops", {}).get("fit_loop")
    if loop is None or loop["epoch_loop.batch_progress"]["is_last_batch"]:
        return
    progress = loop["epoch_progress"]
    if progress["current"]["completed"] < progress["current"]["ready"]:
        return
    for counts in (progress["current"], progress["total"]):
        counts["processed"] -= 1
        counts["completed"] -= 1
    checkpoint["epoch"] = progress["current"]["processed"]
