"""How glibc's allocator treats freed memory; other systems are left as they are."""

from __future__ import annotations

import ctypes
import platform

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -2, -3, -4
"""Options of `mallopt`, as malloc.h numbers them."""


def keep_freed() -> None:
    """Keep all freed memory for what comes next, as PyTorch does on CUDA.

    Otherwise each tensor of more than 32 MiB is new memory, whose pages the system clears one after another: about 15 %
    of the time of methods with large tensors.
    """
    _set(_MMAP_MAX, 0)
    _set(_TRIM_THRESHOLD, -1)
    _set(_TOP_PAD, 2**28)


def give_back_freed() -> None:
    """Map each block of 64 KiB or more on its own, and never keep one for later: what is resident is in use."""
    _set(_MMAP_THRESHOLD, 2**16)  # which also ends its growth with each block freed


def _set(option: int, value: int) -> None:
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(option, value)
