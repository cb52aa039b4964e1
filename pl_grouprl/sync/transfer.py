"""Prepares a stream of weights for sending: cast to the sampler's dtype, checksummed, in buckets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pl_grouprl.sync.checksum import checksum

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
