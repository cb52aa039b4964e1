"""Rollout engines: from prompts to sampled completions."""

from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import RolloutEngine, SyncedRolloutEngine
from pl_grouprl.rollout.hf import HFRolloutEngine
from pl_grouprl.rollout.server.engine import VLLMServerRolloutEngine
from pl_grouprl.rollout.vllm.colocate import VLLMRolloutEngine

__all__ = [
    "Branching",
    "HFRolloutEngine",
    "RolloutEngine",
    "SyncedRolloutEngine",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
]
