"""A checksum of weights that is independent of how they are fused and sharded.

Samplers fuse the rows of several weights into one tensor (query, key and value; gate and up), and tensor parallelism
splits rows or columns over ranks. The checksum of a weight w with bit patterns b(w) is

    sum over rows r and columns c of b(w[r, c]) * m(c)   modulo 2^64,  m(c) = (2 c + 1) * 0x9E3779B97F4A7C15,

so the checksums of parts add up to that of the whole, whatever the order of rows, and any flipped bit changes it (m is
odd). All arithmetic is on integers, so it is the same on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio in 64 bits, as a signed number
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 22
"""Entries summed at a time, which bounds the extra memory."""


def checksum(weight: Tensor, first_column: int = 0) -> int:
    """Compute the checksum of a weight, or of a shard of one.

    Args:
        weight: Any dtype and device. The last axis holds the columns; with four or more axes (convolutions), all axes
            but the first do. A vector is one column.
        first_column: Index of a shard's first column in the whole weight.

    Returns:
        A signed 64-bit integer. Rows of zeros add nothing, so padding does not count; -0.0 counts as 0.0.
    """
    weight_RC = _rows(weight.detach())
    rows = max(1, _CHUNK // max(1, weight_RC.shape[-1]))
    total_C = weight_RC.new_zeros(weight_RC.shape[-1], dtype=torch.int64)
    for part_RC in weight_RC.split(rows):
        if weight.is_floating_point():
            part_RC = part_RC + 0.0  # turns negative zeros positive
        total_C += part_RC.contiguous().view(_INTEGERS[weight.element_size()]).sum(dim=0, dtype=torch.int64)
    columns_C = torch.arange(first_column, first_column + total_C.numel(), device=total_C.device)
    return int((total_C * ((2 * columns_C + 1) * _MULTIPLIER)).sum())


def add(*checksums: int) -> int:
    """Combine the checksums of parts into that of the whole."""
    total = sum(checksums) % 2**64
    return total - 2**64 if total >= 2**63 else total


def _rows(weight: Tensor) -> Tensor:
    if weight.ndim < 2:
        return weight.reshape(-1, 1)
    if weight.ndim == 3:
        return weight.reshape(-1, weight.shape[-1])
    return weight.reshape(weight.shape[0], -1)
