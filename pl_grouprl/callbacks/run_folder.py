"""The folder of a run, never shared with another run; a run changes only files that it wrote."""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from pl_grouprl.utilities.checkpoint_files import process_name
from pl_grouprl.utilities.distributed import gather_plain, raise_on_all_ranks
from pl_grouprl.utilities.last_checkpoint import runs_folder
from pl_grouprl.utilities.writes import explain_os_error

MARKER = "run.json"
"""File that marks a folder as belonging to a run."""

T = TypeVar("T")


@dataclass
class _Run:
    folder: Path
    writers: dict[Path, int] = field(default_factory=dict)


_RUNS: WeakKeyDictionary[Trainer, _Run] = WeakKeyDictionary()


def run_folder(trainer: Trainer) -> Path | None:
    """Return the exclusive folder of a run. The first call is collective: rank 0 takes the folder.

    It is the folder of the first logger's version. If that belongs to another run, or there is no logger or version, it
    is a new `version_N` in the logger's folder or the Trainer's root folder.

    Returns:
        The folder, which exists; None under `fast_dev_run`, which leaves no files.

    Raises:
        OSError: On all ranks, if it cannot be created.
        ValueError: On all ranks, if it is not local.
    """
    if is_trial(trainer):
        return None
    if trainer not in _RUNS:
        _RUNS[trainer] = _Run(Path(on_rank_zero(trainer, lambda: str(_take_folder(trainer)))))
    return _RUNS[trainer].folder


def claim(
    trainer: Trainer, path: Path, writer: object, may_replace: Callable[[Path], bool] = lambda path: False
) -> None:
    """Reserve a path, in the run folder or elsewhere, for a callback's output. Collective.

    Args:
        trainer: Its `run_folder` must have been called.
        path: The file or folder.
        writer: The callback.
        may_replace: Whether the writer may replace what is there.

    Raises:
        FileExistsError: On rank 0, and OSError on the others, if something not written by this run is there.
        ValueError: If another callback of the Trainer writes there.
    """
    name, writers = type(writer).__name__, _RUNS[trainer].writers
    path = Path(os.path.abspath(path))
    if path in writers:  # claimed by another callback, or by this one in an earlier fit of the Trainer
        if writers[path] != id(writer):
            raise ValueError(f"{name} would write to {path}, as another callback does; give one of them another name.")
        return
    on_rank_zero(trainer, lambda: refuse_foreign(path, name, may_replace))
    writers[path] = id(writer)


def refuse_foreign(path: Path, writer: str, may_replace: Callable[[Path], bool]) -> None:
    """Raise FileExistsError if the path has something that may not be replaced."""
    if os.path.lexists(path) and not may_replace(path):
        raise FileExistsError(
            f"{writer} would write to {path}, which has something not written by this run; it is left untouched. "
            "Move it away, or give the run another folder (its logger, or default_root_dir)."
        )


def is_trial(trainer: Trainer) -> bool:
    """Whether the Trainer only runs a few trial batches (`fast_dev_run`)."""
    return bool(getattr(trainer, "fast_dev_run", False))


def on_rank_zero(trainer: Trainer, action: Callable[[], T]) -> T:
    """Run an action on rank 0 and return its result (plain values) on all ranks; if it fails, all ranks fail."""
    device = trainer.strategy.root_device
    result = raise_on_all_ranks(lambda: action() if trainer.is_global_zero else None, device, shared=OSError)
    return gather_plain(result, device)[0]


def _take_folder(trainer: Trainer) -> Path:
    folder, root = _logger_folder(trainer), runs_folder(trainer)
    place = folder or root
    if re.match(r"\w{2,}:/", str(place)):
        raise ValueError(f"The run folder would be in {place}; pass a logger or a default_root_dir that is local.")
    with explain_os_error(f"No run folder can be created in {place}"):
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if _take(folder):
                return folder
        folder = _next_version(place)
    rank_zero_info(f"Run folder: {folder}")
    return folder


def _next_version(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    numbers = [path.name.removeprefix("version_") for path in root.glob("version_*")]
    first = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
    for number in itertools.count(first):
        folder = root / f"version_{number}"
        try:
            folder.mkdir()
        except FileExistsError:  # another run was faster
            continue
        if _take(folder):
            return folder
    raise AssertionError


def _take(folder: Path) -> bool:
    """Create the marker in a folder; False if another run already has."""
    try:
        with (folder / MARKER).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"written_by": "pl_grouprl", "process": process_name()}) + "\n")
    except FileExistsError:
        return False
    return True


def _logger_folder(trainer: Trainer) -> Path | None:
    """Folder of the first logger's version; None if it has no version, or writes into a shared folder."""
    if not trainer.loggers:
        return None
    logger = trainer.loggers[0]
    folder = logger.log_dir
    if folder is None and logger.version not in (None, ""):
        version = logger.version if isinstance(logger.version, str) else f"version_{logger.version}"
        folder = str(runs_folder(trainer) / version)
    shared = {Path(trainer.default_root_dir).resolve(), Path.cwd()}
    return None if folder is None or Path(folder).resolve() in shared else Path(folder)
