"""Default callbacks: those of the YAML configurations, and those that a module adds to a plain Trainer."""

from __future__ import annotations

from functools import partial
from weakref import WeakSet

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelSummary, RichModelSummary, RichProgressBar
from lightning.pytorch.trainer.call import _call_configure_model

from pl_grouprl.callbacks.completions_table import CompletionsTable
from pl_grouprl.callbacks.export_policy import ExportPolicy
from pl_grouprl.callbacks.progress_bar import RunProgressBar
from pl_grouprl.callbacks.run_summary import RunSummary
from pl_grouprl.callbacks.safe_checkpoint import SafeCheckpoint
from pl_grouprl.callbacks.validate_at_start import ValidateAtStart
from pl_grouprl.callbacks.weight_summary import WeightSummary

_ADDED: WeakSet[Callback] = WeakSet()  # by modules, to any Trainer


class LoadModels(Callback):
    """Loads the models before the `setup` of callbacks that may read them, such as those that average weights.

    Lightning calls a module's `setup` and `configure_model` only after all callbacks' `setup`.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Set up the module and load them if there is such a callback."""
        vars(pl_module).pop("setup", None)  # if this failed before
        if any(_may_read_models(callback) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            pl_module.setup(stage)
            pl_module.setup = partial(_skip_one_setup, pl_module)  # type: ignore[method-assign]
            _call_configure_model(trainer)


def _skip_one_setup(module: LightningModule, stage: str) -> None:
    """Stands in for `setup` once, because it has already run; then the class's own is back."""
    vars(module).pop("setup", None)


def _may_read_models(callback: Callback) -> bool:
    """Whether it has a `setup` that is neither ours nor one of Lightning's that reads no models."""
    home = str(getattr(callback.setup, "__module__", ""))
    own = home.startswith(("lightning.", f"{__package__.partition('.')[0]}."))
    return not own or home.endswith(("weight_averaging", "weight_avg", "finetuning", "pruning"))


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
    trainer.callbacks = [_replacement(callback) for callback in trainer.callbacks]  # type: ignore[attr-defined]
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


def _replacement(callback: Callback) -> Callback:
    if type(callback) in (ModelSummary, RichModelSummary) and not callback._summarize_kwargs:  # type: ignore[attr-defined]
        return WeightSummary(callback._max_depth)  # type: ignore[attr-defined]
    if type(callback) is RichProgressBar:
        return RunProgressBar(callback._refresh_rate, callback._leave, callback.theme, callback._console_kwargs)
    return callback
