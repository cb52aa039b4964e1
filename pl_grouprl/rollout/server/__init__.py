"""Rollouts by vLLM servers, on this machine or others: `python -m pl_grouprl.rollout.server`."""

from pl_grouprl.rollout.server.engine import VLLMServerRolloutEngine

__all__ = ["VLLMServerRolloutEngine"]
