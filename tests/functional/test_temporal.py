"""Estimators along time: GAE against a loop, REINFORCE++ by hand, distillation against enumerated KLs."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch

from pl_grouprl.functional.advantages import (
    discounted_returns,
    distillation_advantages,
    generalized_advantages,
    length_adaptive_lam,
    reinforce_plus_plus_advantages,
    reinforce_plus_plus_baseline_advantages,
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


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize("places", [[0, 1, 2], [1, 4, 5]])
def test_by_hand_with_gaps_or_without(kind, places):
    mask, rewards, values = (
        torch.zeros(1, 7),
        torch.tensor([[NAN, 7.0, NAN, NAN, 9.0, 0.0, math.inf]]),
        torch.full((1, 7), NAN),
    )
    mask[0, places], rewards[0, places], values[0, places] = 1, REWARDS, VALUES
    advantages, returns = generalized_advantages(rewards, values, mask.to(kind), gamma=0.5, lam=0.5)
    for found, expected in (
        (advantages, ADVANTAGES),
        (returns, RETURNS),
        (td_errors(rewards, values, mask.to(kind), gamma=0.5), ERRORS),
    ):
        assert found[0, places].tolist() == expected
        assert not found[mask == 0].any()


def test_bfloat16_is_computed_in_float32_without_gradient_and_inputs_stay():
    rewards, values = REWARDS.bfloat16(), VALUES.bfloat16().requires_grad_()
    advantages, returns = generalized_advantages(rewards, values, MASK, gamma=0.5, lam=0.5)
    assert advantages.dtype == returns.dtype == torch.float32
    assert not advantages.requires_grad
    assert not returns.requires_grad
    assert advantages.tolist() == [ADVANTAGES]
    assert torch.equal(rewards, REWARDS)
    assert torch.equal(values, VALUES)
    mixed, _ = generalized_advantages(REWARDS, values.detach().double(), MASK, gamma=0.5, lam=0.5)
    assert mixed.dtype == torch.float64


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0)])
def test_empty_batches(shape):
    empty = torch.zeros(shape)
    options = {"gamma": 1.0, "lam": 1.0, "bootstrap_value": torch.zeros(shape[0])}
    advantages, returns = generalized_advantages(empty, empty, empty.bool(), **options)
    assert advantages.shape == returns.shape == shape


def test_length_adaptive_lambda_by_hand():
    # alpha = 1/20: 1 - 20 / l, negative below 20 tokens.
    lam = length_adaptive_lam(torch.tensor([0, 1, 19, 20, 40, 200]), 0.05)
    torch.testing.assert_close(lam, torch.tensor([0.0, 0.0, 0.0, 0.0, 0.5, 0.9]))
    assert length_adaptive_lam(torch.tensor([100.0], dtype=torch.float64), 0.5).tolist() == [1 - 1 / 50]


@pytest.mark.parametrize(
    "estimate",
    [
        partial(reinforce_plus_plus_baseline_advantages, torch.tensor([1.0, 3.0]), [0, 0], torch.ones(2, 2) > 0),
        partial(reinforce_plus_plus_advantages, torch.tensor([[1.0, 2], [3, 4]]), torch.ones(2, 2) > 0, gamma=0.5),
    ],
)
def test_reduce_reaches_the_whitening(estimate):
    # A second rank with the very same batch: sums double, means stay, n - 1 grows from 3 to 7.
    alone, together = estimate(reduce=None), estimate(reduce=lambda sums: 2 * sums)
    torch.testing.assert_close(together, alone * math.sqrt((4 / 3) / (8 / 7)))


def gae(**change):
    options = {"rewards": REWARDS, "values": VALUES, "mask": MASK, "gamma": 1.0, "lam": 1.0}
    return generalized_advantages(**{**options, **change})


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: gae(values=VALUES[:, :2]), "values"),
        (lambda: gae(gamma=1.5), "gamma"),
        (lambda: gae(lam=-0.1), "lam"),
        (lambda: gae(critic_lam=torch.tensor([2.0])), "critic_lam"),
        (lambda: gae(lam=torch.tensor([0.5, 0.5])), "lam"),
        (lambda: discounted_returns(REWARDS, MASK[0], 1.0), "mask"),
        (lambda: discounted_returns(REWARDS / 0, MASK, 1.0), r"rewards is infinite .* \[0\]"),
        (lambda: td_errors(REWARDS[0], VALUES[0], MASK[0], gamma=1.0), "rewards"),
        (lambda: td_errors(REWARDS, VALUES, torch.full((1, 3), 0.5), gamma=1.0), "mask"),
        (lambda: td_errors(REWARDS, VALUES, MASK, gamma=1.0, bootstrap_value=torch.zeros(1, 1)), "bootstrap_value"),
        (lambda: length_adaptive_lam(torch.tensor([3]), 0), "alpha"),
        (lambda: reinforce_plus_plus_advantages(REWARDS, MASK, gamma=2.0), "gamma"),
        (lambda: distillation_advantages(REWARDS, VALUES[:, :2], MASK), "teacher_logprobs"),
        (lambda: distillation_advantages(REWARDS, VALUES, MASK, gamma=1.5), "gamma"),
        (lambda: distillation_advantages(REWARDS, -REWARDS / 0, MASK), "infinite"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


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


def test_reinforce_rollout_without_a_reward_is_left_out_of_the_statistics():
    rewards = torch.tensor([[0.0, 4.0], [NAN, 5.0], [0.0, 1.0]])
    mask = torch.ones(3, 2, dtype=torch.bool)
    advantages = reinforce_plus_plus_advantages(rewards, mask, gamma=0.5)
    torch.testing.assert_close(advantages[[0, 2]], reinforce_plus_plus_advantages(rewards[[0, 2]], mask[:2], gamma=0.5))
    assert advantages[1].tolist() == [0.0, 0.0]
    baseline = reinforce_plus_plus_baseline_advantages(torch.tensor([4.0, NAN, 1.0]), [0, 0, 0], mask)
    expected = reinforce_plus_plus_baseline_advantages(torch.tensor([4.0, 1.0]), [0, 0], mask[:2])
    torch.testing.assert_close(baseline[[0, 2]], expected)
    assert baseline[1].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reinforce_of_equal_rewards_is_exactly_zero(dtype):
    rewards = torch.zeros(5, 4, dtype=dtype)
    rewards[:, -1] = 0.7
    mask = torch.ones(5, 4, dtype=torch.bool)
    assert reinforce_plus_plus_advantages(rewards, mask, gamma=1.0).abs().max() == 0
    scores = torch.full((5,), 0.7, dtype=dtype)
    assert reinforce_plus_plus_baseline_advantages(scores, [0, 0, 0, 1, 1], mask).abs().max() == 0


def test_reinforce_baseline_by_hand():
    # Group 8: 1 and 5, centred -2 and 2; their tokens 1 and 3. Group 3: 0.7 twice, with one token each, counts as 0.
    rewards = torch.tensor([1.0, 0.7, 5.0, 0.7])
    mask = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 0], [1, 0, 1, 1], [0, 0, 0, 1]])
    low, _, high, _, _, _ = whiten([-2.0, 0.0, 2.0, 2.0, 2.0, 0.0])
    expected = torch.tensor([[0.0, low, 0.0, 0.0], [0.0] * 4, [high, 0.0, high, high], [0.0] * 4])
    found = reinforce_plus_plus_baseline_advantages(rewards, torch.tensor([8, 3, 8, 3]), mask)
    torch.testing.assert_close(found, expected)


V = 3  # tokens


class Tabular(torch.nn.Module):
    """A policy over responses of a fixed length: logits for each prefix, [V ** t, V] at place t."""

    def __init__(self, length: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        tables = [torch.randn(V**t, V, generator=generator, dtype=torch.float64) for t in range(length)]
        self.tables = torch.nn.ParameterList(tables)

    def logprobs(self, responses: torch.Tensor) -> torch.Tensor:
        """Of each token, shape [B, T]."""
        prefix, columns = torch.zeros(len(responses), dtype=torch.long), []
        for t, table in enumerate(self.tables):
            columns.append(table.log_softmax(1)[prefix].gather(1, responses[:, t : t + 1]))
            prefix = prefix * V + responses[:, t]
        return torch.cat(columns, dim=1)


def pair(length):
    responses = torch.tensor(list(itertools.product(range(V), repeat=length)))
    return Tabular(length, 0), Tabular(length, 1), responses


def gradients(loss, model):
    return torch.autograd.grad(loss, list(model.tables))


def expected_policy_gradient(student, teacher, responses, gamma):
    """The expectation over all responses of the loss's gradient, -sum_t A_t grad log pi(y_t)."""
    logprobs = student.logprobs(responses)
    old = logprobs.detach()
    mask = torch.ones_like(responses, dtype=torch.bool)
    advantages = distillation_advantages(old, teacher.logprobs(responses).detach(), mask, gamma=gamma)
    return gradients(-(old.sum(1).exp()[:, None] * advantages * logprobs).sum(), student)


def assert_close(left, right):
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_gamma_1_is_the_gradient_of_the_reverse_kl_of_responses():
    student, teacher, responses = pair(3)
    logp, logq = student.logprobs(responses).sum(1), teacher.logprobs(responses).sum(1).detach()
    exact = gradients((logp.exp() * (logp - logq)).sum(), student)
    assert_close(expected_policy_gradient(student, teacher, responses, gamma=1.0), exact)


def test_gamma_0_is_the_gradient_of_each_tokens_kl_at_fixed_prefixes():
    student, teacher, responses = pair(3)
    logprobs = student.logprobs(responses).detach()
    loss, visits = torch.zeros((), dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    for own, theirs in zip(student.tables, teacher.tables, strict=True):
        p, q = own.log_softmax(1), theirs.detach().log_softmax(1)
        loss = loss + (visits * (p.exp() * (p - q)).sum(1)).sum()
        visits = (visits[:, None] * p.exp().detach()).flatten()
    torch.testing.assert_close(visits, logprobs.sum(1).exp())
    at_fixed_prefixes = gradients(loss, student)
    assert_close(expected_policy_gradient(student, teacher, responses, gamma=0.0), at_fixed_prefixes)
    whole = expected_policy_gradient(student, teacher, responses, gamma=1.0)
    assert (whole[0] - at_fixed_prefixes[0]).abs().max() > 0.01  # what it leaves out
    assert_close(whole[-1:], at_fixed_prefixes[-1:])  # nothing follows the last token


def test_distillation_by_hand_with_a_gap():
    old = torch.tensor([[-1.0, -2.0, -9.0, -0.5], [-1.0, 0.0, 0.0, 0.0]])
    teacher = torch.tensor([[-3.0, -1.0, -5.0, -1.0], [-0.25, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0]], dtype=torch.bool)
    each = torch.tensor([[-2.0, 1.0, 0.0, -0.5], [0.75, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(distillation_advantages(old, teacher, mask), each)
    # 1 + 0.5 * -0.5 = 0.75 across the gap, and -2 + 0.5 * 0.75 = -1.625.
    summed = torch.tensor([[-1.625, 0.75, 0.0, -0.5], [0.75, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(distillation_advantages(old, teacher, mask, gamma=0.5), summed)
