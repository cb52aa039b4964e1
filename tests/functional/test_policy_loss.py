"""Policy losses and their gradients, with numbers worked out by hand."""

import math

import pytest
import torch

from pl_grouprl.functional.policy_loss import (
    POLICY_LOSSES,
    cispo_policy_loss,
    clip_cov_policy_loss,
    clipped_policy_loss,
    dppo_kl_policy_loss,
    dppo_tv_policy_loss,
    gmpo_policy_loss,
    gpg_policy_loss,
    gspo_policy_loss,
    gspo_token_policy_loss,
    kl_cov_policy_loss,
    make_policy_loss,
    sapo_policy_loss,
    vespo_policy_loss,
)

LOW, HIGH, REGION, DELTA, COV = (f"clip_ratio/{name}_mean" for name in ("low", "high", "region", "delta", "cov"))


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _ones(n):
    return torch.ones(n, dtype=torch.bool)


def _check(result, policy, losses, gradients):
    torch.testing.assert_close(result.per_token_N, _tensor(losses))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, _tensor(gradients))


def _from_log_ratios(log_ratios):
    old = torch.linspace(-2.0, -0.5, len(log_ratios), dtype=torch.float64)
    return (old + _tensor(log_ratios)).requires_grad_(), old


def _logprobs(ratios):
    return _from_log_ratios(_tensor(ratios).log().tolist())


def test_clipped_loss_by_hand():
    """Clip at 0.8 and 1.3: with A > 0 only the upper bound acts, with A < 0 only the lower."""
    ratios = [0.5, 1.0, 1.5, 0.5, 1.0, 1.5]
    advantages = _tensor([2.0, 2.0, 2.0, -2.0, -2.0, -2.0])
    policy, old = _logprobs(ratios)
    result = clipped_policy_loss(policy, old, advantages, mask_N=_ones(6), epsilon=0.2, epsilon_high=0.3)
    # The gradient is -A r, or 0 where clipped.
    _check(result, policy, [-1.0, -2.0, -2.6, 1.6, 2.0, 3.0], [-1.0, -2.0, 0.0, 0.0, 2.0, 3.0])
    assert [result.metrics[name] for name in (LOW, HIGH, REGION)] == [1, 1, 2]
    assert result.metric_count == 6


def test_epsilon_high_defaults_to_epsilon():
    policy, old = _logprobs([1.5])
    result = clipped_policy_loss(policy, old, _tensor([1.0]), mask_N=_ones(1), epsilon=0.25)
    torch.testing.assert_close(result.per_token_N, _tensor([-1.25]))


def test_dual_clip_limits_the_loss_of_negative_advantages_only():
    policy, old = _logprobs([5.0, 2.0, 5.0])
    advantages = _tensor([-1.0, -1.0, 1.0])
    result = clipped_policy_loss(policy, old, advantages, mask_N=_ones(3), epsilon=0.2, delta=3.0)
    _check(result, policy, [3.0, 2.0, -1.2], [0.0, 2.0, 0.0])
    assert result.metrics[DELTA] == 1


@pytest.mark.parametrize("name", sorted(set(POLICY_LOSSES) - {"clip_cov", "kl_cov"}))  # those always pick a token
def test_on_policy_gradient_is_that_of_the_plain_policy_gradient(name):
    policy = _tensor([-1.0, -0.3, -2.0]).requires_grad_()
    advantages = _tensor([0.5, 0.5, -1.5])
    options = {"mask_N": _ones(3), "rollout_index_N": torch.tensor([0, 0, 1]), "num_rollouts": 2}
    result = make_policy_loss(name)(policy, policy.detach(), advantages, **options)
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, -advantages)
    assert all(value == 0 for metric, value in result.metrics.items() if metric.startswith("clip_ratio"))


def test_gspo_by_hand():
    """Rollout 1 has the ratios 1 and 4 (geometric mean 2), rollout 0 has 0.25 and 1 (0.5) and a masked token."""
    policy, old = _logprobs([1.0, 0.25, 4.0, 100.0, 1.0])
    rollouts = torch.tensor([1, 0, 1, 0, 0])
    mask = torch.tensor([True, True, True, False, True])
    advantages = _tensor([-3.0, 1.0, -3.0, 1.0, 1.0])
    options = {"mask_N": mask, "rollout_index_N": rollouts, "num_rollouts": 3, "epsilon_high": 0.5}
    result = gspo_policy_loss(policy, old, advantages, **options, epsilon=0.6)
    torch.testing.assert_close(result.per_token_N, _tensor([6.0, -0.5, 6.0, 0.0, -0.5]))
    assert result.metric_count == 2  # rollout 2 has no token
    assert result.metrics[REGION] == 0  # 2 > 1.5, but its advantage is negative; 0.5 < 1 but its advantage is positive
    flipped = gspo_policy_loss(policy, old, -advantages, **options, epsilon=0.4)
    _check(flipped, policy, [-4.5, 0.6, -4.5, 0.0, 0.6], [0.0] * 5)
    assert [float(flipped.metrics[name]) for name in (LOW, HIGH)] == pytest.approx([1, 1])


def test_cispo_by_hand():
    """Weights 0.5, 1, 3 become 0.8, 1, 1.4; each token keeps the gradient -w A."""
    policy, old = _logprobs([0.5, 1.0, 3.0])
    advantages = _tensor([1.0, 2.0, -1.0])
    result = cispo_policy_loss(policy, old, advantages, mask_N=_ones(3), epsilon=0.2, epsilon_high=0.4)
    weights = _tensor([0.8, 1.0, 1.4])
    _check(result, policy, (-weights * advantages * policy).tolist(), (-weights * advantages).tolist())
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

    def run(value):
        policy, old = _tensor([-1.0, value, -1.0]).requires_grad_(), _tensor([-1.5, value, -0.4])
        options = {"mask_N": mask, "rollout_index_N": torch.tensor([0, 0, 0]), "num_rollouts": 1}
        result = loss(policy, old, _tensor([1.0, value, -1.0]), **options)
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


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_says_whether_it_is_zero_without_advantages(name):
    """Of the first rollout, beside one that has advantages."""
    generator = torch.Generator().manual_seed(0)
    policy_N, old_N = (2 * torch.randn(40, dtype=torch.float64, generator=generator) for _ in range(2))
    policy_N.requires_grad_()
    index_N = torch.arange(2).repeat_interleave(20)
    loss = make_policy_loss(name)
    options = {"mask_N": index_N >= 0, "rollout_index_N": index_N, "num_rollouts": 2}
    found = loss(policy_N, old_N, index_N.double(), **options).per_token_N
    (gradient_N,) = torch.autograd.grad(found[:20].sum(), policy_N, allow_unused=True)
    is_zero = not found[:20].any() and (gradient_N is None or not gradient_N.any())
    assert loss.is_zero_without_advantages == (is_zero and not loss.compares_tokens)


def test_gspo_token_counts_tokens():
    """Sequence ratios 2 (two tokens, A > 0) and 1/2 (one token, A < 0)."""
    policy, old = _from_log_ratios([math.log(4), 0.0, -math.log(2)])
    options = {"mask_N": _ones(3), "rollout_index_N": torch.tensor([0, 0, 1]), "num_rollouts": 2}
    result = gspo_token_policy_loss(policy, old, _tensor([1.0, 1.0, -1.0]), **options)
    _check(result, policy, [-1.2, -1.2, 0.8], [0.0, 0.0, 0.0])
    assert [result.metrics[name] for name in (LOW, HIGH, REGION)] == [1, 2, 3]
    assert result.metric_count == 3


def test_gmpo_by_hand():
    """A = 1: (min(0.5, 0.3) - 0.1) / 2 = 0.1; A = -2: (max(-0.9, -0.4) + 0.7) / 2 = 0.15; a masked token in between."""
    policy, old = _from_log_ratios([0.5, -0.9, 5.0, -0.1, 0.7])
    mask, rollouts = torch.tensor([True, True, False, True, True]), torch.tensor([0, 1, 0, 0, 1])
    options = {"mask_N": mask, "rollout_index_N": rollouts, "num_rollouts": 3, "epsilon": 0.4, "epsilon_high": 0.3}
    result = gmpo_policy_loss(policy, old, _tensor([1.0, -2.0, 1.0, 1.0, -2.0]), **options)
    first, second = math.exp(0.1), 2 * math.exp(0.15)
    _check(result, policy, [-first, second, 0.0, -first, second], [0.0, 0.0, 0.0, -first, second])
    assert [result.metrics[name] for name in (LOW, HIGH, REGION)] == [1, 1, 2]
    assert result.metric_count == 4


def test_gmpo_without_advantage_ignores_the_log_ratio():
    """A token with A = 0 counts with log-ratio 0 (its ratio to the power of the sign): (0.2 + 0) / 2 = 0.1."""
    policy, old = _from_log_ratios([0.2, 3.0])
    options = {"mask_N": _ones(2), "rollout_index_N": torch.tensor([0, 0]), "num_rollouts": 1}
    result = gmpo_policy_loss(policy, old, _tensor([1.0, 0.0]), **options)
    _check(result, policy, [-math.exp(0.1), 0.0], [-math.exp(0.1) / 2, 0.0])


def test_gpg_by_hand():
    policy = _tensor([-1.0, -3.0]).requires_grad_()
    result = gpg_policy_loss(policy, torch.full_like(policy, 9.0).detach(), _tensor([2.0, -1.0]), mask_N=_ones(2))
    _check(result, policy, [2.0, -3.0], [-2.0, 1.0])
    assert result.metrics == {}


def test_sapo_by_hand():
    """Sigmoids 1/2, 3/4 (T = 1) and 1/4 (T = 2) give the gates 2, 3 and 1/2; slopes 4 s (1 - s) r."""
    up, down = 1 + math.log(3), 1 - math.log(3) / 2
    policy, old = _from_log_ratios([0.0, math.log(up), math.log(down)])
    options = {"mask_N": _ones(3), "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}
    result = sapo_policy_loss(policy, old, _tensor([2.0, 1.0, -4.0]), **options)
    _check(result, policy, [-4.0, -3.0, 2.0], [-2.0, -0.75 * up, 3 * down])


@pytest.mark.parametrize("loss", [dppo_tv_policy_loss, dppo_kl_policy_loss])
def test_dppo_by_hand(loss):
    """Moves of 0.25 are outside (KL 0.1438), one of 0.125 inside (KL 0.0323); one moves back; one weight is cut."""
    old = _tensor([0.5, 0.5, 0.5, 0.5, 0.1]).log()
    probabilities = [0.75, 0.625, 0.25, 0.25, 0.2]
    policy = _tensor(probabilities).log().requires_grad_()
    advantages = _tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    epsilon = 0.2 if loss is dppo_tv_policy_loss else 0.1
    result = loss(policy, old, advantages, mask_N=_ones(5), epsilon=epsilon, clip_ratio_c=1.5)
    gradients = [0.0, -1.25, 0.0, -0.5, 1.5]
    losses = [gradient * math.log(p) for gradient, p in zip(gradients, probabilities, strict=True)]
    _check(result, policy, losses, gradients)
    assert [result.metrics[name] for name in (LOW, HIGH, REGION, DELTA)] == [1, 1, 2, 1]


# Means 0 and -2, deviations of the log-probabilities 1, -0.5, -1.5, 1: covariances 2, -0.5, 4.5, 0.
ADVANTAGES = _tensor([2.0, 1.0, -3.0, 0.0])
LOGPROBS = _tensor([-1.0, -2.5, -3.5, -1.0])
LOG_RATIOS = _tensor([0.5, 0.1, -0.2, 0.0])


def _covariance_case():
    return LOGPROBS.clone().requires_grad_(), LOGPROBS - LOG_RATIOS, ADVANTAGES


def test_kl_cov_by_hand():
    """Half of four tokens: the first and the third."""
    policy, old, advantages = _covariance_case()
    result = kl_cov_policy_loss(policy, old, advantages, mask_N=_ones(4), kl_cov_ratio=0.5, ppo_kl_coef=0.7)
    first, second, third = 2 * math.exp(0.5), math.exp(0.1), 3 * math.exp(-0.2)
    _check(result, policy, [0.35 - first, -second, third + 0.14, 0.0], [0.7 - first, -second, third - 0.7, 0.0])
    assert result.metrics == {COV: 2}
    result = kl_cov_policy_loss(policy, old, advantages, mask_N=_ones(4))
    assert result.metrics == {COV: 1}  # 2e-4 of 4 tokens is none, but at least one is taken: the third
    assert result.per_token_N[2].item() == pytest.approx(third + 0.2)


def test_vespo_by_hand():
    """Rollout 0 has W = 2 x 1/4 = 1/2, rollout 1 has W = 3 and a masked token; phi is W^2 e^(3(1 - W)) if A > 0."""
    policy, old = _logprobs([2.0, 3.0, 0.25, 100.0])
    axis = {"rollout_index_N": torch.tensor([0, 1, 0, 1]), "num_rollouts": 2}
    mask, advantages = torch.tensor([True, True, True, False]), _tensor([2.0, -1.0, 2.0, -1.0])
    result = vespo_policy_loss(policy, old, advantages, mask_N=mask, **axis)
    phi = _tensor([math.exp(1.5) / 4, 27 * math.exp(-4), math.exp(1.5) / 4, 0.0])
    _check(result, policy, (-phi * advantages * policy).tolist(), (-phi * advantages).tolist())
    assert result.metrics["vespo/phi_seq_mean"] == pytest.approx(phi.sum())
    weights = _tensor([1.0, 1 / 3, 4.0, math.nan])  # of the sampler: W = 2 and 1
    phi = _tensor([4 * math.exp(-3), 1.0, 4 * math.exp(-3), 0.0])
    result = vespo_policy_loss(policy, old, advantages, mask_N=mask, importance_weights_N=weights, **axis)
    _check(result, policy, (-phi * advantages * policy).tolist(), (-phi * advantages).tolist())


def test_clip_cov_by_hand():
    policy, old, advantages = _covariance_case()
    first, second, third = 2 * math.exp(0.5), math.exp(0.1), 3 * math.exp(-0.2)

    def run(**options):
        return clip_cov_policy_loss(policy, old, advantages, mask_N=_ones(4), **options)

    result = run(epsilon=1.0, clip_cov_ub=4.0)
    _check(result, policy, [0.0, -second, third, 0.0], [0.0, -second, third, 0.0])
    assert result.metrics == {LOW: 0, HIGH: 0, REGION: 0, COV: 1}
    result = run(epsilon=1.0, clip_cov_ratio=0.5)
    _check(result, policy, [0.0, -second, 0.0, 0.0], [0.0, -second, 0.0, 0.0])
    result = run(epsilon=1.0, clip_cov_ratio=0.25)  # one of the two
    assert sorted(result.per_token_N.tolist()) in (
        pytest.approx(sorted([0.0, -second, third, 0.0])),
        pytest.approx(sorted([-first, -second, 0.0, 0.0])),
    )
    result = run(epsilon=0.2, clip_cov_ub=4.0)  # the ratio's clip has the first token already
    _check(result, policy, [-2.4, -second, third, 0.0], [0.0, -second, third, 0.0])
    assert result.metrics == {LOW: 0, HIGH: 1, REGION: 1, COV: 0}


def test_clip_cov_chooses_the_same_tokens_in_any_order_and_neither_the_first_nor_the_largest():
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(400, generator=generator, dtype=torch.float64) * 3
    advantages = torch.randn(400, generator=generator, dtype=torch.float64)
    options = {"mask_N": _ones(400), "clip_cov_ratio": 0.05, "clip_cov_lb": 0.0}

    def chosen(order):
        result = clip_cov_policy_loss(old[order], old[order], advantages[order], **options)
        return set(order[result.per_token_N == 0].tolist())

    plain = torch.arange(400)
    choice = chosen(plain)
    assert len(choice) == 20
    assert choice == chosen(plain) == chosen(torch.randperm(400, generator=generator))
    covariance = (advantages - advantages.mean()) * (old - old.mean())
    eligible = (covariance > 0).nonzero().flatten()
    largest = set(covariance.topk(20).indices.tolist())
    assert choice <= set(eligible.tolist())
    for systematic in (set(eligible[:20].tolist()), set(eligible[-20:].tolist()), largest):
        assert len(choice & systematic) < 10


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_a_loss_by_name_equals_the_function(name):
    generator = torch.Generator().manual_seed(2)
    policy, advantages = torch.randn(2, 8, generator=generator)
    old = policy + 0.5 * torch.randn(8, generator=generator)
    rollouts = {"rollout_index_N": torch.tensor([0, 1, 0, 1, 2, 2, 2, 0]), "num_rollouts": 3}
    loss = make_policy_loss(name)
    by_name = loss(policy, old, advantages, mask_N=_ones(8), **rollouts)
    by_function = loss.function(policy, old, advantages, mask_N=_ones(8), **(rollouts if loss.uses_rollouts else {}))
    assert torch.equal(by_name.per_token_N, by_function.per_token_N)
    assert by_name.metrics == by_function.metrics


@pytest.mark.parametrize(
    ("name", "options", "argument"),
    [
        ("ppo", {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 1.1}, "delta"),
        ("gspo", {"epsilon": -0.2}, "epsilon"),
        ("gspo", {"delta": 3.0}, "delta"),
        ("cispo", {"epsilon_high": 0.3, "epsilon_max": 5.0}, "epsilon_high"),
        ("cispo", {"epsilon_max": 0}, "epsilon_max"),
        ("sapo", {"sapo_temperature_pos": 0}, "sapo_temperature_pos"),
        ("sapo", {"sapo_temperature_neg": -1}, "sapo_temperature_neg"),
        ("gmpo", {"epsilon_high": -0.1}, "epsilon_high"),
        ("vespo", {"vespo_lambda_neg": 0}, "vespo_lambda_neg"),
        ("gspo_token", {"epsilon": math.nan}, "epsilon"),
        ("dppo_tv", {"epsilon": -1}, "epsilon"),
        ("dppo_kl", {"clip_ratio_c": 0}, "clip_ratio_c"),
        ("clip_cov", {"clip_cov_ratio": 0}, "clip_cov_ratio"),
        ("clip_cov", {"clip_cov_lb": 5}, "clip_cov_lb"),
        ("kl_cov", {"kl_cov_ratio": 2}, "kl_cov_ratio"),
        ("kl_cov", {"ppo_kl_coef": -1}, "ppo_kl_coef"),
        ("gpg", {"epsilon": 0.2}, "epsilon"),
        ("gpg", {"name": "x"}, "name"),
    ],
)
def test_options_out_of_range(name, options, argument):
    x_N = torch.zeros(2)
    data = {"mask_N": x_N == 0, "rollout_index_N": x_N.long(), "num_rollouts": 1}
    with pytest.raises(ValueError, match=argument):
        POLICY_LOSSES[name].with_options(options)(x_N, x_N, x_N, **data)


@pytest.mark.parametrize(
    ("loss", "change", "argument"),
    [
        (clipped_policy_loss, {"advantages_N": torch.zeros(2)}, "advantages_N"),
        (clipped_policy_loss, {"policy_logprobs_N": torch.zeros(1, 3)}, "policy_logprobs_N"),
        (clipped_policy_loss, {"mask_N": torch.ones(3)}, "mask_N"),
        (
            gspo_policy_loss,
            {"rollout_index_N": torch.zeros(2, dtype=torch.int64), "num_rollouts": 1},
            "rollout_index_N",
        ),
    ],
)
def test_errors_name_the_argument(loss, change, argument):
    tokens = dict.fromkeys(("policy_logprobs_N", "old_logprobs_N", "advantages_N"), torch.zeros(3))
    with pytest.raises(ValueError, match=argument):
        loss(**{**tokens, "mask_N": _ones(3), **change})
    with pytest.raises(ValueError, match="trpo"):
        make_policy_loss("trpo")
