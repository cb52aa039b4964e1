"""Verifies that a sampler loaded exactly the weights that it was sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class WeightsMismatchError(RuntimeError):
    """The sampler's weights differ from the policy's; its rollouts must not be trained on."""


# A checksum of weights that is independent of how they are fused and sharded.
#
# Samplers fuse the rows of several weights into one tensor (query, key and value; gate and up), and tensor parallelism
# splits rows or columns over ranks. The checksum of a weight w with bit patterns b(w) is
#
#     sum over rows r and columns c of b(w[r, c]) * m(c)   modulo 2^64,  m(c) = (2 c + 1) * 0x9E3779B97F4A7C15,
#
# so the checksums of parts add up to that of the whole, whatever the order of rows, and any flipped bit changes it,
# because m is odd. All arithmetic is on integers, so it is the same on every device.

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
    if weight.ndim < 2:
        weight_RC = weight.detach().reshape(-1, 1)
    elif weight.ndim == 3:
        weight_RC = weight.detach().reshape(-1, weight.shape[-1])
    else:
        weight_RC = weight.detach().reshape(weight.shape[0], -1)
    rows = max(1, _CHUNK // max(1, weight_RC.shape[-1]))
    total_C = weight_RC.new_zeros(weight_RC.shape[-1], dtype=torch.int64)
    for part_RC in weight_RC.split(rows):
        if weight.is_floating_point():
            part_RC = part_RC + 0.0  # turns negative zeros positive
        total_C += part_RC.contiguous().view(_INTEGERS[weight.element_size()]).sum(dim=0, dtype=torch.int64)
    columns_C = torch.arange(first_column, first_column + total_C.numel(), device=total_C.device)
    return int((total_C * ((2 * columns_C + 1) * _MULTIPLIER)).sum())


def add(*checksums: int) -> int:
    """Combine the checksums of parts into the checksum of the whole."""
    total = sum(checksums) % 2**64
    return total - 2**64 if total >= 2**63 else total


# The comparison of what was sent with what was loaded.


class LoadedWeight(NamedTuple):
    """One worker's part of one parameter of the sampler.

    Attributes:
        name: The sampler's name of the parameter.
        parts: Names of the sent weights that it consists of.
        checksum: Checksum of this worker's part.
        how: `sum`: workers have shards, whose checksums add up. `copy`: each worker has all of it.
    """

    name: str
    parts: Sequence[str]
    checksum: int
    how: Literal["sum", "copy"]


def check_weights(expected: Mapping[str, int], workers: Iterable[Iterable[Sequence]]) -> None:
    """Verify that a sampler loaded exactly the weights that it was sent.

    Args:
        expected: Checksum of each sent weight, by name, in the sampler's dtype.
        workers: The `LoadedWeight`s of each worker of the sampler, or sequences of their fields.

    Raises:
        WeightsMismatchError: If a parameter was not sent, differs from what was sent, or is missing. Names a few.
    """
    by_name: dict[str, list[LoadedWeight]] = {}
    for worker in workers:
        for fields in worker:
            weight = LoadedWeight(*fields)
            by_name.setdefault(weight.name, []).append(weight)
    faults = []
    for name, loaded in by_name.items():
        parts = dict.fromkeys(part for weight in loaded for part in weight.parts)
        unknown = [part for part in parts if part not in expected]
        kinds, is_equal = {weight.how for weight in loaded}, True
        if not all(weight.parts for weight in loaded):
            faults.append(f"{name} was not sent")
        elif unknown:
            faults.append(f"{name} contains {unknown[0]}, which was not sent")
        elif len(kinds) > 1:
            faults.append(f"{name} is stored in different ways ({', '.join(sorted(kinds))})")
        elif kinds == {"sum"}:
            is_equal = add(*(weight.checksum for weight in loaded)) == add(*(expected[part] for part in parts))
        else:
            is_equal = all(weight.checksum == add(*(expected[part] for part in weight.parts)) for weight in loaded)
        if not is_equal:
            faults.append(f"{name} differs from what was sent as {' + '.join(parts)}")
    arrived = {part for loaded in by_name.values() for weight in loaded for part in weight.parts}
    faults += [f"{name} was sent, but no parameter contains it" for name in expected if name not in arrived]
    if faults:
        shown = "; ".join(faults[:5]) + ("; ..." if len(faults) > 5 else "")
        raise WeightsMismatchError(
            f"The sampler did not load the policy's weights, {len(faults)} differ: {shown}. Its rollouts must not be "
            "trained on. Start the sampler with the policy's config and dtype, without quantization."
        )


# A stream of weights, prepared for sending: cast to the sampler's dtype, checksummed, in buckets.

Bucket = list[tuple[str, Tensor]]
"""Weights sent together, by name."""


def cast(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, checksums: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Copy weights into the sampler's dtype, and record their checksums.

    Args:
        weights: Name and value of each.
        dtype: Dtype for floating-point weights; others keep theirs.
        checksums: Receives the checksum of each copy.

    Yields:
        Name and copy; the original may change afterwards.
    """
    for name, weight in weights:
        copied = weight.detach().to(dtype if weight.is_floating_point() else weight.dtype, copy=True)
        checksums[name] = checksum(copied)
        yield name, copied.contiguous()


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Collect weights into buckets of limited size.

    Args:
        weights: Name and value of each.
        max_bytes: Maximum size of a bucket. A larger weight gets a bucket to itself.

    Yields:
        Non-empty buckets, in the order of the weights. A bucket is released when the next one is requested.
    """
    bucket: Bucket = []
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += weight.nbytes
    if bucket:
        yield bucket
