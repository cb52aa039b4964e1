"""Sets how glibc's allocator treats freed memory; does nothing on other systems."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""Options of `mallopt`, as malloc.h numbers them."""


def keep_freed() -> None:
    """Keep freed memory for reuse, as PyTorch does on CUDA.

    Otherwise each tensor larger than 32 MiB gets fresh pages, which the system must zero: about 15 % of the time of
    methods with large tensors.
    """
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, -1)
    _set(_TOP_PAD, 2**28)


def give_back_freed() -> None:
    """Map each block of 64 KiB or more separately and never cache it, so resident memory is memory in use."""
    _set(_MMAP_THRESHOLD, 2**16)  # a fixed threshold also stops glibc from raising it


def _set(option: int, value: int) -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(option, value)
