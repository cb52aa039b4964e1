import math

import pytest
import torch

from pl_grouprl.functional.losses import aggregate
from pl_grouprl.functional.policy_loss import (
    POLICY_LOSSES,
    cispo_policy_loss,
    clipped_policy_loss,
    gspo_policy_loss,
    make_policy_loss,
)

LOW, HIGH, REGION = (f"clip_ratio/{name}_mean" for name in ("low", "high", "region"))


def _logprobs(ratios):
    """Policy and old log-probabilities (float64) whose ratios are those given."""
    old = torch.linspace(-2.0, -0.5, len(ratios), dtype=torch.float64)
    return (old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(), old


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _ones(n):
    return torch.ones(n, dtype=torch.bool)


def test_clipped_loss_by_hand():
    """Clip at 0.8 and 1.3: with A > 0 only the upper bound acts, with A < 0 only the lower."""
    ratios = [0.5, 1.0, 1.5, 0.5, 1.0, 1.5]
    advantages = _tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    policy, old = _logprobs(ratios)
    result = clipped_policy_loss(policy, old, advantages, mask_N=_ones(6), epsilon=0.2, epsilon_high=0.3)
    torch.testing.assert_close(result.per_token_N, _tensor([-1.0, -2.0, -2.6, 1.6, 2.0, 3.0]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, _tensor([-1.0, -2.0, 0.0, 0.0, 2.0, 3.0]))  # -A r, or 0 where clipped
    assert result.metrics[LOW] == 1
    assert result.metrics[HIGH] == 1
    assert result.metrics[REGION] == 2
    assert result.metric_count == 6


def test_epsilon_high_defaults_to_epsilon():
    policy, old = _logprobs([1.5])
    result = clipped_policy_loss(policy, old, _tensor([1.0]), mask_N=_ones(1), epsilon=0.25)
    torch.testing.assert_close(result.per_token_N, _tensor([-1.25]))


def test_dual_clip_limits_the_loss_of_negative_advantages_only():
    policy, old = _logprobs([5.0, 2.0, 5.0])
    advantages = _tensor([-1.0, -1.0, 1.0])
    result = clipped_policy_loss(policy, old, advantages, mask_N=_ones(3), epsilon=0.2, delta=3.0)
    torch.testing.assert_close(result.per_token_N, _tensor([3.0, 2.0, -1.2]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, _tensor([0.0, 2.0, 0.0]))
    assert result.metrics["clip_ratio/delta_mean"] == 1


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}))  # those always pick a token
def test_on_policy_gradient_is_that_of_the_plain_policy_gradient(name):
    policy = _tensor([-1.0, -0.3, -2.0]).requires_grad_()
    advantages = _tensor([0.5, 0.5, -1.5])
    result = make_policy_loss(name)(
        policy, policy.detach(), advantages, mask_N=_ones(3), rollout_index_N=torch.tensor([0, 0, 1]), num_rollouts=2
    )
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, -advantages)
    assert all(value == 0 for value in result.metrics.values())


def test_gspo_by_hand():
    """Rollout 1 has the ratios 1 and 4 (geometric mean 2), rollout 0 has 0.25 and 1 (0.5) and a masked token."""
    policy, old = _logprobs([1.0, 0.25, 4.0, 100.0, 1.0])
    rollouts = torch.tensor([1, 0, 1, 0, 0])
    mask = torch.tensor([True, True, True, False, True])
    advantages = _tensor([-3.0, 1.0, -3.0, 1.0, 1.0])
    result = gspo_policy_loss(
        policy, old, advantages, mask_N=mask, rollout_index_N=rollouts, num_rollouts=3, epsilon=0.6, epsilon_high=0.5
    )
    torch.testing.assert_close(result.per_token_N, _tensor([6.0, -0.5, 6.0, 0.0, -0.5]))
    assert result.metric_count == 2  # rollout 2 has no token
    assert result.metrics[REGION] == 0  # 2 > 1.5, but its advantage is negative; 0.5 < 1 but its advantage is positive
    flipped = gspo_policy_loss(
        policy, old, -advantages, mask_N=mask, rollout_index_N=rollouts, num_rollouts=3, epsilon=0.4, epsilon_high=0.5
    )
    torch.testing.assert_close(flipped.per_token_N, _tensor([-4.5, 0.6, -4.5, 0.0, 0.6]))
    torch.testing.assert_close(flipped.metrics[LOW].double(), _tensor(1.0))
    torch.testing.assert_close(flipped.metrics[HIGH].double(), _tensor(1.0))
    (gradient,) = torch.autograd.grad(flipped.per_token_N.sum(), policy)
    assert gradient.tolist() == [0.0] * 5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
def test_gspo_gradient_equals_that_of_the_sequence_ratio(mode):
    generator = torch.Generator().manual_seed(1)
    rollouts = torch.tensor([0, 0, 0, 1, 1, 2])
    policy = -torch.rand(6, generator=generator, dtype=torch.float64).requires_grad_()
    old = -torch.rand(6, generator=generator, dtype=torch.float64)
    advantages = _tensor([1.0, -2.0, 0.5])[rollouts]
    options = {"mask_N": _ones(6), "rollout_index_N": rollouts, "num_rollouts": 3}
    result = gspo_policy_loss(policy, old, advantages, **options, epsilon=10.0)
    ours = aggregate(result.per_token_N, mode=mode, **options)
    ratio = torch.stack([(policy - old)[rollouts == i].mean().exp() for i in range(3)])[rollouts]
    theirs = aggregate(-ratio * advantages, mode=mode, **options)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(torch.autograd.grad(ours, policy)[0], torch.autograd.grad(theirs, policy)[0])


def test_cispo_by_hand():
    """Weights 0.5, 1, 3 become 0.8, 1, 1.4; each token keeps the gradient -w A."""
    policy, old = _logprobs([0.5, 1.0, 3.0])
    advantages = _tensor([1.0, 2.0, -1.0])
    result = cispo_policy_loss(policy, old, advantages, mask_N=_ones(3), epsilon=0.2, epsilon_high=0.4)
    weights = _tensor([0.8, 1.0, 1.4])
    torch.testing.assert_close(result.per_token_N, -weights * advantages * policy)
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, -weights * advantages)
    assert (result.metrics[LOW], result.metrics[HIGH], result.metrics[REGION]) == (1, 1, 2)


def test_cispo_with_one_upper_bound():
    policy, old = _logprobs([0.01, 3.0, 9.0])
    result = cispo_policy_loss(policy, old, _tensor([1.0, 1.0, 1.0]), mask_N=_ones(3), epsilon_max=5.0)
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, _tensor([-0.01, -3.0, -5.0]))
    assert (result.metrics[LOW], result.metrics[HIGH]) == (0, 1)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf])
def test_masked_tokens_change_nothing(name, junk):
    clipping = {"epsilon": 0.1} if "epsilon" in POLICY_LOSSES[name].known_options() else {}
    loss = make_policy_loss(name, **clipping)
    mask = torch.tensor([True, False, True])
    rollouts = torch.tensor([0, 0, 0])
    old, advantages = _tensor([-1.5, 0.0, -0.4]), _tensor([1.0, 0.0, -1.0])

    def run(value):
        policy = _tensor([-1.0, value, -1.0]).requires_grad_()
        result = loss(
            policy,
            old.index_fill(0, torch.tensor([1]), value),
            advantages.index_fill(0, torch.tensor([1]), value),
            mask_N=mask,
            rollout_index_N=rollouts,
            num_rollouts=1,
        )
        result.per_token_N.sum().backward()
        return result, policy.grad

    clean, clean_gradient = run(0.0)
    dirty, dirty_gradient = run(junk)
    assert torch.equal(clean.per_token_N, dirty.per_token_N)
    assert torch.equal(clean_gradient, dirty_gradient)
    assert dirty.per_token_N[1] == 0
    assert dirty_gradient[1] == 0
    assert clean.metrics == dirty.metrics


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_extreme_ratios_stay_finite_and_no_token_is_fine(name):
    policy = torch.tensor([0.0, -500.0]).requires_grad_()
    options = {"mask_N": _ones(2), "rollout_index_N": torch.tensor([0, 1]), "num_rollouts": 2}
    result = make_policy_loss(name)(policy, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 0.0]), **options)
    assert result.per_token_N.isfinite().all()
    empty = torch.zeros(0, requires_grad=True)
    options = {"mask_N": _ones(0), "rollout_index_N": torch.zeros(0, dtype=torch.int64), "num_rollouts": 2}
    result = make_policy_loss(name)(empty, empty.detach(), empty.detach(), **options)
    assert result.per_token_N.shape == (0,)
    assert result.metric_count == 0
    result.per_token_N.sum().backward()


def test_losses_by_name_equal_the_functions():
    policy, old = _logprobs([0.5, 4.0, 1.5, 0.9])
    advantages, mask = _tensor([1.0, -1.0, 1.0, -1.0]), _ones(4)
    rollouts = {"rollout_index_N": torch.tensor([0, 0, 1, 1]), "num_rollouts": 2}
    arguments = (policy, old, advantages)
    pairs = [
        (
            make_policy_loss("ppo", epsilon=0.1, epsilon_high=0.3, delta=2.0),
            clipped_policy_loss(*arguments, mask_N=mask, epsilon=0.1, epsilon_high=0.3, delta=2.0),
        ),
        (
            make_policy_loss("gspo", epsilon=0.1, epsilon_high=0.3),
            gspo_policy_loss(*arguments, mask_N=mask, **rollouts, epsilon=0.1, epsilon_high=0.3),
        ),
        (make_policy_loss("cispo", epsilon_max=2.0), cispo_policy_loss(*arguments, mask_N=mask, epsilon_max=2.0)),
    ]
    for loss, expected in pairs:
        result = loss(*arguments, mask_N=mask, **rollouts)
        assert torch.equal(result.per_token_N, expected.per_token_N)
        assert result.metrics == expected.metrics


def test_errors_name_the_argument():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match=r"advantages_N has shape \(2,\) and policy_logprobs_N \(3,\)"):
        clipped_policy_loss(x, x, x[:2], mask_N=_ones(3))
    with pytest.raises(ValueError, match=r"policy_logprobs_N has shape \(1, 3\)"):
        clipped_policy_loss(x[None], x, x, mask_N=_ones(3))
    with pytest.raises(ValueError, match="mask_N has dtype"):
        clipped_policy_loss(x, x, x, mask_N=torch.ones(3))
    with pytest.raises(ValueError, match=r"rollout_index_N has shape \(2,\)"):
        gspo_policy_loss(x, x, x, mask_N=_ones(3), rollout_index_N=torch.zeros(2, dtype=torch.int64), num_rollouts=1)
    with pytest.raises(ValueError, match="policy_loss is 'trpo'"):
        make_policy_loss("trpo")
    with pytest.raises(ValueError, match="policy_loss='gspo' does not use delta; it takes epsilon, epsilon_high"):
        make_policy_loss("gspo", delta=3.0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_says_whether_it_is_zero_without_advantages(name):
    """Of the first rollout, beside one that has advantages."""
    generator = torch.Generator().manual_seed(0)
    policy_N, old_N = (2 * torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(2))
    policy_N.requires_grad_()
    index_N = torch.arange(2).repeat_interleave(20)
    loss = make_policy_loss(name)
    found = loss(
        policy_N, old_N, index_N.double(), mask_N=index_N >= 0, rollout_index_N=index_N, num_rollouts=2
    ).per_token_N
    (gradient_N,) = torch.autograd.grad(found[:20].sum(), policy_N, allow_unused=True)
    is_zero = not found[:20].any() and (gradient_N is None or not gradient_N.any())
    assert loss.is_zero_without_advantages == (is_zero and not loss.compares_tokens)
