"""Which rollouts are worth training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from pl_grouprl.types import RolloutGroup


def has_spread(group: RolloutGroup) -> bool:
    """Whether a group's rewards, or those of its tokens, differ, so that comparing its rollouts is informative."""
    rewards = [r.reward for r in group.rollouts if r.reward is not None and not math.isnan(r.reward)]
    steps = [reward for rollout in group.rollouts for reward in rollout.step_rewards.values()]
    return any(bool(own) and max(own) > min(own) for own in (rewards, steps))


def mask_truncated(groups: Sequence[RolloutGroup]) -> None:
    """Zero the loss mask of rollouts that reached the length limit, in place."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.finish_reason == "length":
            rollout.loss_mask = [0] * len(rollout.token_ids)


def without_rewards(group: RolloutGroup) -> RolloutGroup:
    """Copy a group without rewards, so a rank with nothing to train can join the update and count in no statistic."""
    return replace(group, rollouts=[replace(rollout, reward=None, token_rewards=None) for rollout in group.rollouts])
