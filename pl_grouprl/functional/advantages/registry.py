"""Advantage estimators by name, as a configuration gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pl_grouprl.functional.advantages.group_relative import GroupRelativeAdvantage, RLOOAdvantage
from pl_grouprl.functional.registry import build

AdvantageEstimator = Callable[[Tensor, "Tensor | Sequence[int]"], Tensor]
"""Rewards [B] and group ids [B] to advantages [B]."""

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {
    "grpo": GroupRelativeAdvantage,
    "rloo": RLOOAdvantage,
}


def make_advantage_estimator(name: str, **options: Any) -> AdvantageEstimator:
    """Build the estimator registered as `name`; an option that it does not take is a ValueError."""
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)
