"""Where a run's own files go."""

from __future__ import annotations

from pathlib import Path

from lightning.pytorch import Trainer


def run_folder(trainer: Trainer) -> Path | None:
    """Return the folder of the first logger's version, or the Trainer's root folder where it has no logger.

    All ranks must call it, since rank 0 tells the others.

    Returns:
        The folder, which need not exist yet; None under `fast_dev_run`, which leaves no files.
    """
    if is_trial(trainer):
        return None
    folder = trainer.log_dir
    return Path(folder if folder is not None else trainer.default_root_dir)


def is_trial(trainer: Trainer) -> bool:
    """Whether the Trainer only tries a few batches (`fast_dev_run`)."""
    return bool(getattr(trainer, "fast_dev_run", False))
