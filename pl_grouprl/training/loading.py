"""Loads a module's checkpoint without a Trainer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from pl_grouprl.utilities.verified_loading import load_verified


def module_from_checkpoint(
    cls: Any, path: str | Path, *, map_location: Any, strict: bool | None, weights_only: bool, arguments: dict[str, Any]
) -> Any:
    """Build a module and load a checkpoint's weights into it; see `RLModule.load_from_checkpoint`."""
    if not weights_only:
        raise ValueError("weights_only is False, which would let the checkpoint run code; leave it out.")
    checkpoint = load_verified(path)
    saved = checkpoint.get(cls.CHECKPOINT_HYPER_PARAMS_KEY, {})  # if a subclass calls `save_hyperparameters`
    arguments = {name: value for name, value in saved.items() if not name.startswith("_")} | arguments
    missing = [name for name in _required(cls) if name not in arguments]
    if missing:
        raise TypeError(
            f"{cls.__name__}.load_from_checkpoint lacks {' and '.join(missing)}: a checkpoint has weights but no "
            f"constructor arguments. Call {cls.__name__}.load_from_checkpoint(path, "
            f"{', '.join(f'{name}=...' for name in missing)}, ...) with the arguments of the run that saved it."
        )
    module = cls(**arguments)
    load_checkpoint(module, checkpoint, strict=strict)
    return module.to(map_location)


def load_checkpoint(module: Any, checkpoint: dict[str, Any], *, strict: bool | None = None) -> None:
    """Build the models and restore an in-memory checkpoint, in Lightning's order but without a Trainer."""
    module.configure_model()
    module.on_load_checkpoint(checkpoint)
    module.load_state_dict(checkpoint["state_dict"], strict=module.strict_loading if strict is None else strict)


def _required(cls: type) -> list[str]:
    """The constructor's arguments that have no default."""
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
