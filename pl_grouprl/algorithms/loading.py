"""How a module loads a checkpoint: verified, written by the same algorithm, with or without a Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from pl_grouprl.utilities.last_checkpoint import find_last
from pl_grouprl.utilities.origin import compare_lineage, describe_misfit
from pl_grouprl.utilities.verified_loading import load_verified, verify_loads

if TYPE_CHECKING:
    from typing_extensions import Self


class LoadsCheckpoints(pl.LightningModule):
    """A module that refuses checkpoints that are damaged or were written by another algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_lineage: list[str] | None = None

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer that the module is attached to, which finds `ckpt_path="last"` as the command line does."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None:
            find_last(trainer)  # here, because Lightning chooses the checkpoint before it calls any hook

    def setup(self, stage: str) -> None:
        """Verify checkpoints before they are loaded, in every stage and under every strategy."""
        verify_loads(self.trainer)

    def compare_origin(self, then: list[str] | None, what: str = "the checkpoint") -> None:
        """Refuse a checkpoint of another algorithm.

        Args:
            then: The `lineage` that it records, or None.
            what: What the error calls it.
        """
        compare_lineage(self, then, what)
        self._checkpoint_lineage = then

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights.

        Raises:
            ValueError: If they do not fit. Says which module wrote the checkpoint, then torch's list.
        """
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(describe_misfit(self, self._checkpoint_lineage, str(error))) from None

    def load_checkpoint(self, checkpoint: dict[str, Any], *, strict: bool | None = None) -> None:
        """Build the models and restore a checkpoint held in memory, in Lightning's order but without a Trainer."""
        self.configure_model()
        self.on_load_checkpoint(checkpoint)
        self.load_state_dict(checkpoint["state_dict"], strict=self.strict_loading if strict is None else strict)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        *,
        map_location: Any = "cpu",
        strict: bool | None = None,
        weights_only: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Build the module from the constructor's arguments and load a checkpoint's weights into it.

        The checkpoint is verified, and no code in it is run. It does not hold the constructor's arguments.

        Args:
            checkpoint_path: A single-file checkpoint.
            map_location: The device to move the module to.
            strict: Whether missing or unexpected weights are an error; None uses the module's `strict_loading`.
            weights_only: Must be True; accepted for compatibility with Lightning.
            **kwargs: The constructor's arguments.

        Raises:
            TypeError: If an argument of the constructor is missing.
            ValueError: If the checkpoint is damaged, a folder, from another algorithm, or does not fit.
        """
        if not weights_only:
            raise ValueError("weights_only is False, which would run code in the checkpoint; leave it out.")
        checkpoint = load_verified(checkpoint_path)
        saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # if a subclass calls `save_hyperparameters`
        arguments = {name: value for name, value in saved.items() if not name.startswith("_")} | kwargs
        missing = [name for name in _required(cls) if name not in arguments]
        if missing:
            raise TypeError(
                f"{cls.__name__}.load_from_checkpoint lacks {' and '.join(missing)}: a checkpoint holds weights and no "
                f"arguments. Pass those of the constructor, {cls.__name__}.load_from_checkpoint(path, "
                f"{', '.join(f'{name}=...' for name in missing)}, ...), as in the run that saved it."
            )
        module = cls(**arguments)
        module.load_checkpoint(checkpoint, strict=strict)
        return module.to(map_location)


def _required(cls: type) -> list[str]:
    """The constructor's arguments that have no default."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
