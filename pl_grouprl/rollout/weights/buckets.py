"""Cut a stream of weights into buckets that are sent one by one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

Bucket = list[tuple[str, Tensor]]
"""Weights that travel together, by name."""


def buckets(weights: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[Bucket]:
    """Collect weights until the next one would not fit any more.

    Args:
        weights: Name and value of each.
        max_bytes: Most bytes of a bucket. A larger weight makes a bucket of its own.

    Yields:
        Buckets in the order of the weights, none of them empty. One is let go of when the next is asked for.
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
