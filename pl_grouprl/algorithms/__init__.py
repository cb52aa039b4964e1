"""LightningModules: what to roll out, and what to learn from it."""

from pl_grouprl.algorithms.base import RolloutModule
from pl_grouprl.algorithms.group_ppo import GroupPPO
from pl_grouprl.algorithms.grpo import GRPO
from pl_grouprl.algorithms.mini_batch import MiniBatch
from pl_grouprl.algorithms.optimizer import OptimizerConfig
from pl_grouprl.algorithms.policy_gradient import PolicyGradientModule
from pl_grouprl.algorithms.policy_module import PolicyModule
from pl_grouprl.algorithms.ppo import PPO, CriticRows, Estimate
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.algorithms.sampling_module import SamplingModule
from pl_grouprl.algorithms.step_terms import LossTerms

__all__ = [
    "GRPO",
    "PPO",
    "CriticRows",
    "Estimate",
    "GroupPPO",
    "LossTerms",
    "MiniBatch",
    "OptimizerConfig",
    "PolicyGradientModule",
    "PolicyModule",
    "RolloutBuffer",
    "RolloutModule",
    "SamplingModule",
]
