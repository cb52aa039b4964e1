"""Losses beyond PPO, GSPO and CISPO, with numbers worked out by hand."""

import math

import pytest
import torch

from pl_grouprl.functional.policy_loss import (
    POLICY_LOSSES,
    clip_cov_policy_loss,
    dppo_kl_policy_loss,
    dppo_tv_policy_loss,
    gmpo_policy_loss,
    gpg_policy_loss,
    gspo_policy_loss,
    gspo_token_policy_loss,
    kl_cov_policy_loss,
    make_policy_loss,
    sapo_policy_loss,
)

LOW, HIGH, REGION, DELTA, COV = (f"clip_ratio/{name}_mean" for name in ("low", "high", "region", "delta", "cov"))


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _ones(n):
    return torch.ones(n, dtype=torch.bool)


def _from_log_ratios(log_ratios):
    old = torch.linspace(-2.0, -0.5, len(log_ratios), dtype=torch.float64)
    return (old + _tensor(log_ratios)).requires_grad_(), old


def _check(result, policy, losses, gradients):
    torch.testing.assert_close(result.per_token_N, _tensor(losses))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), policy)
    torch.testing.assert_close(gradient, _tensor(gradients))


def test_gspo_token_differs_from_gspo_in_the_gradient_by_token():
    """Ratios 4 and 1, sequence ratio 2, advantages 1 and 3: -s A per token; -2 (1 + 3) / 2 for both, or -s A again."""
    policy, old = _from_log_ratios([math.log(4), 0.0])
    options = {"mask_N": _ones(2), "rollout_index_N": torch.tensor([0, 0]), "num_rollouts": 1, "epsilon": 10.0}
    arguments = (policy, old, _tensor([1.0, 3.0]))
    _check(gspo_policy_loss(*arguments, **options), policy, [-2.0, -6.0], [-4.0, -4.0])
    _check(gspo_token_policy_loss(*arguments, **options), policy, [-2.0, -6.0], [-2.0, -6.0])


def test_gspo_token_counts_tokens():
    """Sequence ratios 2 (two tokens, A > 0) and 1/2 (one token, A < 0)."""
    policy, old = _from_log_ratios([math.log(4), 0.0, -math.log(2)])
    result = gspo_token_policy_loss(
        policy,
        old,
        _tensor([1.0, 1.0, -1.0]),
        mask_N=_ones(3),
        rollout_index_N=torch.tensor([0, 0, 1]),
        num_rollouts=2,
    )
    _check(result, policy, [-1.2, -1.2, 0.8], [0.0, 0.0, 0.0])
    assert [result.metrics[name] for name in (LOW, HIGH, REGION)] == [1, 2, 3]
    assert result.metric_count == 3


def test_gmpo_by_hand():
    """A = 1: (min(0.5, 0.3) - 0.1) / 2 = 0.1; A = -2: (max(-0.9, -0.4) + 0.7) / 2 = 0.15; a masked token in between."""
    policy, old = _from_log_ratios([0.5, -0.9, 5.0, -0.1, 0.7])
    result = gmpo_policy_loss(
        policy,
        old,
        _tensor([1.0, -2.0, 1.0, 1.0, -2.0]),
        mask_N=torch.tensor([True, True, False, True, True]),
        rollout_index_N=torch.tensor([0, 1, 0, 0, 1]),
        num_rollouts=3,
        epsilon=0.4,
        epsilon_high=0.3,
    )
    first, second = math.exp(0.1), 2 * math.exp(0.15)
    _check(result, policy, [-first, second, 0.0, -first, second], [0.0, 0.0, 0.0, -first, second])
    assert [result.metrics[name] for name in (LOW, HIGH, REGION)] == [1, 1, 2]
    assert result.metric_count == 4


def test_gmpo_without_advantage_ignores_the_log_ratio():
    """A token with A = 0 counts with log-ratio 0 (its ratio to the power of the sign): (0.2 + 0) / 2 = 0.1."""
    policy, old = _from_log_ratios([0.2, 3.0])
    result = gmpo_policy_loss(
        policy, old, _tensor([1.0, 0.0]), mask_N=_ones(2), rollout_index_N=torch.tensor([0, 0]), num_rollouts=1
    )
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
    result = sapo_policy_loss(
        policy,
        old,
        _tensor([2.0, 1.0, -4.0]),
        mask_N=_ones(3),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=2.0,
    )
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


def test_dppo_thresholds_are_those_of_the_formulas():
    """p = 3/4 after q = 1/2: total variation 1/4, KL (ln(2/3) + ln 2) / 2 = 0.14384; either side has its own."""
    old, policy = _tensor([0.5]).log(), _tensor([0.75]).log()
    kl = (math.log(2 / 3) + math.log(2)) / 2
    for loss, divergence in ((dppo_tv_policy_loss, 0.25), (dppo_kl_policy_loss, kl)):
        for factor, clipped in ((0.999, 1), (1.001, 0)):
            result = loss(policy, old, _tensor([1.0]), mask_N=_ones(1), epsilon=9.0, epsilon_high=divergence * factor)
            assert result.metrics[HIGH] == clipped
            falls = _tensor([0.5]).log(), _tensor([0.25]).log()  # the other outcome rises by as much
            result = loss(
                falls[1], falls[0], _tensor([-1.0]), mask_N=_ones(1), epsilon=divergence * factor, epsilon_high=9.0
            )
            assert result.metrics[LOW] == clipped


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


def test_covariance_means_leave_masked_tokens_out():
    policy, old, advantages = (torch.cat([x.detach(), _tensor([50.0])]) for x in _covariance_case())
    mask = torch.tensor([True] * 4 + [False])
    result = kl_cov_policy_loss(policy, old, advantages, mask_N=mask, kl_cov_ratio=0.25)
    assert result.per_token_N[2] == pytest.approx(3 * math.exp(-0.2) + 0.2)
    assert result.metric_count == 4


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_class_pairs_equal_the_functions(name):
    generator = torch.Generator().manual_seed(2)
    policy, advantages = torch.randn(2, 8, generator=generator)
    old = policy + 0.5 * torch.randn(8, generator=generator)
    rollouts = {"rollout_index_N": torch.tensor([0, 1, 0, 1, 2, 2, 2, 0]), "num_rollouts": 3}
    loss = make_policy_loss(name)
    by_class = loss(policy, old, advantages, mask_N=_ones(8), **rollouts)
    by_function = loss.function(
        policy, old, advantages, mask_N=_ones(8), **(rollouts if loss.uses_rollouts else {})
    )  # defaults of both
    assert torch.equal(by_class.per_token_N, by_function.per_token_N)
    assert by_class.metrics == by_function.metrics


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("ppo", {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 1.1}, "delta is 1.1"),
        ("gspo", {"epsilon": -0.2}, "epsilon is -0.2"),
        ("cispo", {"epsilon_high": 0.3, "epsilon_max": 5.0}, "epsilon_high is 0.3 and epsilon_max is 5.0"),
        ("cispo", {"epsilon_max": 0}, "epsilon_max is 0"),
        ("sapo", {"sapo_temperature_pos": 0}, "sapo_temperature_pos is 0"),
        ("sapo", {"sapo_temperature_neg": -1}, "sapo_temperature_neg is -1"),
        ("gmpo", {"epsilon_high": -0.1}, "epsilon_high is -0.1"),
        ("gspo_token", {"epsilon": math.nan}, "epsilon is nan"),
        ("dppo_tv", {"epsilon": -1}, "epsilon is -1"),
        ("dppo_kl", {"clip_ratio_c": 0}, "clip_ratio_c is 0"),
        ("clip_cov", {"clip_cov_ratio": 0}, "clip_cov_ratio is 0"),
        ("clip_cov", {"clip_cov_lb": 5}, r"clip_cov_lb is 5; .* clip_cov_ub \(5.0\)"),
        ("kl_cov", {"kl_cov_ratio": 2}, "kl_cov_ratio is 2"),
        ("kl_cov", {"ppo_kl_coef": -1}, "ppo_kl_coef is -1"),
        ("gpg", {"epsilon": 0.2}, "policy_loss='gpg' does not use epsilon; it takes no options"),
        ("gpg", {"name": "x"}, "policy_loss='gpg' does not use name"),
    ],
)
def test_options_out_of_range(name, options, message):
    x_N = torch.zeros(2)
    data = {"mask_N": x_N == 0, "rollout_index_N": x_N.long(), "num_rollouts": 1}
    with pytest.raises(ValueError, match=message):
        POLICY_LOSSES[name].with_options(options)(x_N, x_N, x_N, **data)
