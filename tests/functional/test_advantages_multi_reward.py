"""Several rewards per rollout, added up before or after the comparison within the group."""

import math

import pytest
import torch

from pl_grouprl.functional.advantages import (
    combine_rewards,
    make_advantage_estimator,
    multi_reward_advantages,
)

NAN = math.nan
GRPO = make_advantage_estimator("grpo", eps=0.0)


def test_combine_by_hand():
    rewards = torch.tensor([[1.0, 2.0], [NAN, 3.0], [NAN, NAN]])
    combined = combine_rewards(rewards, [0.5, 2.0])
    assert combined[:2].tolist() == [4.5, 6.0]
    assert combined[2].isnan()


def test_sum_then_normalize_by_hand():
    # Sums with weights 1 and 2: 1, 5 (mean 3, std 2 sqrt 2) and, in the other group, 3 and a rollout without reward.
    rewards = torch.tensor([[1.0, 0.0], [3.0, NAN], [1.0, 2.0], [NAN, NAN]])
    advantages = multi_reward_advantages(rewards, [1.0, 2.0], torch.tensor([6, 2, 6, 2]), estimator=GRPO)
    torch.testing.assert_close(advantages, torch.tensor([-math.sqrt(0.5), 0.0, math.sqrt(0.5), 0.0]))


def test_normalize_then_sum_by_hand():
    # First function, group 0: 0, 2 gives -s, s with s = sqrt(1/2); group 1: 0, 10 gives -s, s.
    # Second function, group 0: 5, 3 gives s, -s; group 1: equal, 0. With weights 2 and 1 the sums are -s, s, -2s, 2s:
    # mean 0, variance (1 + 1 + 4 + 4) / 2 / 3 = 5 / 3.
    rewards = torch.tensor([[0.0, 5.0], [2.0, 3.0], [0.0, 0.7], [10.0, 0.7]])
    advantages = multi_reward_advantages(
        rewards, [2.0, 1.0], [0, 0, 1, 1], estimator=GRPO, aggregation="normalize_then_sum", eps=0.0
    )
    expected = torch.tensor([-1.0, 1.0, -2.0, 2.0]) * math.sqrt(0.5) / math.sqrt(5 / 3)
    torch.testing.assert_close(advantages, expected)


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
@pytest.mark.parametrize("name", ["grpo", "rloo", "grpo_passk"])
def test_equal_rewards_give_exactly_zero(aggregation, name):
    rewards = torch.tensor([[0.7, 0.1]] * 3 + [[0.2, 0.3], [0.9, 0.3], [0.4, 0.6]])
    advantages = multi_reward_advantages(
        rewards, [1.0, 1.0], [5, 5, 5, 6, 6, 6], estimator=make_advantage_estimator(name), aggregation=aggregation
    )
    assert advantages[:3].tolist() == [0.0] * 3
    assert advantages[3:].abs().max() > 0
    all_equal = multi_reward_advantages(
        rewards[:3], [1.0, 1.0], [5, 5, 5], estimator=make_advantage_estimator(name), aggregation=aggregation
    )
    assert all_equal.tolist() == [0.0] * 3


def test_equal_sums_of_different_rewards_give_exactly_zero():
    # 0.1 + 0.2 and 0.3 differ in the last bit of float64.
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    assert multi_reward_advantages(rewards, [1.0, 1.0], [0, 0], estimator=GRPO).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_rollout_to_which_no_function_applies_changes_nothing(aggregation):
    rewards = torch.tensor([[1.0, NAN], [NAN, NAN], [3.0, 0.5], [0.0, 0.0], [2.0, 1.0]])
    group_ids = torch.tensor([0, 0, 0, 1, 1])
    present = torch.tensor([0, 2, 3, 4])
    advantages = multi_reward_advantages(rewards, [1.0, 3.0], group_ids, estimator=GRPO, aggregation=aggregation)
    expected = multi_reward_advantages(
        rewards[present], [1.0, 3.0], group_ids[present], estimator=GRPO, aggregation=aggregation
    )
    torch.testing.assert_close(advantages[present], expected)
    assert advantages[1] == 0


def test_weight_of_zero_leaves_a_reward_out():
    rewards = torch.tensor([[1.0, 7.0], [3.0, -2.0], [5.0, 0.0]])
    both = multi_reward_advantages(rewards, torch.tensor([1.0, 0.0]), [0, 0, 0], estimator=GRPO)
    torch.testing.assert_close(both, GRPO(rewards[:, 0], [0, 0, 0]))


def test_lengths_and_greedy_rewards_reach_the_estimator():
    rewards = torch.tensor([[1.0, 0.0], [4.0, 2.0]])
    opo = multi_reward_advantages(
        rewards, [1.0, 2.0], [0, 0], estimator=make_advantage_estimator("opo"), lengths=torch.tensor([3, 1])
    )
    assert opo.tolist() == [1 - 2.75, 8 - 2.75]  # sums 1 and 8, baseline (3 * 1 + 1 * 8) / 4
    greedy = torch.tensor([[1.0, 1.0], [0.0, NAN]])
    remax = {"estimator": make_advantage_estimator("remax"), "greedy_rewards": greedy}
    assert multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], **remax).tolist() == [-2.0, 8.0]
    # Each by itself: 0, -1 and 4, missing; weighted sums -2 and 4: mean 1, std 3 sqrt 2.
    each = multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], aggregation="normalize_then_sum", eps=0.0, **remax)
    torch.testing.assert_close(each, torch.tensor([-1.0, 1.0]) / math.sqrt(2))


def test_errors_name_the_argument():
    rewards = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="aggregation is 'sum'"):
        multi_reward_advantages(rewards, [1.0] * 3, [0, 0], estimator=GRPO, aggregation="sum")
    with pytest.raises(ValueError, match=r"weights has shape \(2,\) and rewards \(2, 3\)"):
        multi_reward_advantages(rewards, [1.0, 2.0], [0, 0], estimator=GRPO)
    with pytest.raises(ValueError, match=r"rewards \(2,\)"):
        combine_rewards(rewards[:, 0], [1.0])
    with pytest.raises(ValueError, match=r"weights is \[1.0, inf, 0.0\]"):
        combine_rewards(rewards, [1.0, math.inf, 0.0])
    with pytest.raises(ValueError, match=r"greedy_rewards has shape \(2,\) and rewards \(2, 3\)"):
        multi_reward_advantages(rewards, [1.0] * 3, [0, 0], estimator=GRPO, greedy_rewards=torch.zeros(2))
    # A weight of 0 does not hide it, and two of opposite sign do not cancel to "no reward".
    with pytest.raises(ValueError, match="rewards is infinite"):
        combine_rewards(torch.tensor([[0.0, 0.0], [math.inf, -math.inf]]), [0.0, 1.0])
