"""How a module takes a checkpoint: verified, of its own algorithm, and from Python without a Trainer too."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl

from pl_grouprl.utilities.origin import compare_lineage, describe_misfit
from pl_grouprl.utilities.verified_loading import load_verified, verify_loads

if TYPE_CHECKING:
    from typing_extensions import Self


class LoadsCheckpoints(pl.LightningModule):
    """A module that refuses checkpoints that are damaged, or of another algorithm, and says so."""

    def __init__(self) -> None:
        super().__init__()
        self._checkpoint_lineage: list[str] | None = None

    def setup(self, stage: str) -> None:
        """Have checkpoints verified before they are loaded, in each stage and under each strategy."""
        verify_loads(self.trainer)

    def compare_origin(self, then: list[str] | None, what: str = "the checkpoint") -> None:
        """Refuse a checkpoint of another algorithm.

        Args:
            then: The `lineage` that it notes; None where it notes none.
            what: How to call it.
        """
        compare_lineage(self, then, what)
        self._checkpoint_lineage = then

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights.

        Raises:
            ValueError: If they do not fit: what the checkpoint is of, then torch's list.
        """
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(describe_misfit(self, self._checkpoint_lineage, str(error))) from None

    def load_checkpoint(self, checkpoint: dict[str, Any], *, strict: bool | None = None) -> None:
        """Build the models and take over a checkpoint that is in memory, in Lightning's order, without a Trainer."""
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
        """Build the module from the constructor's arguments, and give it the weights of a checkpoint.

        The checkpoint is verified, and no code in it is run. It does not hold the constructor's arguments.

        Args:
            checkpoint_path: A checkpoint of one file.
            map_location: The device that the module is moved to.
            strict: Whether weights that are missing or left over are an error; None is the module's `strict_loading`.
            weights_only: True; taken because Lightning takes it.
            **kwargs: The constructor's arguments.

        Raises:
            TypeError: If an argument of the constructor is missing.
            ValueError: If the checkpoint is damaged, a folder, of another algorithm, or does not fit.
        """
        if not weights_only:
            raise ValueError("weights_only is False, which would run code of the checkpoint; leave it out.")
        checkpoint = load_verified(checkpoint_path)
        saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # of a subclass that calls `save_hyperparameters`
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
    """Arguments of a constructor that have no default."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
