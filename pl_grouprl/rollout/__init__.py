"""Rollout engines: from prompts to sampled completions."""

from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import RolloutEngine, SyncedRolloutEngine
from pl_grouprl.rollout.hf.engine import HFRolloutEngine
from pl_grouprl.rollout.vllm.colocate import VLLMRolloutEngine
from pl_grouprl.rollout.vllm.servers import VLLMServerRolloutEngine

__all__ = [
    "Branching",
    "HFRolloutEngine",
    "RolloutEngine",
    "SyncedRolloutEngine",
    "VLLMRolloutEngine",
    "VLLMServerRolloutEngine",
]
