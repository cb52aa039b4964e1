"""Compression by token groups, from counts that add up over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pl_grouprl.functional.masked import bool_mask
from pl_grouprl.functional.token_groups.find import ENDED_BY_LAST, ENDED_BY_SIZE, ENDED_BY_VARIANCE, TokenGroups

CAUSES = {"ended_by_variance": ENDED_BY_VARIANCE, "ended_by_size": ENDED_BY_SIZE, "ended_by_last": ENDED_BY_LAST}


def token_group_counts(groups: TokenGroups, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Count tokens, endpoints, and endpoints by cause; counts of several batches may be added.

    Args:
        groups: Result of `find_token_groups`.
        mask: True for the tokens to count, shape [B, T]; None for all tokens in a group.

    Returns:
        `tokens`, `positions`, `ended_by_variance`, `ended_by_size` and `ended_by_last` (including forced ends), int64
        scalars; the last three only if the groups have causes.

    Raises:
        ValueError: If the mask has another shape, or other values than 0 and 1.
    """
    valid_BT = groups.group_index >= 0
    if mask is not None:
        if mask.shape != valid_BT.shape:
            raise ValueError(
                f"mask has shape {tuple(mask.shape)} and groups {tuple(valid_BT.shape)}; pass both as [B, T]."
            )
        valid_BT = valid_BT & bool_mask(mask)
    ends_BT = groups.ends & valid_BT
    counts = {"tokens": valid_BT.sum(), "positions": ends_BT.sum()}
    if groups.causes is not None:
        counts |= {name: ((groups.causes == cause) & ends_BT).sum() for name, cause in CAUSES.items()}
    return counts


def token_group_metrics(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert summed counts to the logged metrics.

    Args:
        counts: As from `token_group_counts`.

    Returns:
        Scalars in float32: `total_tokens`, `advantage_positions` (endpoints), `compression_ratio` = 1 - positions /
        tokens, `speedup_factor` = tokens / positions (the reduction in advantage positions, not of wall-clock time),
        `avg_group_size` in tokens, and the fraction of endpoints by cause. Ratios are NaN if there are no tokens.
    """
    tokens, positions = counts["tokens"].double(), counts["positions"].double()
    metrics = {
        "total_tokens": tokens,
        "advantage_positions": positions,
        "compression_ratio": torch.where(tokens > 0, 1 - positions / tokens, torch.nan),
        "speedup_factor": tokens / positions,
        "avg_group_size": tokens / positions,
        **{name: counts[name] / positions for name in CAUSES if name in counts},
    }
    return {name: value.float() for name, value in metrics.items()}
