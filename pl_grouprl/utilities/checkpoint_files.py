"""Checkpoints on disk: written under a temporary name, renamed when complete, and checked by a manifest.

A checkpoint is a file or, where each rank writes its part, a folder. Its manifest, `NAME.manifest.json` next to a file
and `manifest.json` inside a folder, has the size and the SHA-256 of each file. To check checkpoints manually, or to
accept folders written by another program:

    python -m pl_grouprl.utilities.checkpoint_files PATH...
    python -m pl_grouprl.utilities.checkpoint_files --accept FOLDER...
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

_MANIFEST = "manifest.json"
ABSENT = "there is no such file or folder"
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.(?:unfinished|former)-(?P<host>.+)-(?P<pid>\d+)")


def manifest_of(checkpoint: Path) -> Path:
    """Where the manifest of a checkpoint is."""
    checkpoint = checkpoint.resolve()  # `last` may be a link
    return checkpoint / _MANIFEST if checkpoint.is_dir() else checkpoint.with_name(f"{checkpoint.name}.{_MANIFEST}")


def process_name() -> str:
    """Host and process id, which distinguish the unfinished files of a live run from those of a killed one."""
    return f"{socket.gethostname()}-{os.getpid()}"


def unfinished_path(target: Path, owner: str) -> Path:
    """Temporary path of a checkpoint or another file while it is written, on the same file system."""
    return target.with_name(f".{target.name}.unfinished-{owner}")


def commit(unfinished: Path, target: Path, facts: dict[str, Any], owner: str) -> None:
    """Rename a written checkpoint to its final name; a complete one is there even if this is interrupted.

    Everything is on disk before anything is renamed. A file replaces the earlier one atomically; until then its
    manifest lists both. An earlier folder is moved aside first; `finish_interrupted` completes an interrupted move.

    Args:
        unfinished: The written file or folder.
        target: Its final name; replaces an earlier checkpoint there.
        facts: Plain values stored in the manifest with the hashes.
        owner: The `process_name` of the writing process.

    Raises:
        OSError: If the file system refuses; the earlier checkpoint is still there.
    """
    for path in _files(unfinished).values():
        _sync(path)
    version = {**facts, "files": {name: _describe(path) for name, path in _files(unfinished).items()}}
    if unfinished.is_dir():
        _write_manifest(unfinished / _MANIFEST, [version], owner)
        for folder in (unfinished, *(path for path in unfinished.rglob("*") if path.is_dir())):
            _sync(folder)
        _replace(unfinished, target, owner)
        target.with_name(f"{target.name}.{_MANIFEST}").unlink(missing_ok=True)  # if it replaced a file
    else:
        manifest = target.with_name(f"{target.name}.{_MANIFEST}")
        _write_manifest(manifest, [version, *_versions(manifest)], owner)
        _replace(unfinished, target, owner)
        _write_manifest(manifest, [version], owner)
    _sync(target.parent)


def remove(checkpoint: Path, owner: str) -> None:
    """Delete a checkpoint and its manifest; interrupted, it leaves a leftover rather than a torn checkpoint."""
    if checkpoint.is_dir() and not checkpoint.is_symlink():
        former = _former_path(checkpoint, owner)
        os.replace(checkpoint, former)
        (former / _MANIFEST).unlink(missing_ok=True)  # from here on `finish_interrupted` leaves it alone
        shutil.rmtree(former)
    else:
        checkpoint.unlink(missing_ok=True)
        checkpoint.with_name(f"{checkpoint.name}.{_MANIFEST}").unlink(missing_ok=True)


def corruption_reason(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact.

    A file without a manifest, as saved by Lightning's ModelCheckpoint, is checked by the checksums inside it.
    """
    found = checkpoint.resolve()  # `last` may be a link
    if not found.exists():
        return f"it is a link to {found}, which does not exist" if checkpoint.is_symlink() else ABSENT
    try:
        versions = _versions(manifest_of(found))
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest {manifest_of(found).name} cannot be read ({type(error).__name__}: {error})"
    try:
        if versions:
            differences = [_difference(found, version["files"]) for version in versions]
            return None if None in differences else differences[0]
        if found.is_dir():
            return (
                f"it has no manifest; if another program wrote all of it, accept it as it is with "
                f"python -m pl_grouprl.utilities.checkpoint_files --accept {found}"
            )
        return _corruption_of_archive(found)
    except Exception as error:  # damaged bytes may raise anything
        return f"it cannot be read ({type(error).__name__}: {error})"


def accept(checkpoint: Path) -> None:
    """Write a manifest for a folder that another program wrote, accepting its current contents.

    Raises:
        ValueError: If it is not a folder, or already has a manifest.
    """
    if not checkpoint.is_dir() or manifest_of(checkpoint).exists():
        raise ValueError(f"{checkpoint} is not a folder without a manifest; only such folders need to be accepted.")
    files = {name: _describe(path) for name, path in _files(checkpoint).items()}
    _write_manifest(manifest_of(checkpoint), [{"files": files}], process_name())


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """The facts that the manifest records besides the hashes; empty without a manifest."""
    versions = _versions(manifest_of(checkpoint))
    if len(versions) > 1:  # a save was killed between the manifest and the file
        versions = [version for version in versions if _difference(checkpoint.resolve(), version["files"]) is None]
    return {name: value for version in versions[:1] for name, value in version.items() if name != "files"}


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
    for manifest in folder.glob(f"*.{_MANIFEST}"):
        if not os.path.lexists(folder / manifest.name.removesuffix(f".{_MANIFEST}")):
            manifest.unlink(missing_ok=True)


def newest_complete(checkpoints: Iterable[Path]) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest checkpoint that is complete.

    Returns:
        The checkpoint, None if there is none, and what is wrong with those that are newer.
    """
    torn: dict[Path, str] = {}
    for path in sorted(checkpoints, key=_age, reverse=True):
        reason = corruption_reason(path)
        if reason is None:
            return path, torn
        torn[path] = reason
    return None, torn


def link(target: Path, name: Path, owner: str) -> None:
    """Make a name a link to a checkpoint in the same folder, replacing what was there.

    On Windows, which lets only administrators and developers make links, the name becomes a copy if need be.
    """
    unfinished = unfinished_path(name, owner)
    unfinished.unlink(missing_ok=True)
    try:
        unfinished.symlink_to(os.path.relpath(target, name.parent))
    except OSError:
        if sys.platform != "win32" or not target.is_file():
            raise
        shutil.copyfile(target, unfinished)
        commit(unfinished, name, read_manifest(target), owner)
        return
    _replace(unfinished, name, owner)
    _sync(name.parent)


def _age(checkpoint: Path) -> tuple[int, bool]:
    return checkpoint.stat().st_mtime_ns, checkpoint.name.startswith("last")


def _former_path(target: Path, owner: str) -> Path:
    return target.with_name(f".{target.name}.former-{owner}")


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


def _files(checkpoint: Path) -> dict[str, Path]:
    if not checkpoint.is_dir():
        return {".": checkpoint}
    files = (path for path in sorted(checkpoint.rglob("*")) if path.is_file())
    return {path.relative_to(checkpoint).as_posix(): path for path in files if path != checkpoint / _MANIFEST}


def _describe(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return {"size": path.stat().st_size, "sha256": digest.hexdigest()}


def _corruption_of_archive(checkpoint: Path) -> str | None:
    if checkpoint.stat().st_size == 0:
        return "it is empty"
    if not zipfile.is_zipfile(checkpoint):
        return "it cannot be read: cut short, overwritten, or written by something other than torch.save"
    with zipfile.ZipFile(checkpoint) as archive:
        torn = archive.testzip()
        if torn is not None:
            return f"its part {torn} is torn"
        has_data = any(name.endswith("/data.pkl") for name in archive.namelist())
        return None if has_data else "it was not written by torch.save"


def _difference(checkpoint: Path, files: dict[str, dict[str, Any]]) -> str | None:
    if not files:
        return "its manifest names no file"
    for name, expected in files.items():
        path = checkpoint / name
        if not path.is_file():
            return f"its file {name} is missing"
        if path.stat().st_size != expected["size"]:
            return f"{path.name} has {path.stat().st_size} bytes of {expected['size']}"
    for name, expected in files.items():
        if _describe(checkpoint / name) != expected:
            return f"the contents of {(checkpoint / name).name} are not what was saved"
    return None


def _versions(manifest: Path) -> list[dict[str, Any]]:
    if not manifest.is_file():
        return []
    versions = list(json.loads(manifest.read_text(encoding="utf-8"))["versions"])
    if not versions:
        raise ValueError("it names no version")
    return versions


def _write_manifest(manifest: Path, versions: list[dict[str, Any]], owner: str) -> None:
    unfinished = unfinished_path(manifest, owner)
    unfinished.write_text(json.dumps({"versions": versions}, indent=1) + "\n", encoding="utf-8")
    _sync(unfinished)
    os.replace(unfinished, manifest)


def _replace(unfinished: Path, target: Path, owner: str) -> None:
    if any(path.is_dir() and not path.is_symlink() for path in (unfinished, target)):
        former = _former_path(target, owner)
        if os.path.lexists(target):
            os.replace(target, former)
        os.replace(unfinished, target)
        if former.is_dir() and not former.is_symlink():
            shutil.rmtree(former)
        else:
            former.unlink(missing_ok=True)
    else:
        os.replace(unfinished, target)


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


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--accept"]:
        arguments = arguments[1:]
        for argument in arguments:
            accept(Path(argument))
    reasons = {name: corruption_reason(Path(name)) for name in arguments}
    print(*(f"{name}: {reason or 'complete'}" for name, reason in reasons.items()), sep="\n")
    sys.exit(any(reasons.values()))
