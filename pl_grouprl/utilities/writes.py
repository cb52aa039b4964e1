"""Atomic file writes, and writes whose failure does not end a run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.utilities.checkpoint_files import process_name, unfinished_path


def write_whole(path: Path, content: bytes) -> None:
    """Write a temporary file and rename it; if that fails, the old file stays in place.

    Raises:
        OSError: If the file system refuses.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path, process_name())
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def append_whole(path: Path, content: bytes) -> None:
    """Append to a file, all or nothing: a full disk leaves no partial line.

    Raises:
        OSError: If the file system refuses.
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
