"""Converts between the flat token axis and one row per rollout, as needed by recursions over time.

Legend: B rollouts, T length of the longest row, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


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

    Args:
        values_BT: Shape [B, T].
        decay_BT: Shape [B, T].

    Returns:
        x, shape [B, T]. Exact up to rounding: each step doubles the length of the solved segments of the recursion
        (Hillis and Steele, 1986).
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
