"""Checkpoints on disk: written whole or not at all, verified before they are read.

A checkpoint is a file or, where each rank writes its part, a folder. Its manifest, `NAME.manifest.json` next to a file
and `manifest.json` inside a folder, has the size and the SHA-256 of each file. To check checkpoints manually:

    python -m pl_grouprl.utilities.checkpoint_files PATH...
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch.utils._pytree import tree_map_only

from pl_grouprl.utilities.describe import allowed_changes, changes_since, refused_changes, remedy
from pl_grouprl.utilities.distributed import gather_plain, own_rank

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# Any file: atomic writes, and writes whose failure does not end a run.


def process_name() -> str:
    """Host and process id, which distinguish the unfinished files of a live run from those of a killed one."""
    return f"{socket.gethostname()}-{os.getpid()}"


def unfinished_path(target: Path, owner: str | None = None) -> Path:
    """Temporary path of a file or folder while a process writes it, on the same file system; this one by default."""
    return target.with_name(f".{target.name}.unfinished-{owner or process_name()}")


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it; if that fails, the old file stays in place.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path)
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, all or nothing: a full disk leaves no partial line.

    Raises:
        OSError: If the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        rest = memoryview(content)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(size)
            raise


class OptionalWrites:
    """Writes that only record a run: the first failure is a warning, and training continues.

    Args:
        writer: Name of the writer, for the warning.
    """

    def __init__(self, writer: str) -> None:
        self.writer = writer
        self._warned = False

    @contextmanager
    def to(self, place: object, errors: type[Exception] = OSError) -> Iterator[None]:
        """Turn such an error inside the context into a warning that names the place and the remedy."""
        try:
            yield
        except errors as error:
            self.warn(place, error)

    def warn(self, place: object, error: Exception) -> None:
        """Warn, once."""
        if not self._warned:
            self._warned = True
            remedy = "; free space there, or make it writable" if isinstance(error, OSError) else ""
            rank_zero_warn(f"{self.writer} cannot write to {place}: {error}. Training continues without it{remedy}.")


@contextmanager
def explain_os_error(what: str) -> Iterator[None]:
    """Add to file system errors what could not be written and what to do."""
    try:
        yield
    except OSError as error:
        raise OSError(f"{what}: {error}. The folder must be writable and have space.") from error


# Checkpoints: written under a temporary name, renamed when complete, and checked against their manifest.

_MANIFEST = "manifest.json"
ABSENT = "there is no such file or folder"
NO_MANIFEST = "it has no manifest"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?:unfinished|former)-(?P<host>.+)-(?P<pid>\d+)")


def manifest_of(checkpoint: Path) -> Path:
    """Where the manifest of a checkpoint is."""
    checkpoint = checkpoint.resolve()  # `last` may be a link
    return checkpoint / _MANIFEST if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{_MANIFEST}")


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The facts that the manifest records besides the hashes; empty without a manifest."""
    manifest = manifest_of(checkpoint)
    facts: dict[str, Any] = json.loads(manifest.read_text(encoding="utf-8")) if manifest.is_file() else {}
    facts.pop("files", None)
    return facts


def commit(unfinished: Path, target: Path, facts: dict[str, Any]) -> None:
    """Rename a written checkpoint to its final name; a complete one is there even if this is interrupted.

    Everything is on disk before anything is renamed. A file replaces the earlier one atomically, between the removal of
    the earlier manifest and the arrival of the new one; without a manifest, the checksums inside the file count. An
    earlier folder is moved aside first; `finish_interrupted` completes an interrupted move.

    Args:
        unfinished: The written file or folder.
        target: Its final name; replaces an earlier checkpoint there.
        facts: Plain values stored in the manifest with the hashes.

    Raises:
        OSError: If a file cannot be written; the earlier checkpoint is still there, perhaps without its manifest.
    """
    is_folder = unfinished.is_dir()
    files = {".": unfinished}
    if is_folder:
        inside = [path for path in sorted(unfinished.rglob("*")) if path.is_file() and path != unfinished / _MANIFEST]
        files = {path.relative_to(unfinished).as_posix(): path for path in inside}
    for path in files.values():
        _sync(path)
    manifest = target.with_name(f"{target.name}.{_MANIFEST}")  # of a file
    written = unfinished / _MANIFEST if is_folder else unfinished_path(manifest)
    entries = {**facts, "files": {name: _describe(path) for name, path in files.items()}}
    written.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    _sync(written)
    if is_folder:
        for folder in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
            _sync(folder)
    manifest.unlink(missing_ok=True)
    replace(unfinished, target)
    if not is_folder:
        os.replace(written, manifest)
    _sync(target.parent)


def link(target: Path, name: Path) -> None:
    """Make a name a link to a checkpoint in the same folder, replacing what was there.

    On Windows, which lets only administrators and developers make links, the name becomes a copy if need be.
    """
    unfinished = unfinished_path(name)
    unfinished.unlink(missing_ok=True)
    try:
        unfinished.symlink_to(os.path.relpath(target, name.parent))
    except OSError:
        if sys.platform != "win32" or not target.is_file():
            raise
        shutil.copyfile(target, unfinished)
        commit(unfinished, name, read_manifest(target))
        return
    replace(unfinished, name)
    _sync(name.parent)


def replace(unfinished: Path, target: Path) -> None:
    """Rename, first moving aside what is there if a folder is involved, as a rename does not replace folders.

    If that fails, what was there is moved back.
    """
    if not any(path.is_dir() and not path.is_symlink() for path in (unfinished, target)):
        os.replace(unfinished, target)
        return
    former = target.with_name(f".{target.name}.former-{process_name()}")
    if os.path.lexists(target):
        os.replace(target, former)
    try:
        os.replace(unfinished, target)
    except BaseException:
        if os.path.lexists(former):
            os.replace(former, target)
        raise
    if former.is_dir() and not former.is_symlink():
        shutil.rmtree(former, ignore_errors=True)
    else:
        former.unlink(missing_ok=True)


def remove(checkpoint: Path) -> None:
    """Delete a checkpoint and its manifest; interrupted, it leaves a leftover rather than a torn checkpoint."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        former = checkpoint.with_name(f".{checkpoint.name}.former-{process_name()}")
        os.replace(checkpoint, former)
        (former / _MANIFEST).unlink(missing_ok=True)  # from here on `finish_interrupted` leaves it alone
        shutil.rmtree(former)
    else:
        checkpoint.unlink(missing_ok=True)
        checkpoint.with_name(f"{checkpoint.name}.{_MANIFEST}").unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk; Windows can do so for writable files only."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def corruption_reason(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact.

    A file without a manifest, as saved by Lightning's ModelCheckpoint, is checked by the checksums inside it.
    """
    found = checkpoint.resolve()  # `last` may be a link
    if not found.exists():
        return f"it is a link to {found}, which does not exist" if checkpoint.is_symlink() else ABSENT
    manifest = manifest_of(found)
    try:
        if manifest.is_file():
            files = json.loads(manifest.read_text(encoding="utf-8"))["files"]
            for name, expected in files.items():  # sizes first, which takes no time
                path = found / name
                if not path.is_file():
                    return f"its file {name} is missing"
                if path.stat().st_size != expected["size"]:
                    return f"{path.name} has {path.stat().st_size} bytes of {expected['size']}"
            changed = next((name for name, expected in files.items() if _describe(found / name) != expected), None)
            return None if changed is None else f"the contents of {(found / changed).name} are not what was saved"
        if found.is_dir():
            return NO_MANIFEST
        if found.stat().st_size == 0:
            return "it is empty"
        with zipfile.ZipFile(found) as archive:
            if torn := archive.testzip():
                return f"its part {torn} is torn"
            has_data = any(name.endswith("/data.pkl") for name in archive.namelist())
            return None if has_data else "it was not written by torch.save"
    except zipfile.BadZipFile:
        return "it cannot be read: cut short, overwritten, or written by something other than torch.save"
    except Exception as error:  # damaged bytes may raise anything
        return f"it or its manifest cannot be read ({type(error).__name__}: {error})"


def newest_complete(checkpoints: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest checkpoint that is complete.

    Returns:
        The checkpoint, None if there is none, and what is wrong with newer ones.
    """
    torn: dict[Path, str] = {}
    for path in sorted(checkpoints, key=lambda p: (p.stat().st_mtime_ns, p.name.startswith("last")), reverse=True):
        reason = corruption_reason(path)
        if reason is None:
            return path, torn
        torn[path] = reason
    return None, torn


def finish_interrupted(folder: Path) -> None:
    """Rename complete checkpoints that killed runs left under temporary names to their final names.

    Several processes may do this at once.
    """
    for leftover, name in _leftovers(folder):
        target = folder / name
        if leftover.is_dir() and not os.path.lexists(target) and corruption_reason(leftover) is None:
            with contextlib.suppress(OSError):  # another process did it first
                os.replace(leftover, target)


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files of killed runs from a folder; call `finish_interrupted` first.

    Runs of other hosts count as dead: a folder of checkpoints belongs to one run at a time.
    """
    for leftover, _ in list(_leftovers(folder)):
        if leftover.is_dir() and not leftover.is_symlink():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    for manifest in folder.glob(f"*.ckpt.{_MANIFEST}"):
        if not os.path.lexists(folder / manifest.name.removesuffix(f".{_MANIFEST}")):
            manifest.unlink(missing_ok=True)


def _leftovers(folder: Path) -> Iterator[tuple[Path, str]]:
    """Leftovers of dead processes in a folder, each with the name it was meant for."""
    for path in sorted(folder.glob(".*"), reverse=True):  # an unfinished one is newer than the former
        parts = _LEFTOVER.fullmatch(path.name)
        if parts is not None and not lives(parts["host"], int(parts["pid"])):
            yield path, parts["name"]


def lives(host: str, pid: int) -> bool:
    """Whether another process of this host lives; False if that cannot be known."""
    if host != socket.gethostname() or pid == os.getpid():
        return False
    if sys.platform == "win32":  # where signal 0 is Ctrl-C; a file that a live process has open cannot be removed
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


# Reading and writing single files with torch.


class DirectCheckpointIO(TorchCheckpointIO):
    """Writes directly to the path, and never runs code from a loaded file.

    Lightning's plugin makes a second copy in memory, writes it to TMPDIR first, which may be small or in RAM, and
    ignores a missing write permission.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        """Write a checkpoint.

        Raises:
            OSError: If the file cannot be written; says why.
            TypeError: If there are storage options.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options is {storage_options!r}, and a local file takes none; omit it.")
        with _Writer(io.FileIO(path, "w")) as file:
            try:
                torch.save(checkpoint, file)
            except Exception as error:
                # torch reports that writing failed, but not why.
                raise file.error or error from None

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, by default to the CPU; `weights_only` is True unless set to False."""
        return super().load_checkpoint(path, map_location or "cpu", weights_only is not False)  # type: ignore[arg-type]


class _Writer(io.BufferedWriter):
    """A file that remembers why it could not be written."""

    error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.error = error
            raise


def load_verified(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load a single-file checkpoint to the CPU, outside a Trainer; no code in it is run.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it is damaged, a folder, not from Lightning, or has more than tensors and plain values.
    """
    verify_checkpoint(path)
    load = lambda: torch.load(path, map_location="cpu", weights_only=True)  # noqa: E731
    return _read(path, load, "load it with ckpt_path of a Trainer and the strategy that wrote it")


def _read(path: str | os.PathLike[str], load: Callable[[], Any], instead: str) -> dict[str, Any]:
    """Load a file; `instead` says what to do with a folder."""
    if Path(path).is_dir():
        raise ValueError(
            f"checkpoint {path} is a folder, as FSDP and DeepSpeed write: {instead}, or make one file of it with "
            "`python -m lightning.pytorch.utilities.consolidate_checkpoint` (FSDP only)."
        )
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


def refuse_unloadable(parts: dict[str, Any]) -> None:
    """Reject parts of a checkpoint that would not load (`weights_only=True`): anything but tensors and plain values.

    Raises:
        TypeError: Names the place of the first.
    """
    for name, part in tree_map_only(torch.Tensor, lambda tensor: None, parts).items():
        if not _loads(part):
            keys = [key for key, value in part.items() if not _loads(value)] if isinstance(part, dict) else []
            raise TypeError(
                f"checkpoint[{name!r}]{''.join(f'[{key!r}]' for key in keys[:1])} has more than tensors and plain "
                "values, and only those can be loaded again; omit it (save_hyperparameters takes names, or "
                "ignore=[...]), or save plain values of it."
            )


def _loads(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception:  # a user's object may raise anything
        return False
    return True


# Verification before anything is loaded, by any route.

_just_verified: set[Path] = set()
"""Checkpoints that a search has just verified, so the following load does not verify them again."""


def verify_checkpoint(path: str | os.PathLike[str], device: torch.device | str = "cpu") -> None:
    """Raise if a checkpoint is damaged. Collective; rank 0 reads the files and tells the others.

    Args:
        path: A file or a folder. A URL such as `s3://...`, and a folder without a manifest, as Lightning's
            ModelCheckpoint writes it, cannot be verified, which is a warning.
        device: Device for communication; the rank's GPU under NCCL.

    Raises:
        FileNotFoundError: On all ranks, if any of them cannot find it.
        ValueError: On all ranks, if it is damaged; says what is wrong.
    """
    if "://" in str(path):
        rank_zero_warn(f"checkpoint {path} is not a local file or folder, so it is loaded without being verified.")
        return
    checkpoint = Path(path)
    if own_rank() > 0:
        found = None if checkpoint.exists() else ABSENT
    else:
        if not checkpoint.exists() and checkpoint.parent.is_dir():
            finish_interrupted(checkpoint.parent)  # it may have been moved aside when a save was killed
        found = None if checkpoint.resolve() in _just_verified else corruption_reason(checkpoint)
        _just_verified.discard(checkpoint.resolve())
    for rank, reason in enumerate(gather_plain(found or "", device)):
        if reason == ABSENT:
            raise FileNotFoundError(f"checkpoint {path}: {ABSENT}{f' (rank {rank})' if rank else ''}.")
        if reason == NO_MANIFEST:
            rank_zero_warn(f"checkpoint {path} is a folder without a manifest, so it is loaded without being verified.")
        elif reason:
            raise ValueError(f"checkpoint {path} is damaged: {reason}. Nothing of it was loaded; choose another one.")


def verify_loads(trainer: Trainer) -> None:
    """Make a Trainer verify every checkpoint before loading it, and save none that would not load.

    Calling this again changes nothing.
    """
    from lightning.pytorch.strategies import Strategy

    strategy = trainer.strategy
    if "load_checkpoint" in vars(strategy):
        return
    load, save = strategy.load_checkpoint, strategy.save_checkpoint
    reads_files = type(strategy).load_checkpoint is Strategy.load_checkpoint
    # Strategies that shard weights write these in their own formats.
    own_formats = (
        () if type(strategy).save_checkpoint is Strategy.save_checkpoint else ("state_dict", "optimizer_states")
    )

    def load_checkpoint(checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        verify_checkpoint(checkpoint_path, strategy.root_device)
        compare = getattr(getattr(trainer.lightning_module, "run_checkpoint", None), "compare_origin", None)
        if compare is not None and "://" not in str(checkpoint_path):
            compare(read_manifest(Path(checkpoint_path)).get("module"), f"checkpoint {checkpoint_path}")
        if not reads_files:
            return load(checkpoint_path, weights_only=weights_only)
        instead = f"{type(strategy).__name__} reads files; use the strategy that wrote it"
        return _read(checkpoint_path, lambda: load(checkpoint_path, weights_only=weights_only), instead)

    def save_checkpoint(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        refuse_unloadable({name: part for name, part in checkpoint.items() if name not in own_formats})
        save(checkpoint, *args, **kwargs)

    strategy.load_checkpoint = load_checkpoint  # type: ignore[method-assign, assignment]
    strategy.save_checkpoint = save_checkpoint  # type: ignore[method-assign]


# `ckpt_path="last"`: the newest complete checkpoint of runs with the same name.


def runs_folder(trainer: Trainer) -> Path:
    """The folder of a run's versions: `<save_dir>/<name>`, or the root folder without a logger."""
    if not trainer.loggers:
        return Path(trainer.default_root_dir)
    logger = trainer.loggers[0]
    return Path(trainer.default_root_dir if logger.save_dir is None else logger.save_dir, str(logger.name or ""))


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
    patterns = ["**/checkpoints"] if trainer.loggers else ["checkpoints", "version_*/checkpoints"]
    places = [place for pattern in patterns for place in runs_folder(trainer).glob(pattern)]
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.dirpath is not None:
            places.append(Path(str(callback.dirpath)))
    folders = [folder for folder in dict.fromkeys(place.resolve() for place in places) if folder.is_dir()]
    for folder in folders:
        finish_interrupted(folder)
    newest, damaged = newest_complete(path for folder in folders for path in folder.glob("*.ckpt"))
    for path, reason in damaged.items():
        rank_zero_warn(f"ckpt_path 'last' skips {path}: {reason}.")
    if newest is None:
        raise ValueError(
            f"ckpt_path is 'last' and there is no complete checkpoint below {runs_folder(trainer)}; omit ckpt_path to "
            "start a new run, or pass the path of a checkpoint."
        )
    changes = {} if module is None else changes_since(read_manifest(newest), module)
    allowed = allowed_changes(module)
    if refused := refused_changes(changes, allowed):
        raise ValueError(
            f"ckpt_path is 'last', and {newest} is from a run with other options: {'; '.join(refused)}. Restore them; "
            f"{remedy(changes, allowed)}; or give this run another logger name."
        )
    _just_verified.add(newest.resolve())
    rank_zero_info(f"ckpt_path 'last' is {newest}")
    return str(newest)


def find_last(trainer: Trainer) -> None:
    """Make a Trainer resolve `ckpt_path="last"` with `last_checkpoint`. A second call changes nothing.

    Lightning itself asks the checkpoint callbacks what they saved. In a new process that is nothing, so it would start
    from scratch. A path that does not exist raises FileNotFoundError here, before the models are loaded.
    """
    connector: Any = trainer._checkpoint_connector
    if "_parse_ckpt_path" in vars(connector):
        return
    parse = connector._parse_ckpt_path

    def parse_ckpt_path(state_fn: TrainerFn, ckpt_path: Any, **options: Any) -> Any:
        if ckpt_path == "last":
            ckpt_path = last_checkpoint(trainer, trainer.lightning_module if state_fn == TrainerFn.FITTING else None)
        chosen = parse(state_fn, ckpt_path, **options)
        if chosen is not None and "://" not in str(chosen):
            path = Path(chosen)
            if not path.exists() and path.parent.is_dir():
                finish_interrupted(path.parent)  # a save that was killed may have moved it aside
            if not os.path.lexists(path):
                raise FileNotFoundError(f"ckpt_path is {str(path)!r}: {ABSENT}; pass a checkpoint's path, or 'last'.")
        return chosen

    connector._parse_ckpt_path = parse_ckpt_path


if __name__ == "__main__":
    reasons = {name: corruption_reason(Path(name)) for name in sys.argv[1:]}
    print(*(f"{name}: {reason or 'complete'}" for name, reason in reasons.items()), sep="\n")
    sys.exit(any(reasons.values()))
