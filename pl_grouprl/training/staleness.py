"""How stale the tokens of a batch are.

The version of the weights is the number of rollout batches that were trained on so far. A token's staleness is the
version about to be updated minus the version that sampled the token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pl_grouprl.types import NOT_SAMPLED, Rollout, RolloutGroup


@dataclass
class Staleness:
    """Staleness of the tokens in one rank's batch, as sums that can be combined across ranks.

    Attributes:
        tokens: Number of sampled tokens.
        total: Sum of their staleness.
        largest: Largest staleness.
        dropped: Groups dropped as stale since the previous batch.
    """

    tokens: int = 0
    total: int = 0
    largest: int = 0
    dropped: int = 0


def staleness_metrics(per_rank: Sequence[Staleness]) -> dict[str, float]:
    """Metrics over all ranks; empty if `per_rank` is."""
    if not per_rank:
        return {}
    tokens, total = sum(one.tokens for one in per_rank), sum(one.total for one in per_rank)
    return {
        "rollout/staleness/mean": total / max(tokens, 1),
        "rollout/staleness/max": float(max(one.largest for one in per_rank)),
        "rollout/dropped_stale": float(sum(one.dropped for one in per_rank)),
    }


def measure_staleness(groups: Iterable[RolloutGroup], version: int, dropped: int) -> Staleness:
    """Staleness of the tokens of groups that are trained with a version of the weights."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    ages = [version - sampled for rollout in rollouts for sampled in sampled_versions(rollout)]
    return Staleness(len(ages), sum(ages), max(ages, default=0), dropped)


def sampled_versions(rollout: Rollout) -> list[int]:
    """Version of each sampled token, without those that were not sampled, such as tool output."""
    versions = rollout.weight_versions or []
    mask = [1] * len(versions) if rollout.loss_mask is None else rollout.loss_mask
    return [version for version, bit in zip(versions, mask, strict=True) if bit and version != NOT_SAMPLED]


def version_of_all(rollout: Rollout, version: int) -> list[int]:
    """The `Rollout.weight_versions` of a rollout sampled from a single version."""
    mask = [1] * len(rollout.token_ids) if rollout.loss_mask is None else rollout.loss_mask
    return [version if bit else NOT_SAMPLED for bit in mask]
