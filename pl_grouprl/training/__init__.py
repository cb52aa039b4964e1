"""The parts of a run: plain objects, none a LightningModule or nn.Module. Their options are frozen dataclasses."""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {
    "EpisodeOptions": "training.sampler",
    "EvaluationOptions": "training.evaluation",
    "GuardOptions": "training.checks",
    "ImportanceSampling": "functional.importance",
    "KLOptions": "training.objective",
    "RewardCallOptions": "training.rewarder",
    "SharingOptions": "training.micro_batches",
}


def __getattr__(name: str) -> Any:
    """Import an option class on first use: one part does not load all others."""
    if name in _HOMES:
        return getattr(importlib.import_module(f"pl_grouprl.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pl_grouprl.training' has no attribute {name!r}")
