"""Every option of PPO does what it says, and what cannot be honoured is refused."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.sweeps import sweep

from pl_grouprl.algorithms import PPO, OptimizerConfig
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.types import SamplingConfig

BASE = {"critic": PolicyCopyCritic(head_std=0.3), "whiten_advantages": False, "gamma": 0.9, "lam": 0.8}


def rewards(completions, **columns):
    return [len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


@pytest.fixture
def fit(make_module, make_data, make_trainer, ragged_engine, history):
    """Run some steps on made-up completions; returns module and record."""

    def run(cls=PPO, max_steps=1, trainer=None, **options):
        defaults = {"engine": ragged_engine(), "rewards": rewards, "sampling": SamplingConfig(max_new_tokens=12)}
        module, record = make_module(cls, **{**defaults, **BASE, **options}), history(keep_tensors=True)
        trainer = make_trainer(max_steps=max_steps, callbacks=[record], precision="64-true", **(trainer or {}))
        trainer.fit(module, make_data(shuffle=False))
        return module, record

    return run


def rows(module, *names):
    """Each rollout's trained tokens: lists of values by name."""
    buffer = module.last_rollouts
    joined = {name: buffer.joined(name) for name in (*names, "loss_mask")}
    result, start = [], 0
    for length in buffer.rollout_lengths.tolist():
        kept = joined["loss_mask"][start : start + length]
        result.append({name: joined[name][start : start + length][kept].tolist() for name in names})
        start += length
    return result


def gae(own, gamma, lam, after=0.0):
    values, result, following = [*own["values"], after], [], 0.0
    for t in reversed(range(len(own["token_rewards"]))):
        delta = own["token_rewards"][t] + gamma * values[t + 1] - values[t]
        following = delta + gamma * lam * following
        result.insert(0, following)
    return result


NAMES = ("token_rewards", "values", "advantages", "returns")


def test_lambdas(fit):
    for options, lam_of, target_lam in (
        ({}, lambda n: 0.8, 0.8),
        ({"critic_lam": 0.3}, lambda n: 0.8, 0.3),
        ({"lam_alpha": 0.5, "critic_lam": 1.0}, lambda n: max(1 - 1 / (0.5 * n), 0.0), 1.0),
        ({"lam_alpha": 0.5}, lambda n: max(1 - 1 / (0.5 * n), 0.0), 0.8),
    ):
        module, _ = fit(**options)
        for own in rows(module, *NAMES):
            n = len(own["values"])
            if n == 0:
                continue
            assert own["advantages"] == pytest.approx(gae(own, 0.9, lam_of(n)))
            targets = [a + v for a, v in zip(gae(own, 0.9, target_lam), own["values"], strict=True)]
            assert own["returns"] == pytest.approx(targets)


def test_the_reward_is_at_the_last_trained_token(fit):
    module, _ = fit()
    outcomes = [r.reward for group in module.last_rollouts.groups for r in group.rollouts]
    assert any(r.loss_mask and not r.loss_mask[-1] for g in module.last_rollouts.groups for r in g.rollouts)
    for own, reward in zip(rows(module, "token_rewards"), outcomes, strict=True):
        if own["token_rewards"]:
            assert own["token_rewards"][-1] == pytest.approx(reward)
            assert not any(own["token_rewards"][:-1])


def test_bootstrap_of_truncated_rollouts(fit):
    without, _ = fit()
    with_value, _ = fit(bootstrap_truncated=True)
    cut = [r.finish_reason == "length" for g in without.last_rollouts.groups for r in g.rollouts]
    assert any(cut)
    for left, right, truncated in zip(rows(without, *NAMES), rows(with_value, *NAMES), cut, strict=True):
        assert left["values"] == pytest.approx(right["values"])
        if not truncated:
            assert left["advantages"] == pytest.approx(right["advantages"])
            continue
        # The last advantage differs by gamma V(after), the ones before by that, discounted by gamma lam per token.
        after = (right["advantages"][-1] - left["advantages"][-1]) / 0.9
        assert abs(after) > 1e-3
        assert right["advantages"] == pytest.approx(gae(right, 0.9, 0.8, after))


def test_whitening(fit):
    plain, whitened = (fit(whiten_advantages=on)[0].last_rollouts for on in (False, True))
    mask = plain.joined("loss_mask")
    raw, white = (buffer.joined("advantages")[mask] for buffer in (plain, whitened))
    assert white.mean().item() == pytest.approx(0, abs=1e-9)
    assert white.std().item() == pytest.approx(1, abs=1e-6)
    torch.testing.assert_close(white, (raw - raw.mean()) / (raw.var() + 1e-8).sqrt())
    torch.testing.assert_close(plain.joined("returns"), whitened.joined("returns"))  # the critic's scale stays


def test_value_clipping(fit):
    options = {"num_iterations": 2, "max_steps": 2, "optimizer": OptimizerConfig(1e-2)}
    tight, wide, none = (fit(cliprange_value=limit, **options)[1] for limit in (1e-3, 1e3, None))
    assert tight.steps[1]["value/clip_ratio"] > 0.1
    assert wide.steps[1]["value/clip_ratio"] == none.steps[1]["value/clip_ratio"] == 0
    assert wide.steps[1]["value/loss"] == none.steps[1]["value/loss"]
    for name, gradient in none.gradients[1].items():
        assert torch.equal(gradient, wide.gradients[1][name])
    assert any(
        not torch.equal(g, tight.gradients[1][n]) for n, g in none.gradients[1].items() if n.startswith("critic")
    )


def test_vf_coef_scales_the_critics_gradient(fit):
    (_, one), (_, half) = fit(), fit(vf_coef=0.5)
    for name, gradient in one.gradients[0].items():
        factor = 0.5 if name.startswith("critic") else 1.0
        torch.testing.assert_close(half.gradients[0][name], factor * gradient)
    assert half.steps[0]["value/loss"] == one.steps[0]["value/loss"]


def test_explained_variance(fit):
    module, record = fit()
    buffer = module.last_rollouts
    mask = buffer.joined("loss_mask")
    values, returns = (buffer.joined(name)[mask].double() for name in ("values", "returns"))
    expected = 1 - (returns - values).var(unbiased=False) / returns.var(unbiased=False)
    assert record.steps[0]["value/explained_variance"] == pytest.approx(expected.item(), abs=1e-6)


def test_no_reference_without_a_penalty(fit):
    module, record = fit(beta=0.0)
    assert module.reference is None
    assert "kl" not in record.steps[0]
    module, record = fit(beta=0.1)
    assert module.reference is not None
    assert record.steps[0]["kl"] == pytest.approx(0, abs=1e-9)


def test_penalty_in_the_reward(fit):
    options = {"max_steps": 2, "optimizer": OptimizerConfig(1e-2)}
    module, record = fit(beta=0.2, kl={"type": "k1", "place": "reward"}, **options)
    names = ("token_rewards", "old_logprobs", "ref_logprobs")
    outcomes = [r.reward for group in module.last_rollouts.groups for r in group.rollouts]
    total, tokens = 0.0, 0
    for own, reward in zip(rows(module, *names), outcomes, strict=True):
        kl = [p - q for p, q in zip(own["old_logprobs"], own["ref_logprobs"], strict=True)]
        expected = [-0.2 * k for k in kl]
        if expected:
            expected[-1] += reward
        assert own["token_rewards"] == pytest.approx(expected, abs=1e-7)
        total, tokens = total + sum(kl), tokens + len(kl)
    assert abs(total) > 1e-3
    assert record.steps[1]["kl"] == pytest.approx(total / tokens, rel=1e-5)
    assert record.steps[1]["kl_coef"] == pytest.approx(0.2)


@pytest.mark.parametrize("kl_in", sweep(["reward", "loss"], quick=["reward"]))
def test_adaptive_coefficient(fit, kl_in):
    adaptive = {"beta": 0.1, "kl": {"target": 1e-3, "horizon": 50, "place": kl_in}, "optimizer": OptimizerConfig(1e-2)}
    module, record = fit(max_steps=3, **adaptive)
    rollouts = int(module.last_rollouts.trained_episodes().sum())
    # Before any update the KL is 0, as far below its target as the controller counts; after it, above it.
    first = 0.1 * (1 - 0.2 * count_rollouts(fit, adaptive) / 50)
    shown = [step["kl_coef"] for step in record.steps]
    if kl_in == "reward":  # the coefficient of the rewards is that of before the move
        assert shown[:2] == pytest.approx([0.1, first])
        assert shown[2] > shown[1]
        assert module.beta == pytest.approx(shown[2] * (1 + 0.2 * rollouts / 50))
    else:
        assert shown[0] == pytest.approx(first)
        assert shown[0] < shown[1] < shown[2] == module.beta
    fixed, record = fit(max_steps=3, **{**adaptive, "kl": {"place": kl_in}})
    assert fixed.beta == 0.1
    assert all(step["kl_coef"] == pytest.approx(0.1) for step in record.steps)


def count_rollouts(fit, options):
    module, _ = fit(**options)
    return int(module.last_rollouts.trained_episodes().sum())


def test_the_penalty_acts(fit):
    """Policies with a penalty stay nearer to the reference than one without."""
    options = {"max_steps": 6, "optimizer": OptimizerConfig(5e-3), "whiten_advantages": False}

    def distance(**more):
        module, _ = fit(**options, **more)
        start = module.policy_source.load().double()
        pairs = zip(module.policy.parameters(), start.parameters(), strict=True)
        return math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))

    free = distance()
    assert distance(beta=30.0) < free
    assert distance(beta=30.0, kl={"place": "reward", "type": "k1"}) != pytest.approx(free, rel=1e-3)


def test_old_scores_only_where_they_are_needed(fit):
    assert "old_logprobs" not in fit()[0].last_rollouts.tokens
    assert "old_logprobs" in fit(num_iterations=2)[0].last_rollouts.tokens
    assert "old_logprobs" in fit(beta=0.1, kl={"place": "reward"})[0].last_rollouts.tokens


REFUSED = [
    ({"gamma": 1.5}, r"gamma is 1.5; it must be in \[0, 1\]"),
    ({"lam": -0.1}, r"lam is -0.1; it must be in \[0, 1\]"),
    ({"critic_lam": 2}, r"critic_lam is 2; it must be in \[0, 1\], or None"),
    ({"lam_alpha": 0}, "lam_alpha is 0; it must be larger than 0, or None"),
    ({"cliprange_value": 0}, "cliprange_value is 0; it must be larger than 0, or None for no clipping"),
    ({"vf_coef": 0}, "vf_coef is 0; it must be a finite number larger than 0"),
    ({"critic_warmup_steps": -1}, "critic_warmup_steps is -1; it must be 0 or larger"),
    ({"beta": -1}, "beta is -1; it must be 0"),
    ({"beta": float("inf")}, "beta is inf; it must be 0"),
    ({"beta": 0.1, "kl": {"horizon": 100}}, "kl.horizon is 100 and kl.target is None"),
    ({"bootstrap_truncated": True, "mask_truncated_completions": True}, "bootstrap_truncated=True applies to rollouts"),
    ({"kl": {"place": "reward"}}, "kl.place is 'reward' and beta is 0"),
    ({"kl": {"place": "both"}}, "kl.place is 'both'; it must be 'loss' or 'reward'"),
    ({"kl": {"type": "k9"}}, "k9"),
    ({"kl": {"target": 0.1}}, "kl.target is 0.1 and beta is 0"),
    ({"beta": 0.1, "kl": {"horizon": 10}}, "kl.horizon is 10 and kl.target is None"),
    ({"beta": 0.1, "kl": {"target": -1}}, "target is -1; it must be larger than 0"),
    ({"num_generations": 0}, "num_generations is 0; it must be at least 1"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_out_of_range(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(PPO, **options)


def test_accumulation_with_a_trunk_that_both_losses_train(fit):
    options = {"num_mini_batches": 2, "trainer": {"accumulate_grad_batches": 2}}
    message = r"accumulate_grad_batches is 2 with a critic .* Use SharedTrunkCritic\(detach=True\)"
    with pytest.raises(ValueError, match=message):
        fit(critic=SharedTrunkCritic(), **options)
    fit(critic=SharedTrunkCritic(detach=True), **options)


def test_a_horizon_that_the_rollouts_exceed(fit):
    with pytest.raises(ValueError, match=r"kl.horizon is 2 with 4 prompts of 4 rollouts"):
        fit(beta=0.1, kl={"target": 0.1, "horizon": 2})


def test_the_critics_schedule_needs_an_end(fit):
    with pytest.raises(ValueError, match="the run has no end; set max_steps or max_epochs"):
        fit(critic_optimizer=OptimizerConfig(schedule="linear"), max_steps=-1)


def test_importance_sampling_needs_log_probabilities(fit):
    with pytest.raises(ValueError, match=r"importance_sampling.mode is 'token_mask'"):
        fit(importance_sampling={"mode": "token_mask"})


def test_a_compiled_critic_is_refused(make_module, make_data, make_trainer):
    module = make_module(PPO)
    module.configure_model()
    module.critic.compile()
    with pytest.raises(ValueError, match=r"module\.critic is compiled"):
        make_trainer(max_steps=1).fit(module, make_data())
