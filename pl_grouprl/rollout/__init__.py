"""Rollout engines: from prompts to sampled completions."""

from pl_grouprl.rollout.engine import RolloutEngine
from pl_grouprl.rollout.hf import HFRolloutEngine

__all__ = ["HFRolloutEngine", "RolloutEngine"]
