"""PyTorch Lightning modules for reinforcement learning of language models whose rollouts come in groups."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_grouprl.algorithms import GRPO, PPO, Distillation, GroupPPO, OptimizerConfig, default_precision
    from pl_grouprl.attention import shared_prefix
    from pl_grouprl.callbacks import SharedPrefixCallback, TokenGroupMonitor, default_callbacks
    from pl_grouprl.data import PromptDataModule
    from pl_grouprl.functional.importance import ImportanceSampling
    from pl_grouprl.models import LoRAAdapter, PretrainedPolicy
    from pl_grouprl.rewards import Weighted
    from pl_grouprl.training.checks import GuardOptions
    from pl_grouprl.training.evaluation import EvaluationOptions
    from pl_grouprl.training.micro_batches import SharingOptions
    from pl_grouprl.training.objective import KLOptions
    from pl_grouprl.training.rewarder import RewardCallOptions
    from pl_grouprl.training.sampler import EpisodeOptions
    from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig

__version__ = "0.1.0"

_HOMES = {
    "algorithms": ("Distillation", "GRPO", "GroupPPO", "OptimizerConfig", "PPO", "default_precision"),
    "attention": ("shared_prefix",),
    "callbacks": ("SharedPrefixCallback", "TokenGroupMonitor", "default_callbacks"),
    "data": ("PromptDataModule",),
    "models": ("LoRAAdapter", "PretrainedPolicy"),
    "rewards": ("Weighted",),
    "training": (
        "EpisodeOptions",
        "EvaluationOptions",
        "GuardOptions",
        "ImportanceSampling",
        "KLOptions",
        "RewardCallOptions",
        "SharingOptions",
    ),
    "types": ("Prompt", "Rollout", "RolloutGroup", "SamplingConfig"),
}

__all__ = [
    "GRPO",
    "PPO",
    "Distillation",
    "EpisodeOptions",
    "EvaluationOptions",
    "GroupPPO",
    "GuardOptions",
    "ImportanceSampling",
    "KLOptions",
    "LoRAAdapter",
    "OptimizerConfig",
    "PretrainedPolicy",
    "Prompt",
    "PromptDataModule",
    "RewardCallOptions",
    "Rollout",
    "RolloutGroup",
    "SamplingConfig",
    "SharedPrefixCallback",
    "SharingOptions",
    "TokenGroupMonitor",
    "Weighted",
    "default_callbacks",
    "default_precision",
    "shared_prefix",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use: `import pl_grouprl` alone loads nothing heavy."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"pl_grouprl.{home}"), name)
    raise AttributeError(f"module 'pl_grouprl' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
