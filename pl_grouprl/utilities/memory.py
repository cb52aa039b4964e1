"""Out of memory, told with the option that lowers the need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_OF_CPU = ("can't allocate memory", "not enough memory")
"""What PyTorch says where the CPU has none left, in a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or the CPU, has no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OF_CPU)


@contextlib.contextmanager
def naming_memory(where: str, remedy: str) -> Iterator[None]:
    """Let what runs out of memory inside say where, and which option to change. An inner one has named it already.

    Args:
        where: What ran out of memory.
        remedy: What to do.

    Raises:
        RuntimeError: In place of the device's error.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RuntimeError(f"out of memory in {where}; {remedy}.") from error
