"""Metrics of branching rollouts: the size of the trees, and how much their leaves share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_grouprl.rollout.branch_loop import first_own_token
from pl_grouprl.types import Rollout


def count_sampled(rollouts: Sequence[Rollout]) -> int | None:
    """Tokens that the model wrote for a group, shared ones counted once; None without branching."""
    if not any(rollout.branch_path for rollout in rollouts):
        return None
    starts = [first_own_token(rollout.branch_path, rollout.branch_points) for rollout in rollouts]
    masks = [rollout.loss_mask or [1] * len(rollout.token_ids) for rollout in rollouts]
    return sum(sum(mask[start:]) for mask, start in zip(masks, starts, strict=True))


def branch_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Statistics of the trees of all groups; none without branching.

    Args:
        records: Records of the groups of all ranks; see `summarize`.

    Returns:
        `branching/leaves`, rollouts per group; `branching/sampled_tokens`, tokens that the model wrote per group,
        shared ones counted once; and `branching/token_ratio`, the tokens of all leaves over those sampled.
    """
    trees = [record for record in records if record["sampled"] is not None]
    if not trees:
        return {}
    sampled = sum(record["sampled"] for record in trees)
    return {
        "branching/leaves": sum(len(record["lengths"]) for record in trees) / len(trees),
        "branching/sampled_tokens": sampled / len(trees),
        "branching/token_ratio": sum(sum(record["lengths"]) for record in trees) / max(sampled, 1),
    }
