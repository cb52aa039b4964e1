"""What travels through the system: prompts, rollouts, groups of rollouts, and how to sample them."""

from pl_grouprl.types.prompts import Media, Messages, Prompt, is_per_token
from pl_grouprl.types.rollouts import NOT_SAMPLED, EpisodeRows, FinishReason, LiveObject, Rollout, RolloutGroup
from pl_grouprl.types.sampling import SamplingConfig

__all__ = [
    "NOT_SAMPLED",
    "EpisodeRows",
    "FinishReason",
    "LiveObject",
    "Media",
    "Messages",
    "Prompt",
    "Rollout",
    "RolloutGroup",
    "SamplingConfig",
    "is_per_token",
]
