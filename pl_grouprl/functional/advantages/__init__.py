"""Advantages of rollouts and of tokens, one idea per file."""

from pl_grouprl.functional.advantages.gae import (
    discounted_returns,
    generalized_advantages,
    length_adaptive_lam,
    td_errors,
)
from pl_grouprl.functional.advantages.group_relative import (
    REWARD_SCALES,
    GroupRelativeAdvantage,
    RLOOAdvantage,
    group_relative_advantages,
    rloo_advantages,
)
from pl_grouprl.functional.advantages.registry import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    make_advantage_estimator,
)
