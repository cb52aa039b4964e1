"""Process supervision: the definition of arXiv:2402.03300, section 4.1.3, worked out by hand and by a plain loop."""

from __future__ import annotations

import math
import random
import statistics
from functools import partial

import pytest
import torch

from pl_grouprl.functional.advantages import group_relative_advantages, process_supervision_advantages

NAN = math.nan


def test_two_rollouts_by_hand():
    # Steps of the first rollout end at tokens 1 and 3 with rewards 1 and 3, those of the second at token 0 with 2. The
    # mean of {1, 3, 2} is 2 and their standard deviation 1, so the normalized rewards are -1, 1 and 0.
    token_rewards = torch.tensor([NAN, 1.0, NAN, 3.0, NAN, 2.0, NAN])
    lengths, exact = torch.tensor([5, 2]), partial(group_relative_advantages, eps=0.0)
    advantages = process_supervision_advantages(token_rewards, lengths, [7, 7], estimator=exact)
    assert advantages.tolist() == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    unscaled = process_supervision_advantages(
        2 * token_rewards, lengths, [7, 7], estimator=partial(group_relative_advantages, scale="none")
    )
    assert unscaled.tolist() == [0.0, 0.0, 2.0, 2.0, 0.0, 0.0, 0.0]


def plain(rollouts, groups, eps=1e-6):
    """Each token's sum over the following steps, by loops over plain lists."""
    result = []
    for rewards, group in zip(rollouts, groups, strict=True):
        steps = [r for own, g in zip(rollouts, groups, strict=True) if g == group for r in own if r is not None]
        mean, std = statistics.fmean(steps), statistics.stdev(steps)
        normalized = [0.0 if r is None else (r - mean) / (std + eps) for r in rewards]
        result += [sum(normalized[t:]) for t in range(len(rewards))]
    return result


def test_many_rollouts_against_a_plain_loop():
    dice = random.Random(0)
    rollouts = [[dice.choice((None, dice.gauss(0, 1))) for _ in range(dice.randrange(9))] for _ in range(24)]
    groups = [dice.randrange(3) for _ in rollouts]
    values = [NAN if r is None else r for own in rollouts for r in own]
    advantages = process_supervision_advantages(
        torch.tensor(values, dtype=torch.float64), torch.tensor([len(own) for own in rollouts]), groups
    )
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(plain(rollouts, groups), abs=1e-12)


def test_one_step_at_the_end_is_the_outcome():
    rewards, lengths, groups = torch.tensor([1.0, 0.0, 0.5, 4.0]), torch.tensor([1, 3, 2, 2]), [0, 0, 0, 1]
    token_rewards = torch.full((8,), NAN)
    token_rewards[lengths.cumsum(0) - 1] = rewards
    for scale in ("group", "batch", "none"):
        estimator = partial(group_relative_advantages, scale=scale)
        advantages = process_supervision_advantages(token_rewards, lengths, groups, estimator=estimator)
        assert torch.equal(advantages, estimator(rewards, groups).repeat_interleave(lengths))


def test_exactly_zero_where_nothing_differs():
    # Equal rewards that no binary fraction holds; a group of one step; one without any; a rollout without tokens.
    token_rewards = torch.tensor([0.1, 0.1, NAN, 0.1, NAN, 5.0, NAN, NAN])
    advantages = process_supervision_advantages(token_rewards, torch.tensor([3, 1, 2, 0, 2]), [0, 0, 1, 1, 2])
    assert not advantages.any()
    empty = process_supervision_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), [])
    assert empty.shape == (0,)


def test_mismatched_arguments():
    lengths = torch.tensor([2, 1])
    with pytest.raises(ValueError, match=r"token_rewards has shape \(4,\), lengths \(2,\) \(the sum is 3\)"):
        process_supervision_advantages(torch.zeros(4), lengths, [0, 0])
    with pytest.raises(ValueError, match=r"group_ids \(1,\)"):
        process_supervision_advantages(torch.zeros(3), lengths, [0])
    with pytest.raises(ValueError, match="rewards is infinite"):
        process_supervision_advantages(torch.tensor([0.0, math.inf, 1.0]), lengths, [0, 0])
