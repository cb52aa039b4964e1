"""How much token groups compress, as torchmetrics: counts are added up over batches and ranks before any ratio."""

from __future__ import annotations

import torch
from torch import Tensor
from torchmetrics import Metric

from pl_grouprl.functional.token_groups import TokenGroups, token_group_counts, token_group_metrics

COUNTS = ("tokens", "positions", "ended_by_variance", "ended_by_size", "ended_by_last")


class _TokenGroupMetric(Metric):
    """Counts tokens, endpoints and their causes; one state, so that ranks exchange one tensor."""

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
            groups: What `find_token_groups` made; None for a batch without any.
            mask: True for the tokens to count, shape [B, T]; None for all tokens in a group.
        """
        if groups is None:
            return
        counts = token_group_counts(groups, mask)
        zero = torch.zeros_like(counts["tokens"])
        self.counts += torch.stack([counts.get(name, zero) for name in COUNTS]).to(self.counts.device)

    def by_name(self) -> dict[str, Tensor]:
        """The counts; without those by cause if the groups had none."""
        named = dict(zip(COUNTS, self.counts, strict=True))
        if named["positions"] > 0 and not self.counts[2:].any():
            return {name: named[name] for name in COUNTS[:2]}
        return named


class TokenGroupStatistics(_TokenGroupMetric):
    """All figures about token groups, over everything since the last reset.

    `compute` returns `token_group/total_tokens`, `/advantage_positions`, `/compression_ratio`, `/speedup_factor` (the
    reduction in advantage positions, not in wall-clock time), `/avg_group_size`, and the share of the endpoints by
    cause, `/ended_by_variance`, `/ended_by_size` and `/ended_by_last`; see `token_group_metrics`.

    Args:
        prefix: What the names begin with.
        **options: Of `torchmetrics.Metric`.
    """

    def __init__(self, prefix: str = "token_group/", **options: object) -> None:
        super().__init__(**options)
        self.prefix = prefix

    def compute(self) -> dict[str, Tensor]:
        """Float scalars by name. Ratios are NaN where there was no token."""
        return {self.prefix + name: value for name, value in token_group_metrics(self.by_name()).items()}


class CompressionRatio(_TokenGroupMetric):
    """1 - endpoints / tokens, over everything since the last reset: what `ThresholdController.update` takes."""

    def compute(self) -> Tensor:
        """A float scalar; NaN where there was no token."""
        return token_group_metrics(self.by_name())["compression_ratio"]
