"""REINFORCE++ with and without the group's mean as baseline, by hand."""

import math

import pytest
import torch

from pl_grouprl.functional.advantages import (
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
)

NAN = math.nan


def whiten(numbers):
    mean = sum(numbers) / len(numbers)
    variance = sum((x - mean) ** 2 for x in numbers) / (len(numbers) - 1)
    return [(x - mean) / math.sqrt(variance + 1e-8) for x in numbers]


def test_reinforce_plus_plus_by_hand():
    # Reward-to-go at gamma 1/2: 1, 2, 4 in the first row, its gap closed; 3, 6 in the second.
    rewards = torch.tensor([[0.0, NAN, 0.0, 4.0], [0.0, 6.0, 9.0, 9.0]])
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0]])
    a, b, c, d, e = whiten([1.0, 2.0, 4.0, 3.0, 6.0])
    expected = torch.tensor([[a, 0.0, b, c], [d, e, 0.0, 0.0]])
    torch.testing.assert_close(reinforce_plus_plus_advantages(rewards, mask, gamma=0.5), expected)


def test_rollout_without_a_reward_is_left_out_of_the_statistics():
    rewards = torch.tensor([[0.0, 4.0], [NAN, 5.0], [0.0, 1.0]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5)
    torch.testing.assert_close(advantages[[0, 2]], reinforce_plus_plus_advantages(rewards[[0, 2]], mask[:2], gamma=0.5))
    assert advantages[1].tolist() == [0.0, 0.0]
    baseline = reinforce_plus_plus_baseline_advantages(torch.tensor([4.0, NAN, 1.0]), [0, 0, 0], mask)
    torch.testing.assert_close(
        baseline[[0, 2]], reinforce_plus_plus_baseline_advantages(torch.tensor([4.0, 1.0]), [0, 0], mask[:2])
    )
    assert baseline[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(dtype):
    rewards = torch.zeros(5, 4, dtype=dtype)
    rewards[:, -1] = 0.7
    mask = torch.ones(5, 4, dtype=torch.bool)
    assert reinforce_plus_plus_advantages(rewards, mask, gamma=1.0).abs().max() == 0
    scores = torch.full((5,), 0.7, dtype=dtype)
    assert reinforce_plus_plus_baseline_advantages(scores, [0, 0, 0, 1, 1], mask).abs().max() == 0


def test_baseline_by_hand():
    # Group 8: 1 and 5, centred -2 and 2; their tokens 1 and 3. Group 3: 0.7 twice, with one token each, counts as 0.
    rewards = torch.tensor([1.0, 0.7, 5.0, 0.7])
    mask = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 1]])
    low, _, high, _, _, _ = whiten([-2.0, 0.0, 2.0, 2.0, 2.0, 0.0])
    expected = torch.tensor([[0.0, low, 0.0, 0.0], [0.0] * 4, [high, 0.0, high, high], [0.0] * 4])
    torch.testing.assert_close(
        reinforce_plus_plus_baseline_advantages(rewards, torch.tensor([8, 3, 8, 3]), mask), expected
    )


@pytest.mark.parametrize("baseline", [True, False])
def test_reduce_reaches_the_whitening(baseline):
    # A second rank with the very same batch: sums double, means stay, n - 1 grows from 3 to 7.
    mask = torch.ones(2, 2, dtype=torch.bool)
    if baseline:

        def estimate(reduce):
            return reinforce_plus_plus_baseline_advantages(torch.tensor([1.0, 3.0]), [0, 0], mask, reduce=reduce)
    else:

        def estimate(reduce):
            return reinforce_plus_plus_advantages(torch.tensor([[1.0, 2], [3, 4]]), mask, gamma=0.5, reduce=reduce)

    alone, together = estimate(None), estimate(lambda sums: 2 * sums)
    torch.testing.assert_close(together, alone * math.sqrt((4 / 3) / (8 / 7)))


def test_a_discount_out_of_range():
    with pytest.raises(ValueError, match=r"gamma is 2.0"):
        reinforce_plus_plus_advantages(torch.zeros(1, 2), torch.ones(1, 2), gamma=2.0)
