"""Default callbacks, of the YAML configurations and of modules in a plain Trainer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.trainer.call import _call_configure_model

from pl_grouprl.callbacks.checkpoints import SafeCheckpoint, is_trial
from pl_grouprl.callbacks.completions_table import CompletionsTable
from pl_grouprl.callbacks.export_policy import ExportPolicy
from pl_grouprl.callbacks.progress_bar import RunProgressBar
from pl_grouprl.callbacks.run_summary import RunSummary, WeightSummary
from pl_grouprl.utilities.options import check_fields


@dataclass(eq=False, repr=False)
class ValidateAtStart(Callback):
    """Run the validation loop once before training, and log it (verl's `val_before_train`).

    Lightning's sanity check also runs validation, but logs nothing; set `num_sanity_val_steps: 0` with this callback.
    A resumed run validates first too, because Lightning saves a checkpoint before the validation of the same step,
    which would otherwise be missing.

    Attributes:
        max_prompts: Validate the first batches of each validation loader, until they have this many prompts, so that
            training begins soon. None validates on all prompts, as later validations do; so does a callback with a
            `monitor` (early stopping, the best checkpoint), which would compare this score with later ones.

    Raises:
        ValueError: If `max_prompts` is less than 1.
    """

    max_prompts: int | None = 256

    def __post_init__(self) -> None:
        check_fields(self, max_prompts=(self.max_prompts is None or self.max_prompts >= 1, "at least 1, or None"))

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


_ADDED: WeakSet[Callback] = WeakSet()  # by modules, to any Trainer


class LoadModels(Callback):
    """Loads the models before the `setup` of callbacks that may read them, such as averages of weights.

    Lightning calls a module's `setup` and `configure_model` only after all callbacks' `setup`.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set up the module and load them if there is such a callback."""
        vars(pl_module).pop("setup", None)  # if this failed before
        readers = ("weight_averaging", "weight_avg", "finetuning", "pruning")  # of Lightning's callbacks
        homes = [str(getattr(callback.setup, "__module__", "")) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        if any(not home.startswith(("lightning.", "pl_grouprl.")) or home.endswith(readers) for home in homes):
            pl_module.setup(stage)
            pl_module.setup = partial(_skip_one_setup, pl_module)  # type: ignore[method-assign]
            _call_configure_model(trainer)


def _skip_one_setup(module: LightningModule, stage: str) -> None:
    """Stands in for `setup` once, because it has already run; then the class's own is back."""
    vars(module).pop("setup", None)


def default_callbacks(*, save_every_n_steps: int = 100, show_every_n_steps: int = 10) -> list[Callback]:
    """Return the callbacks of the configurations in `configs/base`, for a Trainer created in Python.

    They write checkpoints that survive a kill, validate before the first step, show completions, export the policy, and
    summarize the run with curves. All files go to the run folder.

    Args:
        save_every_n_steps: Optimizer steps between checkpoints; the last step is always saved.
        show_every_n_steps: Optimizer steps between tables of completions.

    Raises:
        ValueError: If a number is less than 1.
    """
    return [
        SafeCheckpoint(every_n_train_steps=save_every_n_steps, save_last=True),
        ValidateAtStart(),
        CompletionsTable(every_n_steps=show_every_n_steps),
        ExportPolicy(),
        RunSummary(),
    ]


def callbacks_of_module(trainer: Trainer) -> list[Callback]:
    """The callbacks that a module adds to its Trainer: a summary with curves, unless there is one or no logger.

    Also replaces Lightning's table of weights and progress bar by this package's, with the same options.
    """
    callbacks: list[Callback] = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback) in (ModelSummary, RichModelSummary) and not callback._summarize_kwargs:
            callback = WeightSummary(callback._max_depth)
        elif type(callback) is RichProgressBar:
            callback = RunProgressBar(callback._refresh_rate, callback._leave, callback.theme, callback._console_kwargs)
        callbacks.append(callback)
    trainer.callbacks = callbacks  # type: ignore[attr-defined]
    if not trainer.loggers or any(isinstance(callback, RunSummary) for callback in trainer.callbacks):  # type: ignore[attr-defined]
        return []
    return [RunSummary()]


def replace_earlier(trainer: Trainer, added: list[Callback]) -> list[Callback]:
    """Detach what a module added for an earlier run, so that Lightning does not report it as overridden.

    Args:
        trainer: The Trainer, on its first or a later run.
        added: What the module adds for this run; returned.
    """
    trainer.callbacks = [callback for callback in trainer.callbacks if callback not in _ADDED]  # type: ignore[attr-defined]
    _ADDED.update(added)
    return added
