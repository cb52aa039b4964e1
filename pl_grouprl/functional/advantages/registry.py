"""Advantage estimators by name, as a configuration gives them, and what they have in common.

Legend: B rollouts, T length of the longest row.

There are two kinds, told apart by `per_token`. Those of whole rollouts take rewards [B] and group ids [B], with the
keyword arguments `lengths` and `greedy_rewards` for the two that need them (`opo`, `remax`), and return [B]. Those per
token take rewards [B, T], a mask [B, T] and group ids [B], with the keyword argument `reduce` for statistics over
ranks, and return [B, T]. All rollouts of a group come in one call.

`gae` and `group_ppo` need a critic: they belong to the modules that train one and are not in this table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol

from torch import Tensor

from pl_grouprl.functional.advantages.baselines import OPOAdvantage, ReMaxAdvantage
from pl_grouprl.functional.advantages.group_relative import GroupRelativeAdvantage, PassKAdvantage, RLOOAdvantage
from pl_grouprl.functional.advantages.reinforce import ReinforcePlusPlusAdvantage, ReinforcePlusPlusBaselineAdvantage
from pl_grouprl.functional.registry import build


class AdvantageEstimator(Protocol):
    """Turns rewards into advantages; the arguments of the two kinds are in the head of this file.

    Attributes:
        needs_greedy: True if it needs the reward of a greedy rollout of each prompt.
        per_token: True if it takes and returns rows of tokens.
    """

    needs_greedy: ClassVar[bool]
    per_token: ClassVar[bool]

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return advantages, shape [B], or [B, T] where `per_token`."""


ADVANTAGE_ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {
    "grpo": GroupRelativeAdvantage,
    "grpo_passk": PassKAdvantage,
    "opo": OPOAdvantage,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantage,
    "reinforce_plus_plus_baseline": ReinforcePlusPlusBaselineAdvantage,
    "remax": ReMaxAdvantage,
    "rloo": RLOOAdvantage,
}


def make_advantage_estimator(name: str, /, **options: Any) -> AdvantageEstimator:
    """Build the estimator registered as `name`; an option that it does not take is a ValueError."""
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
