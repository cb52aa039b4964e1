"""Masked sums and whitening, and shape checks for functions on the flat token axis.

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a small 1-D tensor over all ranks; collective."""

_ROUNDING = 2 * torch.finfo(torch.float32).eps


def check_flat(**tensors: Tensor) -> None:
    """Refuse arguments that are not one-dimensional tensors of the same length.

    Args:
        **tensors: Arguments by name.

    Raises:
        ValueError: If one is not one-dimensional, or the lengths differ.
    """
    names = iter(tensors.items())
    first_name, first = next(names)
    for name, tensor in ((first_name, first), *names):
        if tensor.dim() != 1:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; pass one value per token on one flat axis, without padding."
            )
        if len(tensor) != len(first):
            raise ValueError(
                f"{name} has {len(tensor)} entries and {first_name} has {len(first)}; pass one per token for both."
            )


def check_mask(mask_N: Tensor) -> None:
    """Raise a ValueError if a mask is not bool: `~` differs for integers."""
    if mask_N.dtype != torch.bool:
        raise ValueError(f"mask_N has dtype {mask_N.dtype}; pass bool, such as mask_N.bool().")


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum the values where the mask is true; NaN and infinities elsewhere affect neither the sum nor its gradient.

    Args:
        values_N: Any values, shape [N].
        mask_N: True for values to add, bool, shape [N].

    Returns:
        A scalar; 0 if the mask is false everywhere.
    """
    check_flat(values_N=values_N, mask_N=mask_N)
    check_mask(mask_N)
    return values_N.masked_fill(~mask_N, 0).sum()


def sum_per_rollout(values_N: Tensor, rollout_index_N: Tensor, num_rollouts: int) -> Tensor:
    """Add up the values of each rollout.

    Args:
        values_N: Any values, shape [N].
        rollout_index_N: The rollout that each token belongs to, int64 in [0, num_rollouts), shape [N], in any order.
        num_rollouts: B. A rollout without tokens gets 0.

    Returns:
        Sums, shape [B], in the dtype of the values.
    """
    check_flat(values_N=values_N, rollout_index_N=rollout_index_N)
    return values_N.new_zeros(num_rollouts).index_add(0, rollout_index_N, values_N)


def bool_mask(mask: Tensor) -> Tensor:
    """Convert a mask of 0 and 1, as other projects use, to bool.

    Args:
        mask: Any shape; bool, or 0 and 1 of another dtype.

    Returns:
        The same shape, bool.

    Raises:
        ValueError: If it has other values, such as weights.
    """
    if mask.dtype == torch.bool:
        return mask
    other = (mask != 0) & (mask != 1)
    if other.any():
        raise ValueError(f"mask has the entry {mask[other][0].item()}; pass bool, or 0 and 1.")
    return mask != 0


def differ(a: Any, b: Any) -> Any:
    """Whether two numbers differ by more than rounding: selection, advantages and metrics all ask this.

    Rewards are sums, often in float32, so 0.1 + 0.2 equals 0.3. The tolerance is 2.4e-7 (twice the float32 epsilon)
    times 1 + |a| + |b|, at least 2.4e-7 whatever the numbers, as terms of a sum may cancel.

    Args:
        a: Number, or tensor of any shape and unit.
        b: The same.

    Returns:
        A bool, or a bool tensor; False for NaN and infinity.
    """
    return abs(b - a) > _ROUNDING * (1 + abs(a) + abs(b))


@torch.no_grad()
def masked_whiten(values: Tensor, mask: Tensor, *, reduce: Reduce | None = None) -> Tensor:
    """Subtract the mean of the valid entries and divide by their standard deviation.

    Equal to verl's `masked_whiten`: (x - mean) / sqrt(variance + 1e-8) with the unbiased variance (n - 1).
    Here the statistics are in float64 over all ranks, and entries outside the mask (even NaN) do not count. The result
    is exactly 0 with fewer than two valid entries, where verl raises an error, or if all are equal up to rounding
    (`differ`).

    Args:
        values: Any shape and unit; not changed.
        mask: True for valid entries, the shape of the values; bool, or 0 and 1 of another dtype.
        reduce: Sums over ranks, for statistics over all of them; None for this rank alone. Always called twice.

    Returns:
        The shape of the values, in their dtype (at least float32), without gradient, 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, or the mask has other values than 0 and 1.
    """
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)} and values {tuple(values.shape)}; pass one per value.")
    valid = bool_mask(mask)
    total = reduce or _this_rank
    exact = values.to(torch.float64).masked_fill(~valid, 0)
    count, summed = total(torch.stack([valid.sum().to(torch.float64), exact.sum()])).unbind()
    mean = summed / count.clamp(min=1)
    centred = (exact - mean).masked_fill(~valid, 0)
    variance = total(centred.square().sum()[None])[0] / (count - 1).clamp(min=1)
    spread = (count > 1) & differ(mean, mean + variance.sqrt())
    whitened = torch.where(spread, centred * (variance + 1e-8).rsqrt(), torch.zeros_like(centred))
    return whitened.to(torch.promote_types(values.dtype, torch.float32))


def _this_rank(sums: Tensor) -> Tensor:
    return sums
