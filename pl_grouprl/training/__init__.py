"""The parts of a run: plain objects, none a LightningModule or nn.Module. Their options are frozen dataclasses."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pl_grouprl.functional.entropy import EntropyOptions
    from pl_grouprl.functional.importance import ImportanceSampling
    from pl_grouprl.training.checks import GuardOptions
    from pl_grouprl.training.evaluation import EvaluationOptions
    from pl_grouprl.training.micro_batches import SharingOptions
    from pl_grouprl.training.objective import KLOptions
    from pl_grouprl.training.rewarder import RewardCallOptions
    from pl_grouprl.training.sampler import EpisodeOptions

_HOMES = {
    "EntropyOptions": "functional.entropy",
    "EpisodeOptions": "training.sampler",
    "EvaluationOptions": "training.evaluation",
    "GuardOptions": "training.checks",
    "ImportanceSampling": "functional.importance",
    "KLOptions": "training.objective",
    "RewardCallOptions": "training.rewarder",
    "SharingOptions": "training.micro_batches",
}

__all__ = [
    "EntropyOptions",
    "EpisodeOptions",
    "EvaluationOptions",
    "GuardOptions",
    "ImportanceSampling",
    "KLOptions",
    "RewardCallOptions",
    "SharingOptions",
]


def __getattr__(name: str) -> Any:
    """Import an option class on first use: one part does not load all others."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"pl_grouprl.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pl_grouprl.training' has no attribute {name!r}")
