"""Rollouts by vLLM in a separate process, on this machine or another: `python -m pl_grouprl.rollout.server`."""

from pl_grouprl.rollout.server.engine import VLLMServerRolloutEngine

__all__ = ["VLLMServerRolloutEngine"]
