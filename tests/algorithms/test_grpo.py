"""GRPO: trajectories, estimators, policy losses, corrections, rewards of tokens, and overrides."""

from __future__ import annotations

import math
import statistics
import sys

import pytest
import torch
from helpers.branching_engine import BranchingEngine
from helpers.episodes import make_episode, make_group
from helpers.rank_cases import with_another_reference
from helpers.tiny_runs import PLAIN, ScriptedEngine, TinyPolicy, constant, largest_difference, same

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.cli import main
from pl_grouprl.functional import advantages as functions
from pl_grouprl.functional import policy_loss as loss_registry
from pl_grouprl.functional import policy_loss as losses
from pl_grouprl.functional.advantages import base as estimator_registry
from pl_grouprl.functional.advantages import register_advantage_estimator
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.losses import LOSS_PRESETS, aggregate
from pl_grouprl.functional.masked import from_rows, to_rows
from pl_grouprl.functional.policy_loss import PolicyLoss, register_policy_loss
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.rewards import Weighted
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import Rollout, SamplingConfig


def initial():
    return [p.detach() for p in TinyPolicy().load().parameters()]


# Runs.


@pytest.mark.parametrize(
    ("gradient_checkpointing", "steps"), [(False, 6), (True, 4), pytest.param(False, 50, marks=pytest.mark.slow)]
)
def test_sharing_on_and_off_give_the_same_trajectory(fit, gradient_checkpointing, steps):
    options = {"num_mini_batches": 2, "beta": 0.05, "optimizer": OptimizerConfig(1e-3)}
    options["policy"] = TinyPolicy(gradient_checkpointing)
    shared, repeated = (
        fit(steps=steps, sharing={"mode": sharing, "verify": True}, **options) for sharing in ("shared", "repeated")
    )
    assert shared.steps[-1]["prefix/token_ratio"] > 2
    assert repeated.steps[-1]["prefix/token_ratio"] <= 1
    losses = [[step["loss"] for step in run.steps] for run in (shared, repeated)]
    assert len(losses[0]) == steps
    assert losses[0] == pytest.approx(losses[1], abs=1e-4, rel=0)
    assert max(map(abs, losses[0])) > 1e-3


def test_old_logprobs_cost_no_forward_when_on_policy(fit, scored):
    fit(steps=2)
    assert scored == []
    run = fit(steps=4, num_iterations=2)
    assert scored == [1, 1]
    # The first pass is on-policy whether old log-probabilities were scored or taken over: no token is clipped.
    assert run.steps[0]["clip_ratio/region_mean"] == 0


@pytest.fixture
def scored(monkeypatch):
    """Gets an entry for each forward over all rollouts before the updates."""
    scored, score = [], GRPO.score_rollouts
    monkeypatch.setattr(GRPO, "score_rollouts", lambda self, *args, **kw: scored.append(1) or score(self, *args, **kw))
    return scored


@pytest.mark.parametrize(
    ("options", "forwards"),
    [
        ({"importance_sampling": {"mode": "token_truncate"}}, 0),
        ({"importance_sampling": {"mode": "sequence_mask"}, "entropy_coef": 0.01}, 0),
        ({"importance_sampling": {"mode": "token_truncate"}, "beta": 0.1}, 1),  # the reference
        ({"importance_sampling": {"mode": "token_truncate"}, "num_iterations": 2}, 1),  # the policy before the updates
        ({"beta": 0.1, "kl": {"place": "reward"}}, 2),
        ({"beta": 0.1, "kl": {"target": 1.0}}, 2),
        ({"entropy_coef": {"coef": 0.1, "target": 1.0}}, 0),
        ({"entropy_coef": {"top_quantile": 0.2}}, 1),
    ],
)
def test_forwards_before_the_updates(fit, scored, options, forwards):
    fit(engine=LateEngine(), **options)
    assert len(scored) == forwards


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "dr_grpo", "gspo"])
def test_accumulated_mini_batches_are_one_batch(fit, loss_type):
    options = {"engine": ScriptedEngine(), "loss_type": loss_type, "optimizer": PLAIN, "data": {"shuffle": False}}
    whole, cut = fit(**options), fit(num_mini_batches=3, trainer={"accumulate_grad_batches": 3}, **options)
    assert largest_difference(initial(), whole.weights[-1].values()) > 1e-3
    assert largest_difference(whole.weights[-1], cut.weights[-1]) <= 1e-5


def test_gradient_clipping_by_the_trainer(fit):
    run = fit(engine=ScriptedEngine(), optimizer=PLAIN, trainer={"gradient_clip_val": 1e-3})
    change = torch.cat([(a - b).flatten() for a, b in zip(initial(), run.weights[-1].values(), strict=True)])
    assert 0.9e-3 < change.norm().item() <= 1.001e-3


@pytest.mark.parametrize("reward", [0.7, None])
def test_nothing_to_learn_changes_nothing(fit, reward):
    run = fit(steps=2, rewards=constant(reward))
    assert same(initial(), list(run.weights[-1].values()))
    assert all(step["loss"] == 0 and step["grad_norm"] == 0 for step in run.steps)


def test_rollouts_without_a_reward_are_not_trained(fit):
    def some(completions, **columns):
        return [None if "e" in text else float(len(text)) for text in completions]

    buffer = fit(rewards=some, engine=ScriptedEngine()).buffer
    for group, mask, advantages in zip(
        buffer.groups, buffer.tokens["loss_mask"], buffer.tokens["advantages"], strict=True
    ):
        expected = [bit for r in group.rollouts for bit in [r.reward is not None] * len(r.token_ids)]
        assert mask.tolist() == expected
        assert not advantages[~mask].any()
    assert not all(mask.all() for mask in buffer.tokens["loss_mask"])


def test_metrics_and_a_reference_that_stays_the_initial_policy(fit):
    run = fit(steps=3, beta=0.1)
    assert same(run.weights[-1], run.weights[0], "reference")
    assert same(initial(), list(run.module.reference.parameters()))
    assert not same(initial(), list(run.module.policy.parameters()))
    assert {model.config._attn_implementation for model in (run.module.policy, run.module.reference)} == {"sdpa"}
    metrics = run.steps[0]
    assert metrics["kl"] == pytest.approx(0, abs=1e-6)
    assert run.steps[-1]["kl"] > 1e-4
    expected = {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/share_of_letters/mean", "rewards/share_of_letters/std",
        "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
        "kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean", "num_tokens", "loss",
        "grad_norm", "prefix/token_ratio", "sampling/sampling_logp_difference/mean",
    }  # fmt: skip
    assert expected <= metrics.keys()  # the names of TRL
    assert metrics["sampling/sampling_logp_difference/mean"] < 1e-5  # sampler and trainer agree
    assert metrics["num_tokens"] == 16 * 20 + 16 * metrics["completions/mean_length"]
    assert 3.0 < metrics["entropy"] < 3.2959  # a random policy is nearly uniform over 27 tokens; log 27 = 3.2958


def test_validation(make_module, make_data, make_trainer):
    module = make_module(engine=ScriptedEngine(), evaluation={"num_generations": 3})
    (metrics,) = make_trainer().validate(module, make_data(val=True, val_batch_size=3), verbose=False)
    assert {f"val/most_frequent_digit/{name}@3" for name in ("mean", "best", "maj")} <= metrics.keys()
    assert metrics["val/reward"] == pytest.approx(metrics["val/most_frequent_digit/mean@3"])
    assert metrics["val/reward"] <= metrics["val/most_frequent_digit/best@3"]
    assert metrics["val/rewards/share_of_letters/mean"] == pytest.approx(metrics["val/reward"])


def test_fewer_groups_than_mini_batches_train_what_is_there(fit):
    """5 prompts in batches of 4: the second batch of rollouts has one group for 3 updates, so two are empty."""
    data, trainer = {"train_size": 5, "drop_last": False}, {"max_steps": -1, "max_epochs": 1}
    run = fit(data=data, trainer=trainer, num_mini_batches=3)
    assert sorted(step["grad_norm"] > 0 for step in run.steps[3:]) == [False, False, True]
    moved = [not same(run.weights[step - 1], run.weights[step]) for step in (3, 4, 5)]
    assert sorted(moved) == [False, False, True]
    assert moved == [not same(run.moments[step - 1], run.moments[step]) for step in (3, 4, 5)]
    assert len(run.steps) == 6
    assert run.module.optimization.nonfinite_steps == 0


# Advantage estimators: what stands in the buffer is what the pure function gives.


ROLLOUT_LEVEL = ("grpo", "rloo", "opo", "grpo_passk", "remax")


class Engine:
    """Scripted completions; a greedy one has its own script and is asked for once per prompt."""

    def __init__(self):
        self.calls = []

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        self.calls.append((sampling.temperature, num_generations, len(prompts)))
        shift = 0 if sampling.temperature else 100
        return [[self._rollout(sum(prompt) + 7 * g + shift) for g in range(num_generations)] for prompt in prompts]

    @staticmethod
    def _rollout(number):
        length = number % 6
        return Rollout([2 + (number + 3 * i) % 20 for i in range(length)], finish_reason="stop")


def some_rewards(completions, **columns):
    """Letters of a completion; those of four characters have no reward."""
    return [None if len(text) == 4 else float(sum(c.isalpha() for c in text)) for text in completions]


def length_reward(completions, **columns):
    return [None if len(text) < 2 else float(len(text)) for text in completions]


def rewards_of(buffer):
    return torch.tensor([math.nan if r.reward is None else r.reward for r in buffer.rollouts])


def group_ids_of(buffer):
    return torch.tensor([index for index, group in enumerate(buffer.groups) for _ in group.rollouts])


def greedy_rewards(buffer):
    """Rewards of the greedy script, worked out again."""
    greedy = [Engine._rollout(sum(group.prompt_ids) + 100) for group in buffer.groups for _ in group.rollouts]
    texts = ["".join("0" if i < 12 else "a" for i in rollout.token_ids) for rollout in greedy]
    return torch.tensor([math.nan if r is None else r for r in some_rewards(texts)])


def pure_rollout_advantages(name, rewards_B, buffer):
    ids_B = group_ids_of(buffer)
    if name == "remax":
        return functions.remax_advantages(rewards_B, greedy_rewards(buffer))
    if name == "opo":
        return functions.opo_advantages(rewards_B, ids_B, buffer.rollout_lengths)
    names = {"grpo": "group_relative_advantages", "rloo": "rloo_advantages", "grpo_passk": "grpo_passk_advantages"}
    return getattr(functions, names[name])(rewards_B, ids_B)


def assert_advantages(buffer, advantages, atol=1e-6):
    """Of rollouts, [B], of rows, [B, T], or of tokens."""
    advantages = torch.as_tensor(advantages)
    if advantages.ndim == 2:
        advantages = from_rows(advantages, buffer.rollout_lengths)
    elif len(advantages) == len(buffer.rollout_lengths) != len(buffer.joined("advantages")):
        advantages = advantages.repeat_interleave(buffer.rollout_lengths)
    torch.testing.assert_close(buffer.joined("advantages"), advantages, rtol=0, atol=atol, check_dtype=False)


def whitened(values, trained, eps=1e-8):
    values_N, trained_N = torch.tensor(values), torch.tensor(trained)
    whitened_N = (values_N - values_N[trained_N].mean()) / (values_N[trained_N].std() + eps)
    return whitened_N.masked_fill(~trained_N, 0)


@pytest.fixture
def step(fit, make_module):
    """One step; a reference that is not the policy where there is one."""

    def run(engine=None, rewards=some_rewards, data=None, trainer=None, cls=GRPO, **options):
        module = with_another_reference(make_module(cls, engine=engine or Engine(), rewards=rewards, **options))
        fit(module=module, data=data, trainer=trainer)
        return module

    return run


@pytest.mark.parametrize("name", ROLLOUT_LEVEL)
def test_rollout_level(step, name):
    module = step(advantage_estimator=name)
    buffer, engine = module.last_rollouts, module.engine
    rewards_B = rewards_of(buffer)
    assert rewards_B.isnan().any()
    expected_B = pure_rollout_advantages(name, rewards_B, buffer)
    assert expected_B.abs().max() > 0.1
    assert not expected_B[rewards_B.isnan()].any()
    assert_advantages(buffer, expected_B)
    # One greedy rollout for each prompt where the estimator needs it.
    assert engine.calls == [(1.0, 4, 4), *([(0.0, 1, 4)] if name == "remax" else [])]


def test_remax_needs_one_rollout(step):
    module = step(advantage_estimator="remax", num_generations=1)
    assert module.engine.calls == [(1.0, 1, 4), (0.0, 1, 4)]
    assert rewards_of(module.last_rollouts).tolist() != greedy_rewards(module.last_rollouts).tolist()


@pytest.mark.parametrize(
    ("gamma", "kl"),
    [(1.0, {}), (0.5, {}), (0.9, {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}})],
    ids=["", "discounted", "kl"],
)
def test_reinforce_plus_plus(step, gamma, kl):
    """Reward-to-go by a plain loop: the reward counts gamma^k at k tokens before the last one."""
    buffer = step(advantage_estimator="reinforce_plus_plus", advantage_options={"gamma": gamma}, **kl).last_rollouts
    lengths, kl_N = buffer.rollout_lengths.tolist(), torch.zeros(int(buffer.rollout_lengths.sum()))
    if kl:
        kl_N = 0.5 * kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), "k1")
    returns, trained = [], []
    for rollout, penalties in zip(buffer.rollouts, kl_N.split(lengths), strict=True):
        to_go, own = rollout.reward or 0.0, []
        for t in reversed(range(len(penalties))):
            to_go = (to_go if t == len(penalties) - 1 else gamma * to_go) - penalties[t].item()
            own.insert(0, to_go)
        returns += own
        trained += [rollout.reward is not None] * len(penalties)
    assert_advantages(buffer, whitened(returns, trained), 1e-4 if kl else 1e-5)


def kl_per_rollout(buffer, kl_type="k3"):
    """Summed over trained tokens, and the mean of a token."""
    kl_N = kl_estimate(buffer.joined("old_logprobs"), buffer.joined("ref_logprobs"), kl_type)
    kl_N = kl_N.masked_fill(~buffer.joined("loss_mask"), 0)
    assert kl_N.abs().max() > 0.01
    mean = kl_N.sum() / buffer.joined("loss_mask").sum()
    return torch.stack([part.sum() for part in kl_N.split(buffer.rollout_lengths.tolist())]), mean.item()


@pytest.mark.parametrize("kl", [{}, {"beta": 0.5, "kl": {"place": "reward", "type": "k1"}}], ids=["", "kl"])
def test_reinforce_plus_plus_baseline(step, kl):
    """The group's mean is that of all rollouts with a reward: those without one, and those without a token, are known
    from the rewards of the rollouts alone."""
    buffer = step(advantage_estimator="reinforce_plus_plus_baseline", **kl).last_rollouts
    lengths_B = buffer.rollout_lengths
    assert (lengths_B == 0).any()
    rewards_B = rewards_of(buffer) - (0.5 * kl_per_rollout(buffer, "k1")[0] if kl else 0)
    mask_BT = to_rows(buffer.joined("loss_mask"), lengths_B)
    expected_BT = functions.reinforce_plus_plus_baseline_advantages(rewards_B, group_ids_of(buffer), mask_BT)
    assert_advantages(buffer, expected_BT, 1e-5)


@pytest.mark.parametrize(("name", "kl_type"), [*((name, "k3") for name in ROLLOUT_LEVEL), ("grpo", "k1")])
def test_kl_in_the_reward_of_rollouts(step, name, kl_type):
    buffer = step(advantage_estimator=name, beta=0.5, kl={"place": "reward", "type": kl_type}).last_rollouts
    penalty_B, mean = kl_per_rollout(buffer, kl_type)
    assert_advantages(buffer, pure_rollout_advantages(name, rewards_of(buffer) - 0.5 * penalty_B, buffer))
    assert buffer.metrics["kl"] == pytest.approx(mean, rel=1e-5)
    assert buffer.metrics["kl_coef"] == 0.5
    # The rewards themselves, and what is logged of them, stay free of the penalty.
    assert rewards_of(buffer)[~rewards_of(buffer).isnan()].frac().abs().max() == 0


SEVERAL = [
    Weighted(some_rewards, weight=1.0, name="some"),
    Weighted(length_reward, weight=2.0, name="length"),
    Weighted(lambda completions, **columns: [float(len(text) % 2) for text in completions], weight=0.0, name="logged"),
]


@pytest.mark.parametrize("aggregation", ["sum_then_normalize", "normalize_then_sum"])
def test_several_rewards(step, aggregation):
    buffer = step(rewards=SEVERAL, multi_objective_aggregation=aggregation).last_rollouts
    ids_B = group_ids_of(buffer)
    columns = {
        name: torch.tensor([math.nan if r.rewards[name] is None else r.rewards[name] for r in buffer.rollouts])
        for name in ("some", "length", "logged")
    }
    assert columns["some"].isnan().any()
    assert columns["length"].isnan().any()
    if aggregation == "sum_then_normalize":
        nothing_B = columns["some"].isnan() & columns["length"].isnan()
        total_B = columns["some"].nan_to_num() + 2 * columns["length"].nan_to_num()
        expected_B = functions.group_relative_advantages(total_B.masked_fill(nothing_B, math.nan), ids_B)
        torch.testing.assert_close(rewards_of(buffer), total_B.masked_fill(nothing_B, math.nan), equal_nan=True)
    else:
        separate = {name: functions.group_relative_advantages(own, ids_B) for name, own in columns.items()}
        total_B = separate["some"] + 2 * separate["length"]  # the weight 0 leaves the third out
        expected_B = normalized_over_the_batch(total_B, buffer)
    assert expected_B.abs().max() > 0.5
    assert_advantages(buffer, expected_B, 1e-5)


def normalized_over_the_batch(total_B, buffer):
    trained_B, ids_B = ~rewards_of(buffer).isnan(), group_ids_of(buffer)
    credited_B = torch.tensor([bool(total_B[ids_B == group].any()) for group in ids_B])
    scaled_B = (total_B - total_B[trained_B].mean()) / (total_B[trained_B].std() + 1e-6)
    return scaled_B.masked_fill(~trained_B | ~credited_B, 0)


@pytest.mark.parametrize("name", ["remax", "opo"])
def test_several_rewards_normalized_first_with_other_estimators(step, name):
    options = {"advantage_estimator": name, "multi_objective_aggregation": "normalize_then_sum"}
    buffer = step(rewards=[Weighted(some_rewards, 3.0)], **options).last_rollouts
    single_B = pure_rollout_advantages(name, rewards_of(buffer) / 3, buffer)
    assert_advantages(buffer, normalized_over_the_batch(3 * single_B, buffer), 1e-5)


def test_compute_advantages_by_itself(step, make_module):
    module = step(advantage_estimator="grpo", scale_rewards="none")
    buffer = module.last_rollouts
    expected_B = functions.group_relative_advantages(rewards_of(buffer), group_ids_of(buffer), scale="none")
    torch.testing.assert_close(module.compute_advantages(buffer.groups), expected_B)
    group = make_group(make_episode(observation=3, reward=1.0), Rollout([1, 2], reward=0.0))
    # OPO weighs episodes by what the model wrote, 4 of 9 tokens and 2 of 2: the baseline is (4 * 1 + 2 * 0) / 6.
    advantages = make_module(advantage_estimator="opo").compute_advantages([group])
    assert advantages.tolist() == pytest.approx([1 / 3, -2 / 3])


@pytest.mark.parametrize("name", ["tree", "vine"])
def test_branched_rollouts(step, name):
    buffer = step(BranchingEngine(Engine()), advantage_estimator=name, loss_agg_mode="seq-mean-token-sum").last_rollouts
    paths = [r.branch_points for r in buffer.rollouts], [r.branch_path for r in buffer.rollouts]
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    estimator = functions.make_advantage_estimator(name)
    branches = functions.BranchPaths(*paths)
    expected_BT = estimator(rewards_of(buffer), group_ids_of(buffer), mask=mask_BT, branches=branches)
    assert_advantages(buffer, expected_BT)
    own = from_rows(expected_BT, buffer.rollout_lengths).split(buffer.rollout_lengths.tolist())
    assert any(len(set(values.tolist())) > 1 for values in own)


@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_optimal_token_baseline(step, name):
    """The norms are those of the policy before the update, from a forward that is made for them."""
    module = step(advantage_estimator=name, optimizer=OptimizerConfig(learning_rate=0.0))
    buffer = module.last_rollouts
    assert torch.isfinite(buffer.joined("old_logprobs")).all()
    with shared_prefix(module.policy):
        norms_N = module.score_rollouts(module.policy, buffer, score_norm=True).score_norm_N
    rewards, norms, mask = (
        to_rows(values_N, buffer.rollout_lengths)
        for values_N in (buffer.joined("token_rewards"), norms_N, buffer.joined("loss_mask"))
    )
    found = functions.make_advantage_estimator(name)(rewards, group_ids_of(buffer), mask=mask, score_norms=norms)
    assert found.abs().max() > 0.1
    assert_advantages(buffer, found)


# Policy losses, the sampler's correction and the KL coefficient, against functions and plain loops.

SAMPLER = -3.1
"""Log-probability that the engine reports for the first token of a rollout; the policy's are about -3.3."""


class LateEngine:
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


@pytest.fixture
def fit_late(fit, make_module):
    def run(steps=1, cls=GRPO, noise=0.0, save=False, resume=None, **options):
        module = make_module(cls, **{"engine": LateEngine(), **options})
        return fit(module=with_another_reference(module, noise), steps=steps, save=save, resume=resume)

    return run


LOSSES = {
    "ppo": ("clipped_policy_loss", {"epsilon": 0.05, "epsilon_high": 0.1, "delta": 1.2}),
    "gspo": ("gspo_policy_loss", {"epsilon": 0.3, "epsilon_high": 0.4}),
    "gspo_token": ("gspo_token_policy_loss", {"epsilon": 0.4}),
    "gmpo": ("gmpo_policy_loss", {"epsilon": 0.02}),
    "cispo": ("cispo_policy_loss", {"epsilon_max": 1.01}),
    "gpg": ("gpg_policy_loss", {}),
    "dro": ("dro_policy_loss", {"dro_beta": 0.5}),
    "sapo": ("sapo_policy_loss", {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 3.0}),
    "vespo": ("vespo_policy_loss", {"vespo_k_pos": 1.5}),
    "clip_cov": ("clip_cov_policy_loss", {"clip_cov_ratio": 0.2, "clip_cov_lb": -5.0, "clip_cov_ub": 5.0}),
    "kl_cov": ("kl_cov_policy_loss", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
    "dppo_tv": ("dppo_tv_policy_loss", {"epsilon": 0.01, "clip_ratio_c": 1.05}),
    "dppo_kl": ("dppo_kl_policy_loss", {"epsilon": 1e-4, "clip_ratio_c": 1.05}),
}


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "token-mean") for name in LOSSES), *((n, "seq-mean-token-mean") for n in ("ppo", "gspo"))],
)
def test_policy_losses(fit_late, name, mode):
    assert LOSSES.keys() == losses.POLICY_LOSSES.keys()
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

    run = fit_late(2, Checked, policy_loss={"name": name, **options}, loss_agg_mode=mode, num_iterations=2)
    assert options.items() <= run.module.objective.policy_loss.options.items()
    first, second = run.module.updates
    assert (second[1] - second[0].tokens["old_logprobs"]).abs().max() > 0.01  # the second update is off-policy
    for *_, gradient in (first, second):
        assert gradient.isfinite().all()
        assert gradient.norm() > 1e-6
    for step in run.steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm"] > 0


def test_presets_and_single_options(make_module):
    for loss_type, preset in LOSS_PRESETS.items():
        module = make_module(loss_type=loss_type)
        assert module.objective.policy_loss.name == preset.loss
        assert module.objective.loss_agg_mode == preset.aggregation
        assert module.advantage_estimator.options["scale"] == preset.scale
    module = make_module(loss_type="dr_grpo", loss_agg_mode="token-mean", scale_rewards="batch", policy_loss="cispo")
    assert module.advantage_estimator.options["scale"] == "batch"
    assert (module.objective.loss_agg_mode, module.objective.policy_loss.name) == ("token-mean", "cispo")
    sapo = make_module(
        loss_type="sapo", policy_loss={"name": "sapo", "sapo_temperature_neg": 2.0}
    ).objective.policy_loss
    assert sapo.options == {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}
    gspo = make_module(loss_type="gspo", epsilon=3e-4, epsilon_high=4e-4).objective.policy_loss
    assert gspo.options["epsilon_high"] == 4e-4
    assert make_module(num_iterations=3, num_mini_batches=2).updates_per_rollout == 6


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
def test_importance_weights(fit_late, kind):
    run = fit_late(1, Recording, beta=0.1, noise=0.1, importance_sampling={"mode": kind, **KINDS[kind]})
    ((batch, logprobs_N, _, _),) = run.module.updates
    old_N = logprobs_N.detach()
    differences_N = old_N - batch.tokens["rollout_logprobs"]
    bounds = [KINDS[kind].get(name) for name in ("low", "high")]
    weights, ratios = [], []
    for own in differences_N.split(batch.scoring.rollout_lengths):
        own_weights, own_ratios = weights_by_hand(kind, own.tolist(), *bounds)
        weights += own_weights
        ratios += own_ratios
    # On-policy the loss of a token is -A, and its KL penalty is not weighted.
    kl_N = kl_estimate(old_N, batch.tokens["ref_logprobs"], "k3")
    loss = (-batch.tokens["advantages"] * torch.tensor(weights) + 0.1 * kl_N).mean()
    shown = run.steps[0]
    assert shown["loss"] == pytest.approx(loss.item(), abs=1e-5)
    for name, value in {
        "sampling_logp_difference/mean": differences_N.abs().mean().item(),
        "sampling_logp_difference/max": differences_N.abs().max().item(),
        "importance_sampling_ratio/mean": sum(ratios) / len(ratios),
        "importance_sampling_ratio/min": min(ratios),
        "importance_sampling_ratio/max": max(ratios),
    }.items():
        assert shown[f"sampling/{name}"] == pytest.approx(value, rel=1e-4), name
    if kind.endswith("mask"):
        assert 0 < weights.count(0.0) < len(weights)


def test_the_gradient_is_weighted(fit_late):
    """On-policy the gradient of a token's loss is that of -w A log p."""

    class Weighing(Recording):
        def check(self, batch, logprobs_N, gradient):
            weights_N = (logprobs_N.detach() - batch.tokens["rollout_logprobs"]).exp().clamp(max=3.0)
            assert (weights_N - 1).abs().max() > 0.1
            expected = self.gradient((-weights_N * batch.tokens["advantages"] * logprobs_N).sum())
            torch.testing.assert_close(gradient, expected)

    assert len(fit_late(1, Weighing, importance_sampling={"mode": "token_truncate"}).module.updates) == 1


def test_weights_stay_those_of_before_the_updates(fit_late):
    run = fit_late(3, Recording, importance_sampling={"mode": "sequence_truncate"}, num_iterations=3)
    names = [name for name in run.steps[0] if name.startswith("sampling/")]
    assert len(names) == 10
    for step in run.steps:
        assert [step[name] for name in names] == pytest.approx([run.steps[0][name] for name in names], rel=1e-5)
    assert not torch.allclose(run.module.updates[0][1], run.module.updates[2][1], atol=1e-2)


TRUNCATIONS = ({"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.5}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8})


class Truncating(LateEngine):
    truncates_logprobs = True


@pytest.mark.parametrize("filters", TRUNCATIONS, ids=str)
def test_on_policy_ratios_are_one_when_sampling_is_truncated(fit_late, filters):
    options = {"sampling": SamplingConfig(max_new_tokens=6, **filters)}
    kind = "sequence_mask" if "top_p" in filters else "token_mask"
    run = fit_late(
        1, engine=HFRolloutEngine(), importance_sampling={"mode": kind, "low": 0.99, "high": 1.01}, **options
    )
    for statistic in ("min", "mean", "max"):
        assert run.steps[0][f"sampling/importance_sampling_ratio/{statistic}"] == pytest.approx(1, abs=1e-4)
    assert run.steps[0]["grad_norm"] > 0
    # An engine whose log-probabilities are truncated is not compared nor corrected for.
    run = fit_late(1, engine=Truncating(), **options)
    assert not any(name.startswith("sampling/") for name in run.steps[0])
    with pytest.raises(ValueError, match="with top_k, top_p or min_p Truncating reports"):
        fit_late(1, engine=Truncating(), importance_sampling={"mode": "token_mask"}, **options)


def test_engines_without_logprobs_or_without_truncation(fit_late):
    run = fit_late(1, engine=Truncating(), importance_sampling={"mode": "token_truncate"})
    assert run.steps[0]["sampling/importance_sampling_ratio/max"] > 0
    with pytest.raises(ValueError, match=r"importance_sampling.mode is 'token_mask', but the engine"):
        fit_late(importance_sampling={"mode": "token_mask"}, engine=LateEngine(reports=False))
    run = fit_late(engine=LateEngine(reports=False))
    assert not any(name.startswith("sampling/") for name in run.steps[0])


def test_a_fixed_coefficient(fit_late):
    run = fit_late(2, beta=0.25, noise=0.1, save=True)
    assert run.module.beta == 0.25
    assert [step["kl_coef"] for step in run.steps] == [0.25, 0.25]
    assert "kl_coef" not in fit_late().steps[0]
    assert (
        fit_late(3, resume=2, beta=0.5, guards={"allow_changed": ["beta"]}).module.beta == 0.5
    )  # that of the configuration


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
@pytest.mark.parametrize(("target", "error"), [(1e-6, 0.2), (1e6, -0.2), (None, None)])
def test_an_adaptive_coefficient(fit_late, kl_in, target, error):
    options, kl = {"beta": 0.5, "noise": 0.1}, {"place": kl_in, "type": "k3", "horizon": 100}
    if target is None:  # near what is measured: the error is inside its limits
        penalty_B, _ = kl_per_rollout(fit_late(kl={**kl, "target": 1.0}, **options).buffer)
        target, error = 1.1 * penalty_B.mean().item(), 1 / 1.1 - 1
    run = fit_late(kl={**kl, "target": target}, **options)
    moved = 0.5 * (1 + error * 16 / 100)  # 4 prompts of 4 rollouts
    assert run.module.beta == pytest.approx(moved, rel=1e-5)
    # In the reward the coefficient is that of before the move, in the loss the one after it.
    assert run.steps[0]["kl_coef"] == pytest.approx(0.5 if kl_in == "reward" else moved, rel=1e-5)


def test_a_reference_that_follows_the_policy(fit_late):
    """After every second step, 0.3 of the way, as TRL's callback does; a resumed run has the same one."""
    options = {"beta": 0.1, "kl": {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.3}}
    run = fit_late(4, save=True, **options)
    weights = [{name: w.double() for name, w in step.items()} for step in run.weights]
    names = [name.removeprefix("policy.") for name in weights[0] if name.startswith("policy.")]
    moved = 0
    for before, after, is_synced in zip(weights[:-1], weights[1:], (True, False, True), strict=True):
        for name in names:
            expected = before[f"reference.{name}"]
            if is_synced:
                expected = 0.7 * expected + 0.3 * after[f"policy.{name}"]
            torch.testing.assert_close(after[f"reference.{name}"], expected, rtol=1e-6, atol=1e-8)
            moved += float((after[f"reference.{name}"] - before[f"reference.{name}"]).abs().sum())
    assert moved > 0.1
    resumed = fit_late(4, resume=3, **options)
    assert same(resumed.weights[-1], run.weights[-1], "reference")
    with pytest.raises(ValueError, match=r"kl.ref_model_sync_steps is None, but 2 in the checkpoint"):
        fit_late(4, resume=3, beta=0.1)


@pytest.mark.parametrize("cls", [PPO, GroupPPO])
def test_algorithms_with_a_critic_choose_tokens_too(fit_late, cls):
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": math.exp(0.5)}
    run = fit_late(1, cls, entropy_coef={"top_quantile": 0.25}, importance_sampling=rejection)
    chosen_N, mask_N = run.buffer.joined("high_entropy"), run.buffer.joined("loss_mask")
    assert 0 < run.steps[0]["sampling/rejected"] < 1
    assert 0 < chosen_N.sum() < mask_N.sum()
    assert not chosen_N[~mask_N].any()


def test_rejected_tokens_are_not_trained(fit_late):
    """The engine's log-probabilities fall by 0.2 with each token: a bound rejects the late ones."""
    rejection = {"rollout_rs": "token_k1", "rollout_rs_threshold": math.exp(0.5)}
    plain, run = fit_late(num_iterations=2), fit_late(importance_sampling=rejection)
    before_N, after_N = plain.buffer.joined("loss_mask"), run.buffer.joined("loss_mask")
    differences_N = (run.buffer.joined("old_logprobs") - run.buffer.joined("rollout_logprobs")).abs()
    assert torch.equal(after_N, before_N & (differences_N <= 0.5))
    assert 0 < after_N.sum() < before_N.sum()
    assert run.steps[0]["sampling/rejected"] == pytest.approx(1 - float(after_N.sum() / before_N.sum()))
    assert run.steps[0]["sampling/sampling_logp_difference/max"] <= 0.5
    with pytest.raises(ValueError, match="rollout_rs is 'token_k1', but the engine reports no"):
        fit_late(engine=LateEngine(reports=False), importance_sampling=rejection)


def test_an_adaptive_entropy_bonus(fit, fit_late):
    """From the second step on, while the entropy is below its target; a resumed run continues with it."""
    options = {"entropy_coef": {"coef": 0.1, "target": 5.0, "coef_delta": 0.02}}
    run = fit_late(3, save=True, **options)
    assert [step["entropy_coef"] for step in run.steps] == pytest.approx([0.0, 0.12, 0.14])
    plain = fit_late(1)
    assert plain.steps[0]["loss"] == run.steps[0]["loss"]
    bonus = 0.12 * run.steps[1]["entropy"]
    assert run.steps[1]["loss"] < -0.5 * bonus
    resumed = fit_late(3, resume=2, **options)
    assert resumed.steps[0]["entropy_coef"] == pytest.approx(0.14)
    assert resumed.module.objective.entropy.coef == run.module.objective.entropy.coef == pytest.approx(0.16)
    two = fit(engine=LateEngine(), num_mini_batches=2, trainer={"accumulate_grad_batches": 2}, **options)
    assert two.module.objective.entropy.coef == pytest.approx(0.12)


def test_tokens_of_high_entropy_alone(fit_late):
    """They are chosen once, among all tokens before the updates."""
    found = []

    class Kept(GRPO):
        def prepare_updates(self, buffer, scores):
            super().prepare_updates(buffer, scores)
            found.append(scores.entropy_N)

    run = fit_late(2, Kept, num_iterations=2, entropy_coef={"top_quantile": 0.25})
    chosen_N, mask_N = run.buffer.joined("high_entropy"), run.buffer.joined("loss_mask")
    (entropy_N,) = found
    assert entropy_N[chosen_N].min() > entropy_N[mask_N & ~chosen_N].max()
    assert 0.25 * mask_N.sum() <= chosen_N.sum() < 0.5 * mask_N.sum()  # some are equal
    assert not chosen_N[~mask_N].any()


def test_a_loss_that_compares_tokens_warns_of_a_budget(fit):
    with pytest.warns(UserWarning, match="policy_loss 'kl_cov' selects tokens by comparing those of one micro-batch"):
        fit(policy_loss="kl_cov", max_tokens_per_micro_batch=64)


# Rewards of tokens, against lists worked out again from the rollouts.


def steps(completion_ids, **columns):
    """Every other token ends a step; some rollouts have none, some no reward at all."""
    return [None if sum(ids) % 7 == 6 else [_step(i, token) for i, token in enumerate(ids)] for ids in completion_ids]


def _step(i, token):
    return None if (i + token) % 2 else 0.1 * (token % 5) - 0.2 * i


def outcome(completions, **columns):
    return [None if len(text) == 4 else float(sum(c.isalpha() for c in text)) for text in completions]


def normalized(values, scale, everything, eps=1e-6):
    """The values of a group less their mean, divided as asked for; 0 where they do not differ."""
    if not values or max(values) == min(values):
        return [0.0] * len(values)
    mean = statistics.fmean(values)
    std = {"group": lambda: statistics.stdev(values), "batch": lambda: statistics.stdev(everything)}
    divisor = std[scale]() + eps if scale in std else 1.0
    return [(value - mean) / divisor for value in values]


def by_hand(module, weights, scale="group"):
    """The advantage of each token: outcome against the group, plus the normalized steps that end from it on."""
    rollouts, groups = module.last_rollouts.rollouts, group_ids_of(module.last_rollouts).tolist()
    step_lists, outcomes = [], []
    for rollout in rollouts:
        values = steps([rollout.token_ids])[0]
        end = outcome([rollout.text])[0] if "outcome" in weights else None
        step_lists.append([None if v is None else weights["steps"] * v for v in values or []])
        applies = values is not None or end is not None
        outcomes.append(weights.get("outcome", 0.0) * (end or 0.0) if applies else None)
    all_steps = [v for own in step_lists for v in own if v is not None]
    all_outcomes = [v for v in outcomes if v is not None]
    result = []
    for rollout, own, end, group in zip(rollouts, step_lists, outcomes, groups, strict=True):
        mates = [i for i, other in enumerate(groups) if other == group]
        values = [v for i in mates for v in step_lists[i] if v is not None]
        ends = [outcomes[i] for i in mates if outcomes[i] is not None]
        of_step = dict(zip(values, normalized(values, scale, all_steps), strict=True))
        of_end = dict(zip(ends, normalized(ends, scale, all_outcomes), strict=True))
        base = 0.0 if end is None else of_end[end]
        for t in range(len(rollout.token_ids)):
            result.append(base + sum(of_step[v] for v in own[t:] if v is not None))
    return result


@pytest.fixture
def step_scripted(step):
    return lambda cls=GRPO, rewards=steps, **options: step(
        cls=cls, rewards=rewards, data={"shuffle": False}, **{"engine": ScriptedEngine(), **options}
    )


@pytest.mark.parametrize(
    "options", [{}, {"scale_rewards": "batch"}, {"scale_rewards": "none"}, {"mask_truncated_completions": True}]
)
def test_process_supervision(step_scripted, options):
    module = step_scripted(**options)
    buffer = module.last_rollouts
    assert any(rollout.reward is None for rollout in buffer.rollouts)
    assert any(rollout.token_rewards and not rollout.step_rewards for rollout in buffer.rollouts)
    assert any(not rollout.token_ids for rollout in buffer.rollouts)
    assert_advantages(buffer, by_hand(module, {"steps": 1.0}, options.get("scale_rewards", "group")), 1e-5)
    assert buffer.joined("advantages").abs().max() > 0.1
    if "mask_truncated_completions" in options:  # they count and are not trained
        cut = [r.finish_reason == "length" for r in buffer.rollouts for _ in r.token_ids]
        assert any(cut)
        assert not buffer.joined("loss_mask")[torch.tensor(cut)].any()


def test_outcomes_and_steps_are_added(step_scripted):
    module = step_scripted(rewards=[Weighted(steps, 2.0), Weighted(outcome, 0.5)])
    assert_advantages(module.last_rollouts, by_hand(module, {"steps": 2.0, "outcome": 0.5}), 1e-5)
    rollouts = [rollout for rollout in module.last_rollouts.rollouts if rollout.reward is not None]
    means = {name: statistics.fmean(r.rewards[name] for r in rollouts if r.rewards[name] is not None)
             for name in ("steps", "outcome")}  # fmt: skip
    metrics = module.last_rollouts.metrics
    assert metrics["reward"] == pytest.approx(statistics.fmean(rollout.reward for rollout in rollouts))
    assert {name: metrics[f"rewards/{name}/mean"] for name in means} == pytest.approx(means)


def test_equal_steps_and_equal_outcomes_give_exactly_zero(step_scripted):
    def equal(completion_ids, **columns):
        return [[0.1 if i % 2 else None for i in range(len(ids))] for ids in completion_ids]

    module = step_scripted(rewards=[equal, Weighted(constant(0.3), 1.0, "end")])
    assert not module.last_rollouts.joined("advantages").any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"advantage_estimator": name}, f"'{name}'")
            for name in ("rloo", "opo", "remax", "grpo_passk", "reinforce_plus_plus_baseline", "tree")
        ),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"beta": 0.1, "kl": {"place": "reward"}}, "kl.place='reward'"),
    ],
)
def test_what_compares_whole_rollouts_refuses_rewards_of_tokens(step_scripted, options, message):
    if "tree" in message:
        options = {**options, "engine": BranchingEngine(ScriptedEngine())}
    with pytest.raises(ValueError, match=f"a reward function returned a reward per token, .*{message}"):
        step_scripted(**options)
    step_scripted(rewards=outcome, **options)


def test_reinforce_plus_plus_discounts_rewards_of_tokens(step_scripted):
    options = {"advantage_estimator": "reinforce_plus_plus", "advantage_options": {"gamma": 0.5}}
    buffer = step_scripted(rewards=[steps, outcome], **options).last_rollouts
    returns, trained = [], []
    for rollout in buffer.rollouts:
        row = [value or 0.0 for value in (steps([rollout.token_ids])[0] or [0.0] * len(rollout.token_ids))]
        end = outcome([rollout.text])[0] or 0.0
        to_go, own = 0.0, []
        for t in reversed(range(len(row))):
            to_go = row[t] + (end if t == len(row) - 1 else 0.5 * to_go)
            own.insert(0, to_go)
        returns += own
        trained += [rollout.reward is not None] * len(row)
    assert_advantages(buffer, whitened(returns, trained, 0.0), 1e-5)


RESUMED = {
    "grpo": (GRPO, {}),
    "group_ppo": (GroupPPO, {"critic": PolicyCopyCritic(head_std=0.1)}),
}


@pytest.mark.parametrize("run", RESUMED)
def test_rewards_of_tokens_survive_a_resume_within_unfinished_rollouts(fit, run):
    cls, options = RESUMED[run]
    options = {"rewards": [steps, outcome], "num_mini_batches": 2, **options}
    whole, resumed = fit(cls, steps=2, save=True, **options), fit(cls, steps=2, resume=1, **options)
    assert same(whole.weights[-1], resumed.weights[-1])
    held = [rollout.token_rewards for rollout in resumed.rollouts]
    assert held == [rollout.token_rewards for rollout in whole.rollouts]
    assert any(held)


# Overrides and functions that are registered outside the package.


class Numbered(GRPO):
    """Each rollout's advantage is its number."""

    def compute_advantages(self, groups):
        return torch.arange(sum(len(group.rollouts) for group in groups)).float()


class PerToken(GRPO):
    """Each token's advantage is its position: whole numbers, with gradient."""

    def compute_advantages(self, groups):
        positions = [torch.arange(len(r.token_ids)) for group in groups for r in group.rollouts]
        return torch.cat(positions).double().requires_grad_()


class UnevenEngine:
    """As many rollouts as tokens: of 0 and 2 tokens."""

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[Rollout([14 + g, 12][: 2 * (g % 2)]) for g in range(num_generations)] for _ in prompts]


def test_an_override_returns_advantages_per_rollout_or_per_token(step_scripted):
    buffer = step_scripted(PerToken, rewards=outcome).last_rollouts
    assert_advantages(buffer, [float(i) for rollout in buffer.rollouts for i in range(len(rollout.token_ids))])
    buffer = step_scripted(Numbered, rewards=outcome).last_rollouts
    assert_advantages(buffer, torch.arange(16.0))
    # As many rollouts as tokens.
    per_rollout = step_scripted(Numbered, rewards=outcome, engine=UnevenEngine()).last_rollouts.joined("advantages")
    assert per_rollout.tolist() == [float(i - i % 2 + 1) for i in range(16)]
    per_token = step_scripted(Numbered, rewards=steps, engine=UnevenEngine()).last_rollouts.joined("advantages")
    assert per_token.tolist() == [float(i) for i in range(16)]
    module = step_scripted(rewards=steps, engine=UnevenEngine())
    assert module.last_rollouts.joined("advantages").tolist() == pytest.approx(
        by_hand(module, {"steps": 1.0}), abs=1e-5
    )


def quadratic(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, epsilon: float = 0.2, power: int = 2):
    """-r A with a penalty that grows with the distance of r from 1."""
    ratio_N = (policy_logprobs_N - old_logprobs_N).masked_fill(~mask_N, 0).exp()
    distance_N = (ratio_N - 1).abs()
    loss_N = advantages_N.abs() * distance_N**power / (2 * epsilon) - advantages_N * ratio_N
    metrics = {"clip_ratio/distance_mean": distance_N.detach().masked_fill(~mask_N, 0).sum()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


def against_median(rewards, group_ids, *, shift: float = 0.0):
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        own = group_ids == group
        advantages[own] = rewards[own] - rewards[own].nanmedian() + shift
    return advantages.nan_to_num(nan=0.0)


def spread_out(rewards, mask, group_ids, *, reduce):
    """The reward's difference from the mean of all ranks, over a rollout's tokens."""
    sums = torch.stack([torch.ones_like(rewards).sum(), rewards.sum()])
    count, total = sums if reduce is None else reduce(sums)
    return ((rewards - total / count) / mask.sum(dim=1).clamp(min=1))[:, None] * mask


@pytest.fixture
def registries(monkeypatch):
    monkeypatch.setattr(loss_registry, "POLICY_LOSSES", dict(loss_registry.POLICY_LOSSES))
    monkeypatch.setattr(estimator_registry, "ADVANTAGE_ESTIMATORS", dict(estimator_registry.ADVANTAGE_ESTIMATORS))
    register_policy_loss("quadratic")(quadratic)
    register_advantage_estimator("against_median")(against_median)
    register_advantage_estimator("spread_out", per_token=True)(spread_out)


@pytest.mark.usefixtures("registries")
def test_registered_functions_train(fit, tmp_path):
    options = {"policy_loss": {"name": "quadratic", "power": 4}}
    of_median = {"advantage_estimator": "against_median", "advantage_options": {"shift": 0.5}}
    run = fit(steps=2, epsilon=0.1, num_iterations=2, save=True, **options, **of_median)
    assert repr(run.module.objective.policy_loss) == "quadratic(epsilon=0.1, power=4)"
    assert run.steps[-1]["grad_norm"] > 1e-4
    assert run.steps[-1]["clip_ratio/distance_mean"] > 1e-4  # the second step is off-policy
    assert_advantages(run.buffer, against_median(rewards_of(run.buffer), group_ids_of(run.buffer), shift=0.5))
    recorded = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["pl_grouprl"]["run_options"]
    assert (recorded["policy_loss.name"], recorded["advantage_estimator"]) == ("quadratic", "against_median")
    assert fit(PPO, **options).steps[0]["grad_norm"] > 1e-4
    run = fit(advantage_estimator="spread_out")
    centered_B = rewards_of(run.buffer) - rewards_of(run.buffer).mean()
    assert_advantages(run.buffer, centered_B / run.buffer.rollout_lengths.clamp(min=1))


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy_loss": "quadratik"}, "policy_loss is 'quadratik'; it must be one of .*, ppo, quadratic, sapo"),
        ({"policy_loss": {"name": "quadratic", "delta": 3.0}}, "does not use delta; it takes epsilon, p"),
        (
            {"advantage_estimator": "median"},
            "advantage_estimator is 'median'; it must be one of against_median, gagpo, gpg",
        ),
        ({"advantage_estimator": "against_median", "scale_rewards": "none"}, "does not use scale; it takes shift"),
        ({"advantage_estimator": "against_median", "num_generations": 1}, "against_median compares the rollouts"),
        (
            {"advantage_estimator": "spread_out", "multi_objective_aggregation": "normalize_then_sum"},
            "advantage_estimator='spread_out' takes one reward",
        ),
    ],
)
def test_registered_functions_that_are_refused(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(**options)


MODULE = """
from pl_grouprl.functional.advantages import register_advantage_estimator
from pl_grouprl.functional.policy_loss import PolicyLoss, register_policy_loss


def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]


@register_policy_loss("plain")
def plain(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, weight: float = 1.0):
    return PolicyLoss((-weight * advantages_N * policy_logprobs_N).masked_fill(~mask_N, 0), {}, mask_N.sum())


@register_advantage_estimator("as_is")
def as_is(rewards, group_ids, *, shift: float = 0.0):
    return rewards.nan_to_num() + shift
"""


CONFIG = """
model:
  class_path: pl_grouprl.GRPO
  init_args:
    policy:
      class_path: pl_grouprl.demo.WarmStartedPolicy
      init_args:
        demonstrations: {{class_path: pl_grouprl.demo.MostFrequentDigit, init_args: {{prompt_length: 16}}}}
        architecture: {{model_type: qwen3, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
          num_attention_heads: 2, num_key_value_heads: 1, head_dim: 8}}
        steps: 0
        cache_dir: {folder}
    rewards: [{{function: own_functions.brevity}}]
    num_generations: 2
    sharing: {{verify: false}}
    sampling: {{max_new_tokens: 4}}
    policy_loss: {{name: plain, weight: {weight}}}
    advantage_estimator: as_is
    advantage_options: {{shift: 2}}
data:
  class_path: pl_grouprl.PromptDataModule
  init_args:
    train: {{class_path: pl_grouprl.demo.MostFrequentDigit, init_args: {{prompt_length: 16, train_size: 4}}}}
    batch_size: 2
trainer: {{accelerator: cpu, max_steps: 2, logger: false, enable_checkpointing: false, enable_progress_bar: false}}
"""


@pytest.fixture
def config(tmp_path, monkeypatch, registries):  # those of this test alone
    (tmp_path / "own_functions.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def write(weight):
        (tmp_path / "own.yaml").write_text(CONFIG.format(folder=tmp_path, weight=weight))
        return str(tmp_path / "own.yaml")

    yield write
    sys.modules.pop("own_functions", None)


def test_functions_of_a_module_that_a_configuration_names(config):
    main(["fit", "--config", config(0.5)])
