"""Between the flat token axis and one row per rollout, which recursions over time are written for.

Legend: B rollouts, T length of the longest row, N response tokens of all rollouts one after another (flat, no padding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


def to_rows(values_N: Tensor, lengths_B: Tensor) -> Tensor:
    """Lay each rollout's values into a row of its own.

    Args:
        values_N: Any dtype, shape [N] (or [N, S], a vector per token), the rollouts one after another.
        lengths_B: Tokens of each rollout, int64, shape [B], adding up to N.

    Returns:
        Shape [B, T] (or [B, T, S]), 0 (False) behind each rollout's end.

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
    """Undo `to_rows`: the first `lengths_B` entries of each row, one row after another, shape [N]."""
    return values_BT[_inside(lengths_B, values_BT.shape[1])]


def _inside(lengths_B: Tensor, width: int | None = None) -> Tensor:
    if width is None:
        width = int(lengths_B.max()) if len(lengths_B) else 0
    return torch.arange(width, device=lengths_B.device) < lengths_B[:, None]


class Compacted(NamedTuple):
    """Where the tokens of a mask stand when each row's gaps are closed.

    Attributes:
        index_BT: The original position of the t-th valid token, int64; what stands behind the last one is arbitrary.
        mask_BT: True for the first tokens of each row, as many as it has valid ones.
    """

    index_BT: Tensor
    mask_BT: Tensor

    def close(self, values_BT: Tensor) -> Tensor:
        """Move each row's valid values to its front; 0 behind them."""
        return values_BT.gather(1, self.index_BT).masked_fill(~self.mask_BT, 0)

    def reopen(self, values_BT: Tensor, fill: float = 0) -> Tensor:
        """Undo `close`: valid values at their own positions, `fill` elsewhere."""
        return torch.full_like(values_BT, fill).scatter(1, self.index_BT, values_BT.masked_fill(~self.mask_BT, fill))


def compact(mask_BT: Tensor) -> Compacted:
    """Close the gaps of each row, so that a recursion sees the valid tokens one after another.

    Args:
        mask_BT: True for valid tokens, bool, shape [B, T].
    """
    index_BT = mask_BT.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices
    count_B1 = mask_BT.sum(dim=1, keepdim=True)
    return Compacted(index_BT, torch.arange(mask_BT.shape[1], device=mask_BT.device) < count_B1)


def reverse_scan(values_BT: Tensor, decay_BT: Tensor) -> Tensor:
    """Solve x_t = values_t + decay_t * x_{t+1} with x = 0 behind the end, in log2(T) steps without a loop over tokens.

    Args:
        values_BT: Shape [B, T].
        decay_BT: Shape [B, T].

    Returns:
        x, shape [B, T]. Exact up to rounding: each step joins neighbouring stretches of the recursion into twice as
        long ones (Hillis and Steele, 1986).
    """
    result_BT, decay_BT, step = values_BT, decay_BT, 1
    length = values_BT.shape[1]
    while step < length:
        joined_BT = result_BT.clone()
        joined_BT[:, :-step] += decay_BT[:, :-step] * result_BT[:, step:]
        longer_BT = torch.zeros_like(decay_BT)  # a stretch that reaches the end hands nothing on
        longer_BT[:, :-step] = decay_BT[:, :-step] * decay_BT[:, step:]
        result_BT, decay_BT, step = joined_BT, longer_BT, 2 * step
    return result_BT
