"""Which rollouts are worth training."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from pl_grouprl.functional.masked import differ
from pl_grouprl.types import RolloutGroup


def rewards_differ(group: RolloutGroup) -> bool:
    """Whether a group's rewards or step rewards differ, so that comparing its rollouts is informative."""
    return numbers_differ(episode.reward for episode in group.episodes) or _steps_differ(group)


def outcomes_or_steps_differ(group: RolloutGroup) -> bool:
    """Whether a group's outcome rewards or step rewards differ; GRPO compares the two separately."""
    return numbers_differ(episode.outcome_reward for episode in group.episodes) or _steps_differ(group)


def any_function_differs(group: RolloutGroup) -> bool:
    """Whether the rewards of any function differ, for `multi_objective_aggregation='normalize_then_sum'`."""
    rollouts = [episode.last for episode in group.episodes]
    names = {name for rollout in rollouts for name in rollout.rewards}
    return any(numbers_differ(rollout.rewards.get(name) for rollout in rollouts) for name in names)


def _steps_differ(group: RolloutGroup) -> bool:
    return numbers_differ(reward for rollout in group.rollouts for reward in rollout.step_rewards.values())


def numbers_differ(rewards: Iterable[float | None]) -> bool:
    """Whether rewards differ by more than rounding; None and NaN are left out."""
    numbers = [reward for reward in rewards if reward is not None and not math.isnan(reward)]
    return bool(numbers) and differ(min(numbers), max(numbers))


def without_rewards(group: RolloutGroup) -> RolloutGroup:
    """Copy a group without rewards, for a rank with nothing to train: it joins the update but affects no statistic."""
    return replace(group, rollouts=[replace(rollout, reward=None, token_rewards=None) for rollout in group.rollouts])
