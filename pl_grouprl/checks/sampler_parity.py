"""Compares the log-probabilities of a separate sampler with the policy's.

Equal weights do not imply equal models. Another program may interpret the config differently (a window one token
longer, rotary embeddings on a part of each head), and its samples would be scored as if they were the policy's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.tolerances import compare

_ROLLOUTS = 8

Score = Callable[[RolloutGroup], Sequence[Tensor]]
"""The policy's log-probabilities of a group's tokens: one tensor per rollout."""


def can_compare(sampling: SamplingConfig) -> bool:
    """Whether log-probabilities per token can be compared: not with top-k or min-p."""
    return not (sampling.top_k or sampling.min_p)


def sampler_difference(score: Score, groups: Sequence[RolloutGroup], sampling: SamplingConfig) -> float | None:
    """Mean absolute difference of log-probabilities, in nats, on the group with the longest sequence.

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
        sampling: Its `top_p` raises the probabilities of kept tokens, by a factor of at most 1 / top_p.
    """
    rollouts = group.rollouts
    sampled = torch.cat([torch.tensor(r.loss_mask or [1] * len(r.token_ids)) for r in rollouts]).bool()
    ours = torch.cat([logprobs.cpu().double() for logprobs in expected])[sampled]
    theirs = torch.cat([torch.tensor(r.logprobs, dtype=torch.float64) for r in rollouts])[sampled]
    explained = -math.log(sampling.top_p) if sampling.temperature else 0.0
    return compare(theirs - (theirs - ours).clamp(0, explained), ours).mean


def _longest(groups: Sequence[RolloutGroup]) -> RolloutGroup | None:
    """The group with the longest sequence, with its longest rollouts; None if there is nothing to compare."""
    candidates = []
    for group in groups:
        scored = [r for r in group.rollouts if r.num_sampled_tokens and r.logprobs is not None]
        longest = sorted(scored, key=_num_tokens, reverse=True)[:_ROLLOUTS]
        if longest:
            rows = [replace(rollout, episode=None) for rollout in longest]  # compared one by one, in this order
            candidates.append(RolloutGroup(group.prompt_ids, rows, media=group.media))
    return max(candidates, key=lambda group: len(group.prompt_ids) + _num_tokens(group.rollouts[0]), default=None)


def _num_tokens(rollout: Rollout) -> int:
    return len(rollout.token_ids)
