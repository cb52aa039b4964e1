"""Validation before the first step, so curves start at the initial policy."""

from __future__ import annotations

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_grouprl.callbacks.run_folder import is_trial


class ValidateAtStart(Callback):
    """Run the validation loop once before training, and log it (verl's `val_before_train`).

    Lightning's sanity check also runs validation, but logs nothing; set `num_sanity_val_steps: 0` with this callback.
    A resumed run validates first too, because Lightning saves a checkpoint before the validation of the same step,
    which would otherwise be missing.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Run validation as the training loop does between two steps."""
        if is_trial(trainer) or not trainer.enable_validation:
            return
        connector = trainer._logger_connector
        first_loop_iter = connector._first_loop_iter
        trainer.validating = True
        trainer.fit_loop.epoch_loop.val_loop.run()
        trainer.training = True
        connector._first_loop_iter = first_loop_iter
