"""Reads and writes single-file checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO


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
            raise TypeError(f"storage_options is {storage_options!r}; a local file takes none, leave it out.")
        with Path(path).open("wb") as file:
            writer: Any = _Writer(file)
            try:
                torch.save(checkpoint, writer)
            except Exception as error:
                # torch reports that writing failed, but not why.
                raise writer.error or error from None

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a checkpoint, by default to the CPU; `weights_only` is True unless set to False."""
        return super().load_checkpoint(path, map_location or "cpu", weights_only is not False)  # type: ignore[arg-type]


class _Writer:
    """A file that remembers why it could not be written."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self.file.flush()
