"""LightningModules: what to roll out, and what to learn from it."""

from pl_grouprl.algorithms.base import MiniBatch, RolloutModule
from pl_grouprl.algorithms.grpo import GRPO
from pl_grouprl.algorithms.optimizer import OptimizerConfig
from pl_grouprl.algorithms.policy_module import LossTerms, PolicyModule
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer

__all__ = ["GRPO", "LossTerms", "MiniBatch", "OptimizerConfig", "PolicyModule", "RolloutBuffer", "RolloutModule"]
