"""LightningModules: what to roll out, and what to learn from it."""

from pl_grouprl.algorithms.distillation import Distillation
from pl_grouprl.algorithms.group_ppo import GroupPPO
from pl_grouprl.algorithms.grpo import GRPO
from pl_grouprl.algorithms.module import RLModule
from pl_grouprl.algorithms.ppo import PPO, CriticRows, Estimate
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.objective import LossSums
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.utilities.device_defaults import default_precision

__all__ = [
    "GRPO",
    "PPO",
    "CriticRows",
    "Distillation",
    "Estimate",
    "GroupPPO",
    "LossSums",
    "MicroBatch",
    "OptimizerConfig",
    "RLModule",
    "RolloutBuffer",
    "default_precision",
]
