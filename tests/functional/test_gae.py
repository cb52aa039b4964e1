"""Generalized advantage estimation against numbers worked out by hand and a loop over tokens."""

import math

import pytest
import torch

from pl_grouprl.functional.advantages import (
    discounted_returns,
    generalized_advantages,
    length_adaptive_lam,
    td_errors,
)

NAN = math.nan

# One response of three tokens, gamma = lam = 1/2. Errors: 0 + 1/8 - 1/2, 0 + 1/4 - 1/4, 1 + 0 - 1/2; then
# A_3 = 1/2, A_2 = 0 + 1/4 * 1/2, A_1 = -3/8 + 1/4 * 1/8. Every number is exact in binary.
REWARDS = torch.tensor([[0.0, 0.0, 1.0]])
VALUES = torch.tensor([[0.5, 0.25, 0.5]])
MASK = torch.ones(1, 3, dtype=torch.bool)
ERRORS = [-0.375, 0.0, 0.5]
ADVANTAGES = [-0.34375, 0.125, 0.5]
RETURNS = [0.15625, 0.375, 1.0]


def loop(rewards, values, mask, gamma, lam_B, bootstrap_B):
    """One token after another from the end, in plain floats."""
    advantages = torch.zeros(mask.shape, dtype=torch.float64)
    errors = torch.zeros(mask.shape, dtype=torch.float64)
    for row in range(len(mask)):
        next_value, advantage = float(bootstrap_B[row]), 0.0
        for t in reversed(range(mask.shape[1])):
            if mask[row, t]:
                error = float(rewards[row, t]) + gamma * next_value - float(values[row, t])
                advantage = error + gamma * float(lam_B[row]) * advantage
                next_value = float(values[row, t])
                errors[row, t], advantages[row, t] = error, advantage
    return advantages, errors


def random_rows(dtype, seed=0, rows=7, width=23):
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[2] = False
    mask[3] = True
    rewards, values = (torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return rewards, values, mask, torch.randn(rows, generator=generator, dtype=torch.float64).to(dtype)


def test_by_hand():
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [ADVANTAGES]
    assert returns.tolist() == [RETURNS]
    assert td_errors(REWARDS, VALUES, MASK, gamma=0.5).tolist() == [ERRORS]


def test_bootstrap_value_follows_the_last_valid_token():
    # The last error gains gamma * 2 = 1, and each token before it a quarter of what the next one gained.
    bootstrap = torch.tensor([2.0])
    advantages, returns = generalized_advantages(REWARDS, VALUES, MASK, gamma=0.5, lam=0.5, bootstrap_value=bootstrap)
    assert advantages.tolist() == [[-0.34375 + 1 / 16, 0.125 + 1 / 4, 1.5]]
    assert (returns - VALUES).tolist() == advantages.tolist()
    padded = [torch.cat([x, torch.full((1, 2), fill)], dim=1) for x, fill in ((REWARDS, 9.0), (VALUES, NAN))]
    mask = torch.tensor([[1, 1, 1, 0, 0]])
    with_padding, _ = generalized_advantages(*padded, mask, gamma=0.5, lam=0.5, bootstrap_value=bootstrap)
    assert with_padding.tolist() == [[*advantages[0].tolist(), 0.0, 0.0]]


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
def test_gaps_and_their_contents_change_nothing(kind):
    mask = torch.tensor([[0, 1, 0, 0, 1, 1, 0]]).to(kind)
    rewards = torch.tensor([[NAN, 0.0, 7.0, NAN, 0.0, 1.0, math.inf]])
    values = torch.tensor([[NAN, 0.5, -3.0, NAN, 0.25, 0.5, NAN]])
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages.tolist() == [[0.0, ADVANTAGES[0], 0.0, 0.0, ADVANTAGES[1], ADVANTAGES[2], 0.0]]
    assert returns.tolist() == [[0.0, RETURNS[0], 0.0, 0.0, RETURNS[1], RETURNS[2], 0.0]]
    errors = td_errors(rewards, values, mask, gamma=0.5)
    assert errors.tolist() == [[0.0, ERRORS[0], 0.0, 0.0, ERRORS[1], ERRORS[2], 0.0]]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-5)])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 1.0)])
def test_equals_a_loop_over_tokens(dtype, tolerance, gamma, lam):
    rewards, values, mask, bootstrap = random_rows(dtype)
    expected, errors = loop(rewards, values, mask, gamma, [lam] * len(mask), bootstrap)
    hidden = [x.masked_fill(~mask, NAN) for x in (rewards, values)]
    advantages, returns = generalized_advantages(*hidden, mask, gamma=gamma, lam=lam, bootstrap_value=bootstrap)
    assert advantages.dtype == returns.dtype == dtype
    torch.testing.assert_close(advantages.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(returns.double(), (expected + values.double()) * mask, atol=tolerance, rtol=tolerance)
    ours = td_errors(*hidden, mask, gamma=gamma, bootstrap_value=bootstrap)
    torch.testing.assert_close(ours.double(), errors, atol=tolerance, rtol=tolerance)


def test_lambda_per_rollout_and_separate_critic_lambda():
    rewards, values, mask, bootstrap = random_rows(torch.float64, seed=1)
    lam = torch.linspace(0, 1, len(mask), dtype=torch.float64)
    advantages, returns = generalized_advantages(
        rewards, values, mask, gamma=0.9, lam=lam, critic_lam=1.0, bootstrap_value=bootstrap
    )
    torch.testing.assert_close(advantages, loop(rewards, values, mask, 0.9, lam, bootstrap)[0])
    target, _ = loop(rewards, values, mask, 0.9, torch.ones(len(mask)), bootstrap)
    torch.testing.assert_close(returns, (target + values) * mask)
    one_by_one, _ = generalized_advantages(
        rewards, values, mask, gamma=0.9, lam=torch.tensor(0.5), critic_lam=lam, bootstrap_value=bootstrap
    )
    assert torch.equal(
        one_by_one, generalized_advantages(rewards, values, mask, gamma=0.9, lam=0.5, bootstrap_value=bootstrap)[0]
    )


def test_lambda_zero_and_one():
    rewards, values, mask, _ = random_rows(torch.float64, seed=2)
    full, returns = generalized_advantages(rewards, values, mask, gamma=0.97, lam=1.0)
    to_go = discounted_returns(rewards, mask, 0.97)
    torch.testing.assert_close(returns, to_go)
    torch.testing.assert_close(full, to_go - values * mask)
    one_step, _ = generalized_advantages(rewards, values, mask, gamma=0.97, lam=0.0)
    torch.testing.assert_close(one_step, td_errors(rewards, values, mask, gamma=0.97))


def test_discounted_returns_by_hand():
    # Valid rewards 4, 8, 16 at gamma 1/2: 4 + (8 + 16 / 2) / 2 = 12, 16, 16.
    rewards = torch.tensor([[4.0, NAN, 8.0, 16.0, 5.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[12.0, 0.0, 16.0, 16.0, 0.0], [0.0] * 5]


def test_row_without_a_reward_has_no_advantage_and_does_not_move_the_critic():
    rewards = torch.tensor([[0.0, NAN, 0.0], [0.0, 0.0, 1.0]])
    values, mask = VALUES.repeat(2, 1), MASK.repeat(2, 1)
    advantages, returns = generalized_advantages(
        rewards, values, mask, gamma=0.5, lam=0.5, bootstrap_value=torch.tensor([3.0, 0.0])
    )
    assert advantages.tolist() == [[0.0] * 3, ADVANTAGES]
    assert returns.tolist() == [VALUES[0].tolist(), RETURNS]
    assert discounted_returns(rewards, mask, 0.5).tolist() == [[0.0] * 3, [0.25, 0.5, 1.0]]


def test_value_of_nan_inside_the_mask_is_not_hidden():
    advantages, _ = generalized_advantages(REWARDS, torch.tensor([[0.5, NAN, 0.5]]), MASK, gamma=0.5, lam=0.5)
    assert advantages[0, :2].isnan().all()


def test_bfloat16_is_computed_in_float32_without_gradient():
    values = VALUES.bfloat16().requires_grad_()
    advantages, returns = generalized_advantages(REWARDS.bfloat16(), values, MASK, gamma=0.5, lam=0.5)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert advantages.tolist() == [ADVANTAGES]
    mixed, _ = generalized_advantages(REWARDS, values.detach().double(), MASK, gamma=0.5, lam=0.5)
    assert mixed.dtype == torch.float64


def test_inputs_are_not_modified_and_empty_batches_work():
    rewards, values = REWARDS.clone(), VALUES.clone()
    generalized_advantages(rewards, values, MASK, gamma=0.5, lam=0.5)
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(values, VALUES)
    for shape in ((0, 4), (3, 0), (0, 0)):
        empty = torch.zeros(shape)
        advantages, returns = generalized_advantages(
            empty, empty, empty.bool(), gamma=1.0, lam=1.0, bootstrap_value=torch.zeros(shape[0])
        )
        assert advantages.shape == returns.shape == shape


def test_length_adaptive_lambda_by_hand():
    # alpha = 1/20: 1 - 20 / l, negative below 20 tokens.
    lam = length_adaptive_lam(torch.tensor([0, 1, 19, 20, 40, 200]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.9]))
    assert length_adaptive_lam(torch.tensor([100.0], dtype=torch.float64), 0.5).tolist() == [1 - 1 / 50]
    generalized_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=length_adaptive_lam(MASK.sum(dim=1), 0.05))


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match=r"values has shape \(1, 2\) and rewards \(1, 3\)"):
        generalized_advantages(REWARDS, VALUES[:, :2], MASK, gamma=1.0, lam=1.0)
    with pytest.raises(ValueError, match=r"mask has shape \(3,\) and rewards \(1, 3\)"):
        discounted_returns(REWARDS, MASK[0], 1.0)
    with pytest.raises(ValueError, match=r"rewards has shape \(3,\)"):
        td_errors(REWARDS[0], VALUES[0], MASK[0], gamma=1.0)
    with pytest.raises(ValueError, match=r"mask has the entry 0.5"):
        td_errors(REWARDS, VALUES, torch.full((1, 3), 0.5), gamma=1.0)
    with pytest.raises(ValueError, match=r"gamma is 1.5"):
        generalized_advantages(REWARDS, VALUES, MASK, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match=r"lam is -0.1"):
        generalized_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=-0.1)
    with pytest.raises(ValueError, match="critic_lam is tensor"):
        generalized_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=1.0, critic_lam=torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"lam has shape \(2,\)"):
        generalized_advantages(REWARDS, VALUES, MASK, gamma=1.0, lam=torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match=r"bootstrap_value has shape \(1, 1\)"):
        td_errors(REWARDS, VALUES, MASK, gamma=1.0, bootstrap_value=torch.zeros(1, 1))
    with pytest.raises(ValueError, match=r"rewards is infinite for rollouts \[0\]"):
        discounted_returns(REWARDS / 0, MASK, 1.0)
    with pytest.raises(ValueError, match="alpha is 0"):
        length_adaptive_lam(torch.tensor([3]), 0)
