"""Validation before the first step, so curves start at the initial policy."""

from __future__ import annotations

import math

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_grouprl.callbacks.run_folder import is_trial
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options


@checked_arguments
class ValidateAtStart(Callback):
    """Run the validation loop once before training, and log it (verl's `val_before_train`).

    Lightning's sanity check also runs validation, but logs nothing; set `num_sanity_val_steps: 0` with this callback.
    A resumed run validates first too, because Lightning saves a checkpoint before the validation of the same step,
    which would otherwise be missing.

    Args:
        max_prompts: Validate the first batches of each validation loader, until they have this many prompts, so that
            training begins soon. None validates on all prompts, as later validations do; so does a callback with a
            `monitor` (early stopping, the best checkpoint), which would compare this score with later ones.

    Raises:
        ValueError: If `max_prompts` is less than 1.
    """

    def __init__(self, max_prompts: int | None = 256) -> None:
        check_options({"max_prompts": (max_prompts, max_prompts is None or max_prompts >= 1, "at least 1, or None")})
        self.max_prompts = max_prompts

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run validation as the training loop does between two steps."""
        if is_trial(trainer) or not trainer.enable_validation:
            return
        connector = trainer._logger_connector
        first_loop_iter = connector._first_loop_iter
        loop = trainer.fit_loop.epoch_loop.val_loop
        all_batches, size = loop._max_batches, getattr(getattr(trainer, "datamodule", None), "val_batch_size", 1)
        is_monitored = any(getattr(callback, "monitor", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        if self.max_prompts is not None and not is_monitored:
            most = math.ceil(self.max_prompts / size)
            loop._max_batches = [min(batches, most) for batches in all_batches]
        trainer.validating = True
        loop.run()
        trainer.training = True
        loop._max_batches = all_batches
        connector._first_loop_iter = first_loop_iter
