"""The flat token axis and rows per rollout: masked sums, whitening, and recursions over time.

Legend: B rollouts, T length of the longest row, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Reduce = Callable[[Tensor], Tensor]
"""Sums a small 1-D tensor over all ranks; collective."""

_ROUNDING = 2 * torch.finfo(torch.float32).eps


def check_flat(**tensors: Tensor) -> None:
    """Check arguments on the flat token axis: one entry per token each, and a mask of bool (`~` differs for integers).

    Raises:
        ValueError: If one is not one-dimensional, the lengths differ, or `mask_N` is not bool.
    """
    first_name, first = next(iter(tensors.items()))
    for name, tensor in tensors.items():
        if tensor.dim() != 1 or len(tensor) != len(first):
            shapes = f"{tuple(tensor.shape)} and {first_name} {tuple(first.shape)}"
            raise ValueError(f"{name} has shape {shapes}; pass one value per token, on one axis without padding.")
        if name == "mask_N" and tensor.dtype != torch.bool:
            raise ValueError(f"mask_N has dtype {tensor.dtype}; pass bool, such as mask_N.bool().")


def masked_sum(values_N: Tensor, mask_N: Tensor) -> Tensor:
    """Sum the values where the mask is true; NaN and infinities elsewhere affect neither the sum nor its gradient.

    Args:
        values_N: Any values, shape [N].
        mask_N: True for values to add, bool, shape [N].

    Returns:
        A scalar; 0 if the mask is false everywhere.
    """
    check_flat(values_N=values_N, mask_N=mask_N)
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
        reduce: Sums over ranks, for statistics over all of them; defaults to this rank alone. Called twice.

    Returns:
        The shape of the values, in their dtype (at least float32), without gradient, 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, or the mask has other values than 0 and 1.
    """
    if mask.shape != values.shape:
        raise ValueError(f"mask has shape {tuple(mask.shape)} and values {tuple(values.shape)}; pass one per value.")
    valid = bool_mask(mask)
    total = reduce or (lambda sums: sums)
    exact = values.to(torch.float64).masked_fill(~valid, 0)
    count, summed = total(torch.stack([valid.sum().to(torch.float64), exact.sum()])).unbind()
    mean = summed / count.clamp(min=1)
    centered = (exact - mean).masked_fill(~valid, 0)
    variance = total(centered.square().sum()[None])[0] / (count - 1).clamp(min=1)
    spread = (count > 1) & differ(mean, mean + variance.sqrt())
    whitened = torch.where(spread, centered * (variance + 1e-8).rsqrt(), torch.zeros_like(centered))
    return whitened.to(torch.promote_types(values.dtype, torch.float32))


# Rows per rollout, for recursions over time.


def to_rows(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Put each rollout's values into a separate row.

    Args:
        values_N: Any dtype, shape [N] (or [N, S], a vector per token), rollouts concatenated.
        lengths_B: Tokens of each rollout, int64, shape [B], adding up to N.

    Returns:
        Shape [B, T] (or [B, T, S]), 0 (False) after each rollout's end.

    Raises:
        ValueError: If the lengths do not add up to N.
    """
    total = int(lengths_B.sum())
    if len(values_N) != total:
        raise ValueError(f"values_N has {len(values_N)} entries and lengths_B adds up to {total}; pass one per token.")
    inside_BT = _inside(lengths_B)
    rows = values_N.new_zeros((*inside_BT.shape, *values_N.shape[1:]))
    rows[inside_BT] = values_N
    return rows


def from_rows(values_BT: Tensor, lengths_B: Tensor) -> Tensor:
    """Undo `to_rows`: concatenate the first `lengths_B` entries of each row, shape [N]."""
    return values_BT[_inside(lengths_B, values_BT.shape[1])]


def places_of(rollouts: Tensor, lengths_B: Tensor) -> Tensor:
    """Find the tokens of some rollouts on the flat axis, one rollout after another.

    Args:
        rollouts: Indices of the rollouts, int64, in any order.
        lengths_B: Tokens of each of the B rollouts, int64.

    Returns:
        Indices on the axis N, int64.
    """
    lengths, starts = lengths_B[rollouts], (lengths_B.cumsum(0) - lengths_B)[rollouts]
    shifts = starts - (lengths.cumsum(0) - lengths)
    return shifts.repeat_interleave(lengths) + torch.arange(int(lengths.sum()), device=lengths.device)


def _inside(lengths_B: Tensor, width: int | None = None) -> Tensor:
    if width is None:
        width = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


class Compacted(NamedTuple):
    """Indices that close the gaps in each row of a mask.

    Attributes:
        index_BT: The original position of the t-th valid token, int64; arbitrary after the last one.
        mask_BT: True for the first tokens of each row, as many as are valid.
    """

    index_BT: Tensor
    mask_BT: Tensor

    def close(self, values_BT: Tensor) -> Tensor:
        """Move each row's valid values to its front, followed by 0."""
        return values_BT.gather(1, self.index_BT).masked_fill(~self.mask_BT, 0)

    def reopen(self, values_BT: Tensor, fill: float = 0) -> Tensor:
        """Undo `close`: valid values at their original positions, `fill` elsewhere."""
        return torch.full_like(values_BT, fill).scatter(1, self.index_BT, values_BT.masked_fill(~self.mask_BT, fill))


def compact(mask_BT: Tensor) -> Compacted:
    """Close the gaps of each row, to make its valid tokens contiguous.

    Args:
        mask_BT: True for valid tokens, bool, shape [B, T].
    """
    index_BT = mask_BT.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    count_B1 = mask_BT.sum(dim=1, keepdim=True)
    return Compacted(index_BT, torch.arange(mask_BT.shape[1], device=mask_BT.device) < count_B1)


def reverse_scan(values_BT: Tensor, decay_BT: Tensor) -> Tensor:
    """Solve x_t = values_t + decay_t * x_{t+1} with x = 0 after the end, in log2(T) steps without a loop over tokens.

    Returns:
        x, shape [B, T] like the arguments. Exact up to rounding: each step doubles the length of the solved segments of
        the recursion (Hillis and Steele, 1986).
    """
    result_BT, decay_BT, step = values_BT, decay_BT, 1
    length = values_BT.shape[1]
    while step < length:
        joined_BT = result_BT.clone()
        joined_BT[:, :-step] += decay_BT[:, :-step] * result_BT[:, step:]
        longer_BT = torch.zeros_like(decay_BT)  # nothing propagates past the end
        longer_BT[:, :-step] = decay_BT[:, :-step] * decay_BT[:, step:]
        result_BT, decay_BT, step = joined_BT, longer_BT, 2 * step
    return result_BT
