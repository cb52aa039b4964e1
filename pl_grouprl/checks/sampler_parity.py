"""Compares the log-probabilities of a separate sampler with the policy's.

Equal weights do not make an equal model. Another program may interpret the config differently (a window of one more
token, rotary positions on a part of each head), and its samples would be scored as if they were the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pl_grouprl.types import RolloutGroup, SamplingConfig
from pl_grouprl.utilities.tolerances import compare

_ROLLOUTS = 8

Score = Callable[[RolloutGroup], Sequence[Tensor]]
"""The policy's log-probabilities of a group's tokens: one tensor per rollout."""


def can_compare(sampling: SamplingConfig) -> bool:
    """Whether log-probabilities of single tokens are comparable: not with top-k or min-p."""
    return not (sampling.top_k or sampling.min_p)


def sampler_difference(score: Score, groups: Sequence[RolloutGroup], sampling: SamplingConfig) -> float | None:
    """Mean difference of log-probabilities in nats on the group with the longest sequence.

    Args:
        score: Runs the policy, with the temperature of `sampling`.
        groups: Groups just sampled from the policy's current weights.
        sampling: Their sampling options.

    Returns:
        The difference, or None if no rollout has tokens with log-probabilities.
    """
    chosen = _longest(groups)
    return None if chosen is None else mean_difference(score(chosen), chosen, sampling)


def mean_difference(expected: Sequence[Tensor], group: RolloutGroup, sampling: SamplingConfig) -> float:
    """Mean absolute difference over the sampled tokens of a group, allowing for top-p.

    Args:
        expected: The policy's log-probabilities, one tensor per rollout.
        group: Group with the sampler's log-probabilities.
        sampling: Its `top_p` makes the kept tokens more likely, by at most 1 / top_p.
    """
    rollouts = group.rollouts
    sampled = torch.cat([torch.tensor(own.loss_mask or [1] * len(own.token_ids)) for own in rollouts]).bool()
    ours = torch.cat([own.cpu().double() for own in expected])[sampled]
    theirs = torch.cat([torch.tensor(own.logprobs, dtype=torch.float64) for own in rollouts])[sampled]
    explained = -math.log(sampling.top_p) if sampling.temperature else 0.0
    return compare(theirs - (theirs - ours).clamp(0, explained), ours).mean


def _longest(groups: Sequence[RolloutGroup]) -> RolloutGroup | None:
    """The group with the longest sequence, with a few of its rollouts; None if there is nothing to compare."""
    candidates = [
        RolloutGroup(group.prompt_ids, reported[:_ROLLOUTS], media=group.media)
        for group in groups
        if (reported := [own for own in group.rollouts if own.num_sampled_tokens and own.logprobs is not None])
    ]
    return max(candidates, key=lambda group: len(group.prompt_ids) + len(group.rollouts[0].token_ids), default=None)
