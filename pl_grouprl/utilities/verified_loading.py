"""Verifies checkpoints before anything in them is loaded, by any route, and before saving that they will load."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from pl_grouprl.utilities.checkpoint_files import ABSENT, corruption_reason, finish_interrupted, read_manifest
from pl_grouprl.utilities.distributed import gather_plain, own_rank

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_WEIGHTS_AND_OPTIMIZERS = ("state_dict", "optimizer_states")

_just_verified: dict[Path, list[tuple[str, int, int]]] = {}
"""Checkpoints that a search has just verified, with the names, sizes and change times of their files."""


def verify_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Refuse a damaged checkpoint. Collective; rank 0 reads the files and tells the others.

    Args:
        path: A file or a folder. A URL such as `s3://...` is left to Lightning, with a warning.
        device: Device for communication; the rank's GPU under NCCL.

    Raises:
        FileNotFoundError: On all ranks, if any of them cannot find it.
        ValueError: On all ranks, if it is damaged; says what is wrong.
    """
    if "://" in str(path):
        from lightning.pytorch.utilities.rank_zero import rank_zero_warn

        rank_zero_warn(f"checkpoint {path} is not a local file or folder, so it is loaded without being verified.")
        return
    checkpoint = Path(path)
    found = _corruption_reason(checkpoint) if own_rank() == 0 else None if checkpoint.exists() else ABSENT
    for rank, reason in enumerate(gather_plain(found or "", device)):
        if reason == ABSENT:
            raise FileNotFoundError(f"checkpoint {path}: {ABSENT}{f' (rank {rank})' if rank else ''}.")
        if reason:
            raise ValueError(f"checkpoint {path} is damaged: {reason}. Nothing of it was loaded; choose another one.")


def verify_loads(trainer: Trainer) -> None:
    """Make a Trainer verify every checkpoint before loading it, and save none that would not load.

    Calling this again changes nothing.
    """
    from lightning.pytorch.strategies import Strategy

    strategy = trainer.strategy
    if "load_checkpoint" in vars(strategy):
        return
    load = strategy.load_checkpoint
    reads_files = type(strategy).load_checkpoint is Strategy.load_checkpoint

    def load_checkpoint(checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        verify_checkpoint(checkpoint_path, strategy.root_device)
        compare = getattr(getattr(trainer.lightning_module, "run_checkpoint", None), "compare_origin", None)
        if compare is not None and "://" not in str(checkpoint_path):
            compare(read_manifest(Path(checkpoint_path)).get("module"), f"checkpoint {checkpoint_path}")
        if not reads_files:
            return load(checkpoint_path, weights_only=weights_only)
        _refuse_folder(checkpoint_path, f"{type(strategy).__name__} reads files; use the strategy that wrote it")
        return _read(checkpoint_path, lambda: load(checkpoint_path, weights_only=weights_only))

    save = strategy.save_checkpoint
    # Strategies that shard weights write these in their own formats.
    own_formats = () if type(strategy).save_checkpoint is Strategy.save_checkpoint else _WEIGHTS_AND_OPTIMIZERS

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        refuse_unloadable({name: part for name, part in checkpoint.items() if name not in own_formats})
        save(checkpoint, *args, **kwargs)

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign, assignment]
    strategy.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


def refuse_unloadable(parts: dict[str, Any]) -> None:
    """Refuse parts of a checkpoint that would not load (`weights_only=True`): anything but tensors and plain values.

    Raises:
        TypeError: Names the place of the first.
    """
    place, value = "checkpoint", tree_map_only(torch.Tensor, lambda tensor: None, parts)
    while not _loads(value):
        entries = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        found = next(((name, part) for name, part in entries if not _loads(part)), None)
        if found is None:
            raise TypeError(
                f"{place} is a {type(value).__name__}, and loading a checkpoint gives only tensors and plain values; "
                "leave it out (save_hyperparameters takes names, or ignore=[...]), or save plain values of it."
            )
        place, value = f"{place}[{found[0]!r}]", found[1]


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a user's object may raise anything
        return False
    return True


def load_verified(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a single-file checkpoint to the CPU, outside a Trainer; no code in it is run.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, a folder, not from Lightning, or has more than tensors and plain values.
    """
    verify_checkpoint(path)
    _refuse_folder(path, "load it with ckpt_path of a Trainer and the strategy that wrote it")
    return _read(path, lambda: torch.load(path, map_location="cpu", weights_only=True))


def remember_verified(checkpoint: Path) -> None:
    """Remember that a checkpoint was just verified, so the following load does not verify it again."""
    _just_verified[checkpoint.resolve()] = _state(checkpoint.resolve())


def _corruption_reason(checkpoint: Path) -> str | None:
    if not checkpoint.exists() and checkpoint.parent.is_dir():
        finish_interrupted(checkpoint.parent)  # it may have been moved aside when a save was killed
    if _just_verified.pop(checkpoint.resolve(), None) == _state(checkpoint.resolve()):
        return None
    return corruption_reason(checkpoint)


def _state(checkpoint: Path) -> list[tuple[str, int, int]]:
    files = sorted(checkpoint.rglob("*")) if checkpoint.is_dir() else [checkpoint]
    return [(str(path), path.stat().st_size, path.stat().st_ctime_ns) for path in files if path.exists()]


def _refuse_folder(path: str | os.PathLike[str], instead: str) -> None:
    if Path(path).is_dir():
        raise ValueError(
            f"checkpoint {path} is a folder, as FSDP and DeepSpeed write: {instead}, or make one file of it with "
            "`python -m lightning.pytorch.utilities.consolidate_checkpoint` (FSDP only)."
        )


def _read(path: str | os.PathLike[str], load: Callable[[], Any]) -> dict[str, Any]:
    try:
        checkpoint = load()
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"checkpoint {path} has more than tensors and plain values, and code in it is never run: {error}"
        ) from None
    except (RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f"checkpoint {path} cannot be read: {error}") from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise ValueError(
            f"checkpoint {path} was not written by Lightning: it has no 'state_dict'. To start from weights of another "
            "program, pass a Hugging Face folder as the policy."
        )
    return checkpoint
