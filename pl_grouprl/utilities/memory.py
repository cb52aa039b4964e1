"""Out-of-memory errors that name the option to change."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

_CPU_MESSAGES = ("can't allocate memory", "not enough memory")
"""Texts of PyTorch's plain RuntimeError when the CPU is out of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the CPU is out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_MESSAGES)


@contextlib.contextmanager
def naming_memory(where: str, remedy: str) -> Iterator[None]:
    """Add the location, and the option to change, to out-of-memory errors; the innermost context wins.

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
