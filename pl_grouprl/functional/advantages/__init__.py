"""Advantages per rollout and per token, one idea per file."""

from pl_grouprl.functional.advantages.baselines import opo_advantages, remax_advantages
from pl_grouprl.functional.advantages.branches import BranchPaths
from pl_grouprl.functional.advantages.distillation import distillation_advantages
from pl_grouprl.functional.advantages.gae import (
    discounted_returns,
    generalized_advantages,
    length_adaptive_lam,
    td_errors,
)
from pl_grouprl.functional.advantages.group_relative import (
    REWARD_SCALES,
    gpg_advantages,
    group_relative_advantages,
    grpo_passk_advantages,
    rloo_advantages,
)
from pl_grouprl.functional.advantages.multi_reward import (
    REWARD_AGGREGATIONS,
    combine_rewards,
    multi_reward_advantages,
)
from pl_grouprl.functional.advantages.optimal_token import (
    optimal_token_baseline_advantages,
    tir_optimal_token_baseline_advantages,
)
from pl_grouprl.functional.advantages.process_supervision import process_supervision_advantages
from pl_grouprl.functional.advantages.registry import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    make_advantage_estimator,
    register_advantage_estimator,
)
from pl_grouprl.functional.advantages.reinforce import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)
from pl_grouprl.functional.advantages.trees import leaf_weights, tree_advantages, vine_advantages

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "REWARD_AGGREGATIONS",
    "REWARD_SCALES",
    "AdvantageEstimator",
    "BranchPaths",
    "combine_rewards",
    "discounted_returns",
    "distillation_advantages",
    "generalized_advantages",
    "gpg_advantages",
    "group_relative_advantages",
    "grpo_passk_advantages",
    "leaf_weights",
    "length_adaptive_lam",
    "make_advantage_estimator",
    "multi_reward_advantages",
    "opo_advantages",
    "optimal_token_baseline_advantages",
    "process_supervision_advantages",
    "register_advantage_estimator",
    "reinforce_plus_plus_advantages",
    "reinforce_plus_plus_baseline_advantages",
    "remax_advantages",
    "rloo_advantages",
    "td_errors",
    "tir_optimal_token_baseline_advantages",
    "tree_advantages",
    "vine_advantages",
]
