"""Compression by token groups, as torchmetrics: counts are summed over batches and ranks before taking ratios."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_grouprl.functional.token_groups import TokenGroups, token_group_counts, token_group_metrics

COUNTS = ("tokens", "positions", "ended_by_variance", "ended_by_size", "ended_by_last")


class _TokenGroupMetric(Metric):
    """Counts tokens, endpoints and their causes in a single state, so ranks exchange one tensor."""

    is_differentiable = False
    full_state_update = False
    counts: Tensor

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        zeros = torch.zeros(len(COUNTS), dtype=torch.int64)
        self.add_state("counts", default=zeros, dist_reduce_fx="sum", persistent=True)

    def update(self, groups: TokenGroups | None, mask: Tensor | None = None) -> None:
        """Add the counts of a batch.

        Args:
            groups: Result of `find_token_groups`; None for a batch without groups.
            mask: True for tokens to count, shape [B, T]; None counts all tokens in a group.
        """
        if groups is None:
            return
        counts = token_group_counts(groups, mask)
        zero = torch.zeros_like(counts["tokens"])
        self.counts += torch.stack([counts.get(name, zero) for name in COUNTS]).to(self.counts.device)

    def by_name(self) -> dict[str, Tensor]:
        """The counts, with those by cause only if the groups had causes."""
        named = dict(zip(COUNTS, self.counts, strict=True))
        if named["positions"] > 0 and not self.counts[2:].any():
            return {name: named[name] for name in COUNTS[:2]}
        return named


class TokenGroupStatistics(_TokenGroupMetric):
    """All statistics of token groups since the last reset.

    `compute` returns `token_group/total_tokens`, `/advantage_positions`, `/compression_ratio`, `/speedup_factor` (the
    reduction in advantage positions, not in wall-clock time), `/avg_group_size`, and the fraction of endpoints by
    cause, `/ended_by_variance`, `/ended_by_size` and `/ended_by_last`; see `token_group_metrics`.

    Args:
        prefix: Prefix of the names.
        **options: Options of `torchmetrics.Metric`.
    """

    def __init__(self, prefix: str = "token_group/", **options: object) -> None:
        super().__init__(**options)
        self.prefix = prefix

    def compute(self) -> dict[str, Tensor]:
        """Float scalars by name. Ratios are NaN if there were no tokens."""
        return {self.prefix + name: value for name, value in token_group_metrics(self.by_name()).items()}


class CompressionRatio(_TokenGroupMetric):
    """1 - endpoints / tokens since the last reset, for `ThresholdController.update`."""

    def compute(self) -> Tensor:
        """A float scalar; NaN if there were no tokens."""
        return token_group_metrics(self.by_name())["compression_ratio"]
