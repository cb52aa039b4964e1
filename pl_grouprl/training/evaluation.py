"""Metrics of validation and test: mean@k, best@k and maj@k of each data source."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pl_grouprl.functional.validation import best_at_k, majority_at_k, mean_at_k
from pl_grouprl.training.episode_metrics import episode_metrics
from pl_grouprl.training.metrics import Record, rewards_by_function, summarize
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain


def evaluation_metrics(records: Sequence[Record], prefix: str) -> dict[str, float]:
    """Evaluate the rollouts of a whole validation or test run.

    Args:
        records: Records of all groups of all ranks. Rollouts without a reward are left out.
        prefix: `val` or `test`.

    Returns:
        `{prefix}/reward` over all prompts, to select checkpoints by; `{prefix}/rewards/{name}/mean` of each reward
        function; for each data source `{prefix}/{data_source}/mean@k`, and for k > 1 `best@k` and `maj@k`, where
        completions with the same stripped text (episodes with the same last message) vote together; for episodes,
        `{prefix}/` and the names of `episode_metrics`.
    """
    scored = [trimmed for record in records if (trimmed := _with_reward(record))["rewards"]]
    metrics = {f"{prefix}/reward": mean_at_k([record["rewards"] for record in scored]) if scored else math.nan}
    for name, values in rewards_by_function(records).items():
        metrics[f"{prefix}/rewards/{name}/mean"] = math.fsum(values) / len(values) if values else math.nan
    for source in sorted({record["data_source"] for record in scored}):
        own = [record for record in scored if record["data_source"] == source]
        rewards = [record["rewards"] for record in own]
        k = max(len(row) for row in rewards)
        metrics[f"{prefix}/{source}/mean@{k}"] = mean_at_k(rewards)
        if k > 1:
            metrics[f"{prefix}/{source}/best@{k}"] = best_at_k(rewards)
            metrics[f"{prefix}/{source}/maj@{k}"] = majority_at_k(rewards, [record["texts"] for record in own])
    return metrics | episode_metrics(records, f"{prefix}/")


class Evaluator:
    """Collects the rollouts of a validation or test run.

    Attributes:
        groups: Rollouts of the current batch.
    """

    def __init__(self) -> None:
        self.groups: list[RolloutGroup] = []
        self._records: list[Record] = []

    def record(self) -> None:
        """Add the current batch, with its rewards."""
        self._records += summarize(self.groups)

    def metrics(self, prefix: str, device: torch.device) -> dict[str, float]:
        """Compute the metrics of all ranks, and start over. Collective."""
        records = [record for own in gather_plain(self._records, device) for record in own]
        self._records = []
        return evaluation_metrics(records, prefix)


def _with_reward(record: Record) -> Record:
    """Keep only rollouts with a reward, and strip their texts."""
    kept = [i for i, reward in enumerate(record["rewards"]) if math.isfinite(reward)]
    return {
        "data_source": record["data_source"],
        "rewards": [record["rewards"][i] for i in kept],
        "texts": [(record["texts"][i] or "").strip() for i in kept],
    }
