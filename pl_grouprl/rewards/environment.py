"""The reward that an environment assigns to its episode."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments


@checked_arguments
class EnvironmentReward:
    """The result of an environment's `get_reward`; does not apply to episodes in environments of other classes.

    `get_reward` is called when an episode ends. If it fails, the episode has no reward.

    Args:
        name: Name of the environment's class; also the reward's name in metrics.
    """

    stays_in_process = True
    """The rewards are already known."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[Any]]:
        """Return the reward of each rollout; NaN, which counts as a failure, where `get_reward` failed."""
        return [[self._reward(rollout) for rollout in group.rollouts] for group in groups]

    def _reward(self, rollout: Rollout) -> Any:
        if rollout.environment_name != self.name:
            return None
        numbers = rollout.environment_numbers
        if not numbers:
            return rollout.environment_reward
        renamed = {re.sub("^(score_*)$", r"\1_", key): number for key, number in numbers.items()}
        return renamed | {"score": rollout.environment_reward}
