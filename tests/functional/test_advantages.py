import math

import pytest
import torch

from pl_grouprl.functional.advantages import (
    ADVANTAGE_ESTIMATORS,
    group_relative_advantages,
    make_advantage_estimator,
    rloo_advantages,
)

NAN = math.nan


def test_group_scale_by_hand():
    # Group 5: rewards 1, 3: mean 2, variance (1 + 1) / 1. Group -2: 0, 0, 3: mean 1, variance (1 + 1 + 4) / 2.
    rewards = torch.tensor([0.0, 1.0, 0.0, 3.0, 3.0])
    group_ids = torch.tensor([-2, 5, -2, 5, -2])
    expected = torch.tensor(
        [-1 / math.sqrt(3), -1 / math.sqrt(2), -1 / math.sqrt(3), 1 / math.sqrt(2), 2 / math.sqrt(3)]
    )
    torch.testing.assert_close(group_relative_advantages(rewards, group_ids, eps=0.0), expected)


def test_eps_is_added_to_the_standard_deviation():
    advantages = group_relative_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), eps=0.5)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0]) / (math.sqrt(2) + 0.5))


def test_batch_scale_divides_by_the_spread_of_all_rewards():
    # All rewards 1, 3, 2, 6: mean 3, squares 4 + 0 + 1 + 9 = 14, std sqrt(14 / 3).
    rewards = torch.tensor([1.0, 3.0, 2.0, 6.0])
    advantages = group_relative_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale="batch", eps=0.0)
    torch.testing.assert_close(advantages, torch.tensor([-1.0, 1.0, -2.0, 2.0]) / math.sqrt(14 / 3))


def test_scale_none_only_centres():
    rewards = torch.tensor([1.0, 3.0, 2.0, 6.0])
    advantages = group_relative_advantages(rewards, torch.tensor([0, 0, 1, 1]), scale="none")
    assert advantages.tolist() == [-1.0, 1.0, -2.0, 2.0]


def test_rloo_by_hand():
    # Group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2. Group 0: 4 - 5, 5 - 4.
    rewards = torch.tensor([1.0, 4.0, 2.0, 5.0, 6.0])
    advantages = rloo_advantages(rewards, torch.tensor([7, 0, 7, 0, 7]))
    torch.testing.assert_close(advantages, torch.tensor([-3.0, -1.0, -1.5, 1.0, 4.5]))


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("size", [2, 3, 7, 16])
def test_equal_rewards_give_exactly_zero(scale, size):
    rewards = torch.cat([torch.full((size,), 0.7), torch.tensor([0.1, 0.2])])
    group_ids = torch.tensor([3] * size + [4, 4])
    advantages = group_relative_advantages(rewards, group_ids, scale=scale, eps=1e-9)
    assert advantages[:size].tolist() == [0.0] * size
    assert advantages[size:].abs().min() > 0
    assert rloo_advantages(rewards, group_ids)[:size].tolist() == [0.0] * size


def test_every_group_degenerate_is_all_zero():
    rewards = torch.tensor([0.3, 0.3, 0.9, NAN, NAN])
    for advantages in (
        *(
            group_relative_advantages(rewards, torch.tensor([0, 0, 1, 1, 2]), scale=s)
            for s in ("group", "batch", "none")
        ),
        rloo_advantages(rewards, torch.tensor([0, 0, 1, 1, 2])),
    ):
        assert advantages.tolist() == [0.0] * 5


@pytest.mark.parametrize("estimate", [group_relative_advantages, rloo_advantages])
def test_missing_rewards_are_left_out(estimate):
    rewards = torch.tensor([1.0, NAN, 3.0, 2.0, 5.0, 8.0, NAN])
    group_ids = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    present = ~rewards.isnan()
    advantages = estimate(rewards, group_ids)
    torch.testing.assert_close(advantages[present], estimate(rewards[present], group_ids[present]))
    assert advantages[~present].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("estimate", [group_relative_advantages, rloo_advantages])
def test_group_of_one_is_zero(estimate):
    # The second group has one reward only, the other is missing.
    advantages = estimate(torch.tensor([5.0, 2.0, NAN, 0.0, 1.0]), torch.tensor([0, 1, 1, 2, 2]))
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] == -advantages[4] != 0


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_order_of_rollouts_does_not_matter(scale):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(40, generator=generator)
    group_ids = torch.randint(-5, 5, (40,), generator=generator) * 1_000_003
    order = torch.randperm(40, generator=generator)
    shuffled = group_relative_advantages(rewards[order], group_ids[order], scale=scale)
    assert torch.equal(shuffled, group_relative_advantages(rewards, group_ids, scale=scale)[order])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
    ],
)
def test_result_is_at_least_float32_and_without_gradient(dtype, expected):
    rewards = torch.tensor([0, 1, 1, 0]).to(dtype)
    if rewards.is_floating_point():
        rewards.requires_grad_()
    advantages = group_relative_advantages(rewards, [0, 0, 1, 1])
    assert advantages.dtype == expected
    assert not advantages.requires_grad
    torch.testing.assert_close(
        advantages, torch.tensor([-1, 1, 1, -1], dtype=expected) * math.sqrt(0.5), atol=2e-6, rtol=0
    )


def test_inputs_are_not_modified_and_empty_batches_work():
    rewards = torch.tensor([1.0, NAN])
    group_relative_advantages(rewards, torch.tensor([0, 0]))
    assert rewards[0] == 1
    assert rewards[1].isnan()
    assert rloo_advantages(torch.zeros(0), []).shape == (0,)
    assert group_relative_advantages(torch.zeros(0), [], scale="batch").shape == (0,)


def test_estimators_by_name_equal_the_functions():
    rewards, group_ids = torch.tensor([0.0, 1.0, 4.0]), torch.tensor([0, 0, 0])
    expected = group_relative_advantages(rewards, group_ids, scale="none")
    assert torch.equal(make_advantage_estimator("grpo", scale="none")(rewards, group_ids), expected)
    assert torch.equal(make_advantage_estimator("rloo")(rewards, group_ids), rloo_advantages(rewards, group_ids))
    assert set(ADVANTAGE_ESTIMATORS) >= {"grpo", "rloo"}


def test_errors_name_the_argument():
    rewards = torch.tensor([1.0, 2.0, 3.0])
    with pytest.raises(ValueError, match=r"rewards has shape \(3, 1\)"):
        rloo_advantages(rewards[:, None], [0, 0, 0])
    with pytest.raises(ValueError, match=r"rewards is infinite for rollouts \[1\]"):
        group_relative_advantages(torch.tensor([0.0, -math.inf]), [0, 0])
    with pytest.raises(ValueError, match=r"scale is 'std'"):
        group_relative_advantages(rewards, [0, 0, 0], scale="std")
    with pytest.raises(ValueError, match=r"advantage_estimator is 'gea'"):
        make_advantage_estimator("gea")
    with pytest.raises(ValueError, match=r"advantage_estimator='rloo' does not use scale"):
        make_advantage_estimator("rloo", scale="none")
