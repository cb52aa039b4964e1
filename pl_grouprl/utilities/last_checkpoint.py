"""Resolves `ckpt_path="last"` to the newest complete checkpoint of runs with the same name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.utilities.checkpoint_files import ABSENT, finish_interrupted, newest_complete, read_manifest
from pl_grouprl.utilities.run_options import changes_since, refused_changes, remedy
from pl_grouprl.utilities.verified_loading import remember_verified

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def last_checkpoint(trainer: Trainer, module: LightningModule | None = None) -> str:
    """Find the newest complete checkpoint of runs with the same logger folder and name.

    Without a logger, searches the runs in `default_root_dir`. A `dirpath` set on a checkpoint callback is searched too.
    Damaged checkpoints are skipped with a warning.

    Args:
        trainer: Its loggers and callbacks determine where to look.
        module: The module whose options are compared with the checkpoint's; None skips the comparison.

    Raises:
        ValueError: If there is none, or it is from a run with other options.
    """
    folders = [folder for folder in _folders(trainer) if folder.is_dir()]
    for folder in folders:
        finish_interrupted(folder)
    newest, damaged = newest_complete(path for folder in folders for path in folder.glob("*.ckpt"))
    for path, reason in damaged.items():
        rank_zero_warn(f"ckpt_path 'last' skips {path}: {reason}.")
    if newest is None:
        raise ValueError(
            f"ckpt_path is 'last' and there is no complete checkpoint below {runs_folder(trainer)}; leave "
            "ckpt_path out to start a new run, or pass the path of a checkpoint."
        )
    changes = {} if module is None else changes_since(read_manifest(newest), module)
    allowed = getattr(module, "allow_changed", ())
    if refused := refused_changes(changes, allowed):
        raise ValueError(
            f"ckpt_path is 'last', and {newest} is from a run with other options: {'; '.join(refused)}. Restore them; "
            f"{remedy(changes, allowed)}; or give this run another logger name."
        )
    remember_verified(newest)
    rank_zero_info(f"ckpt_path 'last' is {newest}")
    return str(newest)


def find_last(trainer: Trainer) -> None:
    """Make a Trainer resolve `ckpt_path="last"` with `last_checkpoint`. A second call changes nothing.

    Lightning itself asks the checkpoint callbacks what they saved. In a new process that is nothing, so it would start
    from scratch. A path that does not exist is refused here, before the models are loaded.
    """
    connector: Any = trainer._checkpoint_connector
    if "_parse_ckpt_path" in vars(connector):
        return
    parse = connector._parse_ckpt_path

    def parse_ckpt_path(state_fn: TrainerFn, ckpt_path: Any, **options: Any) -> Any:
        if ckpt_path == "last":
            ckpt_path = last_checkpoint(trainer, trainer.lightning_module if state_fn == TrainerFn.FITTING else None)
        chosen = parse(state_fn, ckpt_path, **options)
        _refuse_absent(chosen)
        return chosen

    connector._parse_ckpt_path = parse_ckpt_path


def _refuse_absent(checkpoint: Any) -> None:
    if checkpoint is None or "://" in str(checkpoint) or Path(checkpoint).exists():
        return
    if Path(checkpoint).parent.is_dir():
        finish_interrupted(Path(checkpoint).parent)  # a save that was killed may have moved it aside
    if not Path(checkpoint).exists() and not Path(checkpoint).is_symlink():
        raise FileNotFoundError(
            f"ckpt_path is {str(checkpoint)!r}: {ABSENT}. Pass the path of a checkpoint, or 'last' for the newest one "
            "of runs with this name."
        )


def runs_folder(trainer: Trainer) -> Path:
    """The folder of a run's versions: `<save_dir>/<name>`, or the root folder without a logger."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(trainer.default_root_dir if logger.save_dir is None else logger.save_dir, str(logger.name or ""))


def _folders(trainer: Trainer) -> list[Path]:
    callbacks = [callback for callback in trainer.checkpoint_callbacks if isinstance(callback, ModelCheckpoint)]
    dirpaths = [Path(str(callback.dirpath)) for callback in callbacks if callback.dirpath is not None]
    patterns = ["**/checkpoints"] if trainer.loggers else ["checkpoints", "version_*/checkpoints"]
    found = [place for pattern in patterns for place in runs_folder(trainer).glob(pattern)]
    return list(dict.fromkeys(place.resolve() for place in (*found, *dirpaths)))
