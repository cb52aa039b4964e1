"""Best of a group, length-weighted baseline and greedy baseline, by hand."""

import math

import pytest
import torch

from pl_grouprl.functional.advantages import grpo_passk_advantages, opo_advantages, remax_advantages

NAN = math.nan


def test_passk_by_hand():
    # Group 4: 1, 5, 2: the best leads by 3; mean 8/3, squares (25 + 49 + 4) / 9, variance 13 / 3. Group 9: 0, 2.
    rewards = torch.tensor([1.0, 0.0, 5.0, 2.0, 2.0])
    group_ids = torch.tensor([4, 9, 4, 9, 4])
    assert grpo_passk_advantages(rewards, group_ids, scale="none").tolist() == [0.0, 0.0, 3.0, 2.0, 0.0]
    torch.testing.assert_close(
        grpo_passk_advantages(rewards, group_ids, eps=0.0),
        torch.tensor([0.0, 0.0, 3 / math.sqrt(13 / 3), 2 / math.sqrt(2), 0.0]),
    )


def test_passk_without_a_lead():
    # Two best rewards, all equal, one, one and a missing one, all missing.
    rewards = torch.tensor([3.0, 1.0, 3.0, 0.7, 0.7, 0.7, 4.0, 5.0, NAN, NAN, NAN])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 3, 3, 4, 4])
    for scale in ("group", "none"):
        assert grpo_passk_advantages(rewards, group_ids, scale=scale).tolist() == [0.0] * 11


def test_passk_with_negative_rewards_and_missing_ones():
    rewards, group_ids = torch.tensor([-4.0, NAN, -1.0, -3.0]), torch.tensor([0, 0, 0, 0])
    assert grpo_passk_advantages(rewards, group_ids, scale="none").tolist() == [0.0, 0.0, 2.0, 0.0]


def test_opo_by_hand():
    # Group 1: baseline (1 * 2 + 4 * 6) / 8 = 3.25. Group 0: (2 * 1 + 0 * 3) / 4 = 0.5.
    rewards = torch.tensor([1.0, 2.0, 4.0, 0.0])
    advantages = opo_advantages(rewards, torch.tensor([1, 0, 1, 0]), torch.tensor([2, 1, 6, 3]))
    assert advantages.tolist() == [-2.25, 1.5, 0.75, -0.5]


def test_opo_leaves_out_missing_rewards_and_their_lengths():
    rewards = torch.tensor([1.0, NAN, 4.0, 0.7, 0.7, 9.0])
    advantages = opo_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([2, 100, 6, 3, 5, 4]))
    assert advantages.tolist() == [-2.25, 0.0, 0.75, 0.0, 0.0, 0.0]


def test_opo_without_any_token_is_finite():
    assert opo_advantages(torch.tensor([1.0, 2.0]), [0, 0], torch.tensor([0, 0])).isfinite().all()


def test_remax_by_hand():
    advantages = remax_advantages(torch.tensor([1.0, 0.25, NAN, 1.0]), torch.tensor([0.0, 0.5, 1.0, NAN]))
    assert advantages.tolist() == [1.0, -0.25, 0.0, 0.0]
    assert remax_advantages(torch.full((3,), 0.7), torch.full((3,), 0.7)).tolist() == [0.0] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_results_are_at_least_float32_and_without_gradient(dtype):
    rewards = torch.tensor([0, 1, 4]).to(dtype)
    if rewards.is_floating_point():
        rewards.requires_grad_()
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    for advantages in (
        grpo_passk_advantages(rewards, [0, 0, 0], scale="none"),
        opo_advantages(rewards, [0, 0, 0], torch.tensor([1, 1, 1])),
        remax_advantages(rewards, torch.zeros(3)),
    ):
        assert advantages.dtype == expected
        assert not advantages.requires_grad


def test_empty_batches():
    empty = torch.zeros(0)
    assert grpo_passk_advantages(empty, []).shape == (0,)
    assert opo_advantages(empty, [], empty).shape == (0,)
    assert remax_advantages(empty, empty).shape == (0,)


def test_errors_name_the_argument():
    rewards = torch.tensor([1.0, 2.0])
    with pytest.raises(ValueError, match="scale is 'batch'"):
        grpo_passk_advantages(rewards, [0, 0], scale="batch")
    with pytest.raises(ValueError, match=r"lengths has shape \(3,\)"):
        opo_advantages(rewards, [0, 0], torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match="greedy_rewards has 3 entries"):
        remax_advantages(rewards, torch.zeros(3))
    with pytest.raises(ValueError, match=r"greedy_rewards has shape \(2, 1\)"):
        remax_advantages(rewards, torch.zeros(2, 1))
    with pytest.raises(ValueError, match=r"greedy_rewards is infinite for rollouts \[1\]"):
        remax_advantages(rewards, torch.tensor([0.0, math.inf]))
