"""A separate sampler against the policy: which tokens are compared, and what sampling filters explain."""

import math

import pytest
import torch
from helpers.episodes import make_episode, make_group

from pl_grouprl.checks.sampling import can_compare, mean_difference, sampler_difference
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig


def test_differences_that_top_p_explains_do_not_count():
    group = RolloutGroup([1], [Rollout([2, 3], [-0.5, -1.0]), Rollout([4], [-2.0])])
    expected = [torch.tensor([-0.6, -1.0]), torch.tensor([-2.5])]
    assert mean_difference(expected, group, SamplingConfig()) == pytest.approx((0.1 + 0.5) / 3)
    # 1 / top_p = e^0.3: of 0.5 nats, 0.2 remain
    assert mean_difference(expected, group, SamplingConfig(top_p=math.exp(-0.3))) == pytest.approx(0.2 / 3)
    likelier = [torch.tensor([-0.4, -1.0]), torch.tensor([-2.0])]  # filters make no token less likely
    assert mean_difference(likelier, group, SamplingConfig(top_p=math.exp(-0.3))) == pytest.approx(0.1 / 3)
    assert mean_difference(expected, group, SamplingConfig(temperature=0.0, top_p=0.5)) == pytest.approx(0.6 / 3)


def test_the_group_with_the_longest_sequence_is_scored():
    short = RolloutGroup([1], [Rollout([2], [-1.0])])
    long = RolloutGroup([1, 2], [Rollout([]), Rollout([3, 4], [-1.0, -2.0]), Rollout([5, 6, 7])])
    scored = []

    def score(group):
        scored.append(group)
        return [torch.full((len(rollout.token_ids),), -1.25) for rollout in group.rollouts]

    assert sampler_difference(score, [short, long], SamplingConfig()) == pytest.approx((0.25 + 0.75) / 2)
    assert [[rollout.token_ids for rollout in group.rollouts] for group in scored] == [[[3, 4]]]
    assert sampler_difference(score, [RolloutGroup([1], [Rollout([2])])], SamplingConfig()) is None


def test_the_longest_rollouts_of_the_group_are_scored():
    rollouts = [Rollout([number] * length, [0.0] * length) for number, length in enumerate([1, 2, 9, 3, 4, 5, 6, 7, 8])]
    lengths = []

    def score(group):
        lengths.extend(len(rollout.token_ids) for rollout in group.rollouts)
        return [torch.zeros(len(rollout.token_ids)) for rollout in group.rollouts]

    middle = RolloutGroup([1], [Rollout([1] * 5, [0.0] * 5)])
    assert sampler_difference(score, [middle, RolloutGroup([1], rollouts)], SamplingConfig()) == 0
    assert lengths == [9, 8, 7, 6, 5, 4, 3, 2]


@pytest.mark.parametrize(
    ("option", "says_something"),
    [({"top_k": 4}, False), ({"min_p": 0.1}, False), ({"repetition_penalty": 1.1}, False), ({}, True)],
)
def test_sampling_options_under_which_tokens_cannot_be_compared(option, says_something):
    assert can_compare(SamplingConfig(**option)) is says_something


def test_only_sampled_tokens_are_compared():
    episode = make_episode(observation=1)  # 0 | -1 -2 -3 | 0 0 | -4
    plain = Rollout([1, 2], logprobs=[-1.0, -1.0])
    context_alone = make_episode(loss_mask=[0] * 6)
    expected = [torch.tensor([-9.0, -1.0, -2.0, -3.5, -9.0, -9.0, -4.25]), torch.tensor([-1.0, -1.75])]
    group = make_group(episode, plain)
    assert mean_difference(expected, group, SamplingConfig()) == pytest.approx((0.5 + 0.25 + 0.75) / 6)
    assert sampler_difference(lambda group: expected, [make_group(context_alone)], SamplingConfig()) is None
    scored = make_group(context_alone, episode, plain)  # the first has nothing to compare
    assert sampler_difference(lambda group: expected, [scored], SamplingConfig()) == pytest.approx(1.5 / 6)
