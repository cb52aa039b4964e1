"""Policies: where they come from, and how their rollouts are scored."""

from pl_grouprl.models.policy import PolicySource, PretrainedPolicy
from pl_grouprl.models.score import rollout_logprobs, score
from pl_grouprl.models.warm_start import WarmStartedPolicy

__all__ = ["PolicySource", "PretrainedPolicy", "WarmStartedPolicy", "rollout_logprobs", "score"]
