"""Policy losses, the sampler's correction and the KL coefficient through GRPO, against functions and plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.sweeps import sweep, sweep_pairs
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO
from pl_grouprl.functional import policy_loss as losses
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.losses import LOSS_PRESETS, aggregate
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig

SAMPLER = -3.1
"""Log-probability that the engines here report for the first token of a rollout; the policy's are about -3.3."""


class Engine:
    """Completions of 1 to 5 letters and digits, with log-probabilities that are off by more, the later the token."""

    def __init__(self, reports=True):
        self.reports = reports

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[self._rollout(sum(prompt) + 7 * g) for g in range(num_generations)] for prompt in prompts]

    def _rollout(self, number):
        length = 1 + number % 5
        logprobs = [SAMPLER - 0.2 * i for i in range(length)] if self.reports else None
        return Rollout([2 + (number + 3 * i) % 20 for i in range(length)], logprobs=logprobs, finish_reason="stop")


class Recording(GRPO):
    """Keeps what each update was computed from, and the gradient of its loss with respect to the last norm."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.updates = []

    def gradient(self, loss):
        return torch.autograd.grad(loss, self.policy.model.norm.weight, retain_graph=True)[0]

    def compute_loss(self, batch):
        terms = super().compute_loss(batch)
        scores = self.score(self.policy, batch.scoring)
        self.updates.append((batch, scores.logprobs_N, terms, self.gradient(terms.losses["policy"][0])))
        self.check(batch, scores.logprobs_N, self.updates[-1][-1])
        return terms

    def check(self, batch, logprobs_N, gradient):
        """For a subclass."""


class Metrics(Callback):
    def __init__(self):
        self.steps, self.betas = [], []

    def on_train_batch_end(self, trainer, module, *args):
        self.steps.append({name: float(value) for name, value in trainer.callback_metrics.items()})
        self.betas.append(module.beta)


@pytest.fixture
def fit(make_module, make_data, make_trainer):
    def run(steps=1, cls=GRPO, noise=0.0, checkpoint=None, callbacks=(), **options):
        metrics = Metrics()
        module = make_module(cls, **{"engine": Engine(), **options})
        module.configure_model()
        if noise:
            generator = torch.Generator().manual_seed(3)
            with torch.no_grad():
                for parameter in module.reference.parameters():
                    parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
        trainer = make_trainer(max_steps=steps, callbacks=[metrics, *callbacks], enable_checkpointing=bool(callbacks))
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
        return module, metrics

    return run


# Policy losses.

LOSSES = {
    "ppo": ("clipped_policy_loss", {"epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.2}),
    "gspo": ("gspo_policy_loss", {"epsilon": 0.3, "epsilon_high": 0.4}),
    "gspo_token": ("gspo_token_policy_loss", {"epsilon": 0.4}),
    "gmpo": ("gmpo_policy_loss", {"epsilon": 0.02}),
    "cispo": ("cispo_policy_loss", {"epsilon_max": 1.01}),
    "gpg": ("gpg_policy_loss", {}),
    "dro": ("dro_policy_loss", {"dro_beta": 0.5}),
    "sapo": ("sapo_policy_loss", {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}),
    "clip_cov": ("clip_cov_policy_loss", {"clip_cov_ratio": 0.2, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0}),
    "kl_cov": ("kl_cov_policy_loss", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
    "dppo_tv": ("dppo_tv_policy_loss", {"epsilon": 0.01, "clip_ratio_c": 1.05}),
    "dppo_kl": ("dppo_kl_policy_loss", {"epsilon": 1e-4, "clip_ratio_c": 1.05}),
}


def test_every_loss_is_listed_here():
    assert LOSSES.keys() == losses.POLICY_LOSSES.keys()


@pytest.mark.parametrize(
    ("name", "mode"),
    sweep_pairs(
        itertools.product(LOSSES, ["token-mean", "seq-mean-token-mean"]),
        quick=[*((name, "token-mean") for name in LOSSES), *((n, "seq-mean-token-mean") for n in ("ppo", "gspo"))],
    ),
)
def test_policy_losses(fit, name, mode):
    function, options = LOSSES[name]
    needs_rollouts = losses.POLICY_LOSSES[name].uses_rollouts

    class Checked(Recording):
        def check(self, batch, logprobs_N, gradient):
            rollouts = batch.rollouts
            old_N, advantages_N = batch.tokens["old_logprobs"], batch.tokens["advantages"]
            expected = getattr(losses, function)(
                logprobs_N, old_N, advantages_N, mask_N=batch.mask_N, **options, **(rollouts if needs_rollouts else {})
            )
            loss = aggregate(expected.per_token_N, batch.mask_N, mode=mode, denominator=1.0, **rollouts)
            torch.testing.assert_close(self.updates[-1][2].losses["policy"][0], loss)
            torch.testing.assert_close(gradient, self.gradient(loss))

    module, metrics = fit(2, Checked, policy_loss={"name": name, **options}, loss_agg_mode=mode, num_iterations=2)
    assert options.items() <= module.objective.policy_loss.options.items()
    first, second = module.updates
    assert (second[1] - second[0].tokens["old_logprobs"]).abs().max() > 0.01  # the second update is off-policy
    for *_, gradient in (first, second):
        assert gradient.isfinite().all()
        assert gradient.norm() > 1e-6
    for step in metrics.steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0


@pytest.mark.parametrize("loss_type", LOSS_PRESETS)
def test_presets(fit, loss_type):
    preset = LOSS_PRESETS[loss_type]
    module, metrics = fit(loss_type=loss_type)
    assert module.objective.policy_loss.name == preset.loss
    assert module.objective.loss_agg_mode == preset.aggregation
    assert module.advantage_estimator.options["scale"] == preset.scale
    assert metrics.steps[0]["grad_norm"] > 0


def test_options_of_a_preset_can_be_set(make_module):
    sapo = make_module(loss_type="sapo", policy_loss={"sapo_temperature_neg": 2.0}).objective.policy_loss
    assert sapo.options == {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}
    gspo = make_module(loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4).objective.policy_loss
    assert gspo.options["epsilon_high"] == 4e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": {"temperature": 1.0}}, "policy_loss='ppo' does not use temperature; it takes epsilon"),
        ({"policy_loss": "gpg", "epsilon": 0.2}, "policy_loss='gpg' does not use epsilon; it takes no options"),
        ({"epsilon": 0.1, "policy_loss": {"epsilon": 0.2}}, "epsilon is set twice, as 0.1 and in policy_loss as 0.2"),
        (
            {"scale_rewards": "batch", "advantage_options": {"scale": "none"}},
            "scale is set twice, as 'batch' and in advantage_options as 'none'",
        ),
        ({"importance_sampling": {"mode": "truncate"}}, "importance_sampling.mode is 'truncate'"),
        ({"importance_sampling": {"low": 0.5}}, "importance_sampling.low is 0.5 .* importance_sampling.mode is 'none'"),
        ({"importance_sampling": {"high": 2.0}}, "importance_sampling.high is 2.0, but"),
        (
            {"importance_sampling": {"mode": "token_mask", "high": None}},
            "importance_sampling.mode='token_mask' needs a bound",
        ),
        ({"importance_sampling": {"mode": "token_mask", "low": 4.0}}, "high is 3.0; it must be larger than"),
        ({"kl": {"place": "advantage"}}, "kl.place is 'advantage'; it must be 'loss' or 'reward'"),
        ({"kl": {"target": 1.0}}, "kl.target is 1.0 and beta is 0"),
        ({"beta": 0.1, "kl": {"target": 0.0}}, "target is 0.0; it must be larger than 0"),
        ({"beta": 0.1, "kl": {"horizon": 100}}, "kl.horizon is 100 and kl.target is None"),
    ],
)
def test_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


# Sampler and trainer disagree.

KINDS = {
    "none": {},
    "token_truncate": {"low": 0.9, "high": 1.1},
    "token_mask": {"low": 0.8, "high": 1.3},
    "sequence_truncate": {"low": None, "high": 1.5},
    "sequence_mask": {"low": 0.5, "high": 2.0},
}


def weights_by_hand(kind, differences, low, high):
    """Weight of each token of one rollout, and the ratios that are counted, from trainer minus sampler."""
    low, high = (0.0 if low is None else low), (math.inf if high is None else high)
    ratios = [math.exp(sum(differences))] if kind.startswith("sequence") else [math.exp(d) for d in differences]
    if kind.endswith("truncate"):
        ratios = [min(max(ratio, low), high) for ratio in ratios]
    if kind.endswith("mask"):
        ratios = [ratio if low <= ratio <= high else 0.0 for ratio in ratios]
    if kind == "none":
        return [1.0] * len(differences), ratios
    return ratios * len(differences) if kind.startswith("sequence") else ratios, ratios


@pytest.mark.parametrize("kind", KINDS)
def test_importance_weights(fit, kind):
    module, metrics = fit(1, Recording, importance_sampling={"mode": kind, **KINDS[kind]}, beta=0.1, noise=0.1)
    ((batch, logprobs_N, _, _),) = module.updates
    old_N = logprobs_N.detach()
    differences_N = old_N - batch.tokens["rollout_logprobs"]
    weights, ratios = [], []
    for own in differences_N.split(batch.scoring.rollout_lengths):
        bounds = KINDS[kind].get("low"), KINDS[kind].get("high")
        own_weights, own_ratios = weights_by_hand(kind, own.tolist(), *bounds)
        weights += own_weights
        ratios += own_ratios
    # On-policy the loss of a token is -A, and its KL penalty is not weighted.
    kl_N = kl_estimate(old_N, batch.tokens["ref_logprobs"], "k3")
    loss = (-batch.tokens["advantages"] * torch.tensor(weights) + 0.1 * kl_N).mean()
    shown = metrics.steps[0]
    assert shown["loss"] == pytest.approx(loss.item(), abs=1e-5)
    assert shown["sampling/sampling_logp_difference/mean"] == pytest.approx(differences_N.abs().mean().item(), rel=1e-4)
    assert shown["sampling/sampling_logp_difference/max"] == pytest.approx(differences_N.abs().max().item(), rel=1e-4)
    assert shown["sampling/importance_sampling_ratio/mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-4)
    assert shown["sampling/importance_sampling_ratio/min"] == pytest.approx(min(ratios), rel=1e-4)
    assert shown["sampling/importance_sampling_ratio/max"] == pytest.approx(max(ratios), rel=1e-4)
    if kind.endswith("mask"):
        assert 0 < weights.count(0.0) < len(weights)


def test_the_gradient_is_weighted(fit):
    class Weighing(Recording):
        def check(self, batch, logprobs_N, gradient):
            weights_N = (logprobs_N.detach() - batch.tokens["rollout_logprobs"]).exp().clamp(max=3.0)
            self.expected = [self.gradient((-weights_N * batch.tokens["advantages"] * logprobs_N).sum())]

    module, _ = fit(1, Weighing, importance_sampling={"mode": "token_truncate"})
    ((batch, logprobs_N, _, gradient),) = module.updates
    # On-policy the gradient of a token's loss is that of -w A log p.
    weights_N = (logprobs_N.detach() - batch.tokens["rollout_logprobs"]).exp().clamp(max=3.0)
    assert (weights_N - 1).abs().max() > 0.1
    torch.testing.assert_close(gradient, module.expected[0])


def test_weights_stay_those_of_before_the_updates(fit):
    module, metrics = fit(3, Recording, importance_sampling={"mode": "sequence_truncate"}, num_iterations=3)
    names = [name for name in metrics.steps[0] if name.startswith("sampling/")]
    assert len(names) == 5
    for step in metrics.steps:
        assert [step[name] for name in names] == pytest.approx([metrics.steps[0][name] for name in names], rel=1e-5)
    assert not torch.allclose(module.updates[0][1], module.updates[2][1], atol=1e-2)


TRUNCATIONS = ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8})


@pytest.mark.parametrize("filters", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("kind", ["token_mask", "sequence_mask"])
def test_on_policy_ratios_are_one_when_sampling_is_truncated(fit, kind, filters):
    correction = {"mode": kind, "low": 0.99, "high": 1.01}
    sampling = SamplingConfig(max_new_tokens=6, **filters)
    _, metrics = fit(1, engine=HFRolloutEngine(), importance_sampling=correction, sampling=sampling)
    for statistic in ("min", "mean", "max"):
        assert metrics.steps[0][f"sampling/importance_sampling_ratio/{statistic}"] == pytest.approx(1, abs=1e-4)
    assert metrics.steps[0]["grad_norm"] > 0


def test_an_engine_whose_logprobs_are_truncated_is_not_compared_nor_corrected_for(fit):
    class Truncating(Engine):
        truncates_logprobs = True

    for filters in TRUNCATIONS:
        sampling = SamplingConfig(max_new_tokens=6, **filters)
        _, metrics = fit(1, engine=Truncating(), sampling=sampling)
        assert not any(name.startswith("sampling/") for name in metrics.steps[0])
        with pytest.raises(
            ValueError, match="with top_k, top_p or min_p Truncating reports log-probabilities of the tr"
        ):
            fit(1, engine=Truncating(), sampling=sampling, importance_sampling={"mode": "token_mask"})
    _, metrics = fit(1, engine=Truncating(), importance_sampling={"mode": "token_truncate"})
    assert metrics.steps[0]["sampling/importance_sampling_ratio/max"] > 0


def test_an_engine_without_logprobs(fit):
    with pytest.raises(ValueError, match=r"importance_sampling.mode is 'token_mask', but the engine"):
        fit(importance_sampling={"mode": "token_mask"}, engine=Engine(reports=False))
    _, metrics = fit(engine=Engine(reports=False))
    assert not any(name.startswith("sampling/") for name in metrics.steps[0])


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"importance_sampling": {"mode": "token_truncate"}}, 0),
        ({"importance_sampling": {"mode": "sequence_mask"}, "entropy_coef": 0.01}, 0),
        ({"importance_sampling": {"mode": "token_truncate"}, "beta": 0.1}, 1),  # the reference
        ({"importance_sampling": {"mode": "token_truncate"}, "num_iterations": 2}, 1),  # the policy before the updates
        ({"beta": 0.1, "kl": {"place": "reward"}}, 2),
        ({"beta": 0.1, "kl": {"target": 1.0}}, 2),
    ],
)
def test_forwards_before_the_updates(fit, monkeypatch, options, forwards):
    scored = []
    original = GRPO.score_rollouts
    monkeypatch.setattr(GRPO, "score_rollouts", lambda self, *a, **kw: scored.append(1) or original(self, *a, **kw))
    fit(**options)
    assert len(scored) == forwards


# The coefficient of the KL penalty.


def test_a_fixed_coefficient(fit):
    module, metrics = fit(2, beta=0.25, noise=0.1)
    assert module.beta == 0.25
    assert [step["kl_coef"] for step in metrics.steps] == [0.25, 0.25]
    assert not any(name == "kl_coef" for name in fit()[1].steps[0])


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize(("target", "error"), [(1e-6, 0.2), (1e6, -0.2), (None, None)])
def test_an_adaptive_coefficient(fit, kl_in, target, error):
    options, kl = {"beta": 0.5, "noise": 0.1}, {"place": kl_in, "type": "k3", "horizon": 100}
    if target is None:  # near what is measured: the error is inside its limits
        probe, _ = fit(kl={"target": 1.0, **kl}, **options)
        target = 1.1 * kl_per_rollout(probe.last_rollouts)
        error = 1 / 1.1 - 1
    module, metrics = fit(kl={"target": target, **kl}, **options)
    moved = 0.5 * (1 + error * 16 / 100)  # 4 prompts of 4 rollouts
    assert module.beta == pytest.approx(moved, rel=1e-5)
    # In the reward the coefficient is that of before the move, in the loss the one after it.
    assert metrics.steps[0]["kl_coef"] == pytest.approx(0.5 if kl_in == "reward" else moved, rel=1e-5)


def kl_per_rollout(buffer):
    kl_N = kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), "k3")
    return (kl_N.sum() / len(buffer.rollout_lengths)).item()


@pytest.mark.parametrize("kl_in", sweep(["loss", "reward"], quick=["reward"]))
def test_the_coefficient_is_saved_and_resumed(fit, parameters, tmp_path, kl_in):
    options = {
        "beta": 0.5,
        "kl": {"place": kl_in, "target": 0.05, "horizon": 40},
        "num_mini_batches": 2,
        "engine": None,
    }
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, metrics = fit(6, callbacks=[saving], **options)
    assert len(set(metrics.betas)) == 3  # it moves once per rollout
    for step in (1, 2, 3):
        resumed, again = fit(6, checkpoint=tmp_path / f"step={step}.ckpt", **options)
        assert again.betas == metrics.betas[step:]
        pairs = zip(parameters(whole), parameters(resumed), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), step


def test_a_fixed_coefficient_is_that_of_the_configuration_on_resume(fit, tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    fit(1, callbacks=[saving], beta=0.5)
    module, _ = fit(2, checkpoint=tmp_path / "step=1.ckpt", beta=0.25, guards={"allow_changed": ["beta"]})
    assert module.beta == 0.25


def test_a_horizon_that_is_too_short_for_a_rollout_phase(fit):
    with pytest.raises(ValueError, match=r"kl.horizon is 3 with 4 prompts of 4 rollouts"):
        fit(beta=0.5, kl={"target": 1.0, "horizon": 3})


def test_a_loss_that_compares_tokens_warns_of_a_budget(make_module, make_data, make_trainer):
    module = make_module(policy_loss="kl_cov", max_tokens_per_micro_batch=64)
    with pytest.warns(UserWarning, match="policy_loss 'kl_cov' selects tokens by comparing those of one micro-batch"):
        make_trainer(max_steps=1).fit(module, make_data())
