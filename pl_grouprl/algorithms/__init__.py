"""LightningModules: what to roll out, and what to learn from it."""

import warnings
from typing import Any

from pl_grouprl.algorithms.group_ppo import GroupPPO
from pl_grouprl.algorithms.grpo import GRPO
from pl_grouprl.algorithms.module import RLModule
from pl_grouprl.algorithms.ppo import PPO, CriticRows, Estimate
from pl_grouprl.training.loss_sums import LossSums
from pl_grouprl.training.micro_batch import MicroBatch
from pl_grouprl.training.optimizer import OptimizerConfig
from pl_grouprl.training.rollout_buffer import RolloutBuffer

__all__ = [
    "GRPO",
    "PPO",
    "CriticRows",
    "Estimate",
    "GroupPPO",
    "LossSums",
    "MicroBatch",
    "OptimizerConfig",
    "RLModule",
    "RolloutBuffer",
]

_RENAMED = {
    "LossTerms": "LossSums",
    "MiniBatch": "MicroBatch",
    **dict.fromkeys(("PolicyGradientModule", "PolicyModule", "RolloutModule", "SamplingModule"), "RLModule"),
}


def __getattr__(name: str) -> Any:
    """Old names, for one version."""
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]
