"""Compression by GROUP PPO's token groups, as torchmetrics and as a callback for any LightningModule.

Counts are summed over batches and ranks before ratios are taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
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
            mask: True for tokens to count, shape [B, T]; defaults to all tokens in a group.
        """
        if groups is None:
            return
        counts = token_group_counts(groups, mask)
        zero = torch.zeros_like(counts["tokens"])
        self.counts += torch.stack([counts.get(name, zero) for name in COUNTS]).to(self.counts.device)

    def by_name(self) -> dict[str, Tensor]:
        """The counts; those by cause only if the groups had causes."""
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


_ABSENT = object()


@dataclass(eq=False, repr=False)
class TokenGroupMonitor(Callback):
    """Logs `TokenGroupStatistics` and `token_group/threshold` in each optimizer step.

    Counts are summed over all micro-batches of the step and all ranks before ratios are taken. An object passed by
    several micro-batches counts once. `token_group/speedup_factor` is the reduction in advantage positions, not in
    wall-clock time.

    The groups are what the training step returns under `groups_key` (`{"loss": loss, "token_groups": groups}`) or, if
    it returns none, the module's attribute of that name: one `TokenGroups`, or a list of them; None for a batch without
    groups. The threshold is found the same way, and logged only if there is one.

    Attributes:
        groups_key: Key of the training step's result, or attribute of the module, with the groups.
        threshold_key: The same for the threshold, a number.
    """

    groups_key: str = "token_groups"
    threshold_key: str = "token_group_threshold"

    def __post_init__(self) -> None:
        self.statistics = TokenGroupStatistics()
        self._steps_before = 0
        self._counted: list[TokenGroups] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        self.statistics.to(pl_module.device).reset()
        self._counted.clear()
        self._steps_before = trainer.global_step

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the batch's groups; log when an optimizer step is complete.

        Raises:
            ValueError: If no groups are found.
        """
        found = _find(self.groups_key, pl_module, outputs)
        if found is _ABSENT and outputs:
            raise ValueError(
                f"groups_key={self.groups_key!r} names neither a result of {type(pl_module).__name__}.training_step "
                f"nor an attribute; return {{'loss': loss, {self.groups_key!r}: groups}} (see find_token_groups)."
            )
        groups = [found] if isinstance(found, TokenGroups) else [] if found is _ABSENT else found or []
        new = [g for g in groups if not any(g is counted for counted in self._counted)]
        self._counted += new
        self.statistics.update(None)  # counts nothing, but avoids torchmetrics' warning about a missing update
        for own in new:
            self.statistics.update(own)
        if trainer.global_step == self._steps_before:
            return
        self._steps_before = trainer.global_step
        metrics: dict[str, Any] = {
            name: value for name, value in self.statistics.compute().items() if not value.isnan()
        }
        self.statistics.reset()
        self._counted.clear()
        threshold = _find(self.threshold_key, pl_module, outputs)
        if threshold is not _ABSENT and threshold is not None:
            metrics["token_group/threshold"] = float(threshold)
        pl_module.log_dict(metrics, batch_size=1)


def _find(key: str, pl_module: LightningModule, outputs: Any) -> Any:
    if isinstance(outputs, Mapping) and key in outputs:
        return outputs[key]
    return getattr(pl_module, key, _ABSENT)
