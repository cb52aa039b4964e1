"""Weights as a sampler gets them: in its dtype, each with its checksum noted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from pl_grouprl.rollout.weights.checksum import checksum


def cast(
    weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype, checksums: dict[str, int]
) -> Iterator[tuple[str, Tensor]]:
    """Copy weights into a sampler's dtype.

    Args:
        weights: Name and value of each.
        dtype: For those of a floating dtype; others stay.
        checksums: Gets the checksum of each copy.

    Yields:
        Copies: the weights may change behind them.
    """
    for name, weight in weights:
        own = weight.detach().to(dtype if weight.is_floating_point() else weight.dtype, copy=True)
        checksums[name] = checksum(own)
        yield name, own.contiguous()
