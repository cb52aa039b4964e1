"""GROUP PPO: every parameter changes the result, groups are as documented, the critic is trained at their starts."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import tiny_runs
from helpers.sweeps import sweep_pairs
from helpers.tiny_runs import RaggedEngine, compare_gradients, constant, same, weights_of

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.algorithms import ppo as ppo_module
from pl_grouprl.callbacks.token_groups import TokenGroupMonitor
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.functional.token_groups import improbable_token_groups, token_group_counts
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic
from pl_grouprl.packing import truncate_rollouts
from pl_grouprl.types import Rollout, SamplingConfig

BASE = {
    "critic": PolicyCopyCritic(head_std=0.3), "whiten_advantages": False, "gamma": 0.95,
    "group_variance_threshold": 2.0, "adaptive_threshold": False, "bootstrap_truncated": True,
}  # fmt: skip


def rewards(completions, **columns):
    return [len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


def fit_ragged(folder, cls=GroupPPO, **options):
    defaults = {
        "engine": RaggedEngine(logprobs=True),
        "rewards": rewards,
        "sampling": SamplingConfig(max_new_tokens=12),
    }
    trainer = {"precision": "64-true"}
    return tiny_runs.fit(folder, cls, data={"shuffle": False}, trainer=trainer, **{**defaults, **BASE, **options})


@pytest.fixture(scope="module")
def fit(tmp_path_factory):
    """Runs with equal options are made once."""
    runs = {}

    def run(cls=GroupPPO, **options):
        key = str((cls, options))
        runs[key] = runs.get(key) or fit_ragged(tmp_path_factory.mktemp("run"), cls, **options)
        return runs[key]

    return run


STARTS, ADVANTAGES, CRITIC = ("starts", "advantages", "value_mask")


CHANGES = [
    ({"group_variance_threshold": 4.0}, STARTS),
    ({"group_variance_threshold": 1.0}, STARTS),
    ({"group_max_size": 2}, STARTS),
    ({"group_max_size": 1}, STARTS),
    ({"group_epsilon": 2.0}, STARTS),
    ({"score_norm": "sketch"}, STARTS),
    ({"score_norm": "log_ratio"}, STARTS),
    ({"score_norm": "sketch", "sketch_dim": 1}, STARTS),
    ({"boundary_signal": "gae"}, STARTS),
    ({"boundary_at_turn_ends": True}, STARTS),
    ({"advantage_mode": "endpoint"}, ADVANTAGES),
    ({"advantage_mode": "variable_lambda"}, ADVANTAGES),
    ({"critic_positions": "all"}, CRITIC),
]


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_every_parameter_changes_the_result(fit, change, what):
    run, other = fit(), fit(**change)
    differs = {
        name: not torch.equal(run.buffer.joined(key), other.buffer.joined(key))
        for name, key in (("starts", "group_starts"), ("advantages", "advantages"), ("value_mask", "value_mask"))
    }
    assert differs[what]
    if what != STARTS:
        assert [name for name, is_other in differs.items() if is_other] == [what]
    assert not same(run.gradients[0], other.gradients[0])


def test_the_size_of_the_sketch_matters(fit, make_module):
    one, other = (fit(score_norm="sketch", **dim).buffer.joined("group_starts") for dim in ({"sketch_dim": 1}, {}))
    assert not torch.equal(one, other)
    assert make_module(GroupPPO, score_norm="sketch").sketch.dim == 64
    assert make_module(GroupPPO, score_norm="sketch", sketch_dim=7).sketch.dim == 7
    assert make_module(GroupPPO).sketch is None


class PlainPPO(PPO):
    """PPO that leaves the options of token groups alone."""

    def __init__(self, *args, group_variance_threshold, adaptive_threshold, **kwargs):
        super().__init__(*args, **kwargs)


def test_groups_of_one_token_are_ppo(fit):
    grouped, ppo = fit(group_max_size=1), fit(PlainPPO)
    torch.testing.assert_close(grouped.gradients[0], ppo.gradients[0], rtol=1e-9, atol=1e-12)


def test_modes_of_the_advantage(fit):
    buffers = {mode: fit(advantage_mode=mode).buffer for mode in ("broadcast", "endpoint", "variable_lambda")}
    mask, causes = (buffers["endpoint"].joined(name) for name in ("loss_mask", "group_causes"))
    starts = buffers["endpoint"].joined("group_starts")
    broadcast, endpoint, variable = (buffer.joined("advantages") for buffer in buffers.values())
    assert torch.equal(endpoint, torch.where(causes > 0, broadcast, 0.0))
    assert torch.equal(variable[starts], broadcast[starts])
    assert not torch.equal(variable[mask], broadcast[mask])
    # Whitening leaves tokens without an advantage at zero, and boundaries do not see it.
    white = fit(advantage_mode="endpoint", whiten_advantages=True).buffer
    raw_A, white_A = endpoint[causes > 0], white.joined("advantages")[causes > 0]
    torch.testing.assert_close(white_A, (raw_A - raw_A.mean()) / (raw_A.var() + 1e-8).sqrt())
    assert not white.joined("advantages")[causes <= 0].any()
    assert torch.equal(white.joined("group_starts"), starts)


IMPROBABLE = {"group_rule": "improbable", "group_variance_threshold": None, "adaptive_threshold": True}


def test_groups_that_end_at_improbable_tokens(fit):
    run = fit(**IMPROBABLE, group_probability=0.04, boundary_at_turn_ends=False)
    mask, starts, causes, logprobs = (
        to_rows(run.buffer.joined(name), run.buffer.episode_lengths)
        for name in ("loss_mask", "group_starts", "group_causes", "old_logprobs")
    )
    expected = improbable_token_groups(logprobs, mask, probability=0.04)
    assert torch.equal(starts, expected.starts)
    assert torch.equal(causes, expected.causes)
    assert {1, 3} == set(causes[causes > 0].tolist())  # improbable, and last: no largest size
    assert run.buffer.metrics["token_group/threshold"] == 0.04
    assert torch.equal(run.buffer.joined("value_mask"), run.buffer.joined("group_starts"))
    longest = max(rollout.num_sampled_tokens for rollout in run.rollouts)
    small = fit(**IMPROBABLE, group_probability=0.04, boundary_at_turn_ends=False, group_max_size=2)
    assert longest > 2
    assert 2 in small.buffer.joined("group_causes")


def test_segmental_advantages_between_those_of_ppo(fit):
    """As probable as 1 is no token: every token ends a segment, which is PPO. With none improbable, lambda is 1."""
    sae = IMPROBABLE | {"advantage_mode": "variable_lambda", "critic_positions": "all"}
    every = fit(**sae, group_probability=1.0)
    torch.testing.assert_close(every.gradients[0], fit(PlainPPO).gradients[0], rtol=1e-9, atol=1e-12)
    none = fit(**sae, group_probability=1e-9)
    torch.testing.assert_close(none.gradients[0], fit(PlainPPO, lam=1.0).gradients[0], rtol=1e-9, atol=1e-12)


def scaled(completions, **columns):
    return [64 * reward for reward in rewards(completions)]


def test_scaling_all_rewards_changes_no_boundary(fit):
    """With values of exactly 0 delta is the reward."""
    zero = {"critic": PolicyCopyCritic(head_std=0.0), "beta": 0.5, "kl": {"place": "reward", "type": "k1"}}
    one, other = fit(**zero).buffer, fit(rewards=scaled, **zero).buffer
    assert torch.equal(one.joined("group_starts"), other.joined("group_starts"))


def test_the_threshold_moves_by_the_formula(fit):
    for change, start, low, high in (
        ({"threshold_lr": 0.5}, 4.0, 1.0, 10.0),
        ({"threshold_lr": 0.1}, 4.0, 1.0, 10.0),
        ({"threshold_lr": 0.5, "max_threshold": 4.1}, 4.0, 1.0, 4.1),
        ({"threshold_lr": 0.5, "min_threshold": 6.0}, 6.0, 6.0, 10.0),
        ({"threshold_lr": 0.5, "target_compression": 0.5}, 2.0, 1.0, 10.0),
        ({"threshold_lr": 0.5, "group_variance_threshold": 3.0}, 3.0, 1.0, 10.0),
    ):
        run = fit(**{"adaptive_threshold": True, "group_variance_threshold": None, **change})
        counts = token_group_counts(run.module.token_groups)
        compression = 1 - counts["positions"].item() / counts["tokens"].item()
        assert 0 < compression < 0.75
        assert run.module.token_group_threshold == pytest.approx(start) == run.steps[0]["token_group/threshold"]
        target = change.get("target_compression", 0.75)
        after = min(max(start * math.exp(change["threshold_lr"] * (target - compression)), low), high)
        assert run.module.threshold_controller.threshold == pytest.approx(after)


def test_one_threshold_for_all_updates_of_a_batch_of_rollouts(fit):
    adaptive = {"adaptive_threshold": True, "group_variance_threshold": None, "threshold_lr": 0.5}
    thresholds = [step["token_group/threshold"] for step in fit(steps=4, num_iterations=2, **adaptive).steps]
    assert thresholds[0] == thresholds[1] == 4.0
    assert thresholds[2] == thresholds[3] != 4.0


def test_token_groups_after_a_rollout(fit, make_module):
    assert make_module(GroupPPO).token_groups is None
    assert make_module(GroupPPO).token_group_threshold == 4.0
    run = fit()
    groups, buffer = run.module.token_groups, run.buffer
    lengths, start = buffer.rollout_lengths.tolist(), 0
    mask = buffer.joined("loss_mask").tolist()
    assert groups.starts.shape == (len(lengths), max(lengths))
    for b, length in enumerate(lengths):
        valid = [t for t in range(length) if mask[start + t]]
        start += length
        index = groups.group_index[b].tolist()
        assert [t for t, g in enumerate(index) if g >= 0] == valid
        assert [index[t] for t in valid] == sorted(index[t] for t in valid)
        for t, following in zip(valid, [*valid[1:], None], strict=False):
            assert bool(groups.ends[b, t]) == (following is None or index[following] != index[t])
            assert following is None or bool(groups.starts[b, following]) == (index[following] != index[t])
        assert groups.ends[b].sum() == groups.starts[b].sum() == len(set(index) - {-1})


def test_the_monitor_reads_them(tmp_path):
    run = fit_ragged(tmp_path, callbacks=[TokenGroupMonitor()])
    counts = {name: count.item() for name, count in token_group_counts(run.module.token_groups).items()}
    tokens, positions = counts["tokens"], counts["positions"]
    expected = {
        "total_tokens": tokens, "advantage_positions": positions, "compression_ratio": 1 - positions / tokens,
        "speedup_factor": tokens / positions, "avg_group_size": tokens / positions, "threshold": 2.0,
        **{name: counts[name] / positions for name in counts if name.startswith("ended_by")},
    }  # fmt: skip
    assert len(expected) == 9
    logged = tiny_runs.metrics_of(run.trainer)
    assert {name: logged[f"token_group/{name}"] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_log_ratio_needs_a_sampler_that_differs_and_reports(fit):
    # The engine in the process samples from the very policy that is trained.
    with pytest.raises(ValueError, match="use score_norm='logit'"):
        fit(score_norm="log_ratio", engine=None)
    with pytest.raises(ValueError, match="score_norm is 'log_ratio', but RaggedEngine reports no log-probabilities"):
        fit(score_norm="log_ratio", engine=RaggedEngine())
    assert fit(score_norm="log_ratio").module.token_groups.ends.any()


def some(completions, **columns):
    return [(None, math.nan, 1.0, 0.25)[i % 4] for i in range(len(completions))]


class EmptyEngine:
    """Every rollout ends before its first token."""

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[Rollout([], finish_reason="stop") for _ in range(num_generations)] for _ in prompts]


class CutEngine(EmptyEngine):
    """Every rollout is cut at the limit."""

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[Rollout([2 + g, 4, 5, 6], finish_reason="length") for g in range(num_generations)] for _ in prompts]


EDGES = {
    "no reward": ({"rewards": constant(None)}, False),
    "some rewards": ({"rewards": some}, True),
    "equal rewards": ({"rewards": constant(0.7)}, True),
    "zero rewards, zero values": ({"rewards": constant(0.0), "critic": PolicyCopyCritic(head_std=0.0)}, None),
    "empty rollouts": ({"engine": EmptyEngine()}, False),
    "all cut and masked": ({"engine": CutEngine(), "mask_truncated_completions": True}, False),
    "all cut, bootstrapped": ({"engine": CutEngine(), "bootstrap_truncated": True}, True),
    "one token": ({"group_max_size": 1, "target_compression": 0.0, "sampling": SamplingConfig(max_new_tokens=1)}, True),
}


@pytest.mark.parametrize(
    ("edge", "cls", "critic"),
    sweep_pairs(
        itertools.product(EDGES, [PPO, GroupPPO], [SharedTrunkCritic, PolicyCopyCritic]),
        quick=[
            *((edge, GroupPPO, PolicyCopyCritic) for edge in EDGES),
            *((edge, PPO, SharedTrunkCritic) for edge in ("no reward", "empty rollouts", "all cut, bootstrapped")),
        ],
    ),
)
def test_edges_are_finite(tmp_path, make_module, cls, edge, critic):
    options, moves = EDGES[edge]
    options = {"engine": RaggedEngine(), "critic": critic(head_std=0.1)} | options
    if cls is PPO:
        options = {name: own for name, own in options.items() if name not in ("group_max_size", "target_compression")}
    module = make_module(
        cls, num_iterations=2, num_mini_batches=2, beta=0.1, kl={"place": "reward", "target": 0.1},
        optimizer=OptimizerConfig(1e-3, weight_decay=0.1), **options,
    )  # fmt: skip
    module.configure_model()
    start = weights_of(module)
    run = tiny_runs.fit(tmp_path, module=module, steps=4)
    assert module.optimization.nonfinite_steps == 0
    for step, weights in zip(run.steps, run.weights, strict=True):
        assert all(p.isfinite().all() for p in weights.values())
        for name in ("loss", "grad_norm", "value/loss", "value/clip_ratio", "kl_coef"):
            assert math.isfinite(step[name]), name
    for name in ("advantages", "returns", "values"):
        assert run.buffer.joined(name).isfinite().all(), name
    assert moves is None or same(start, run.weights[-1]) != moves


def test_groups_end_at_turns_if_asked_to(fit):
    def spans(run):
        """How many groups go on after a gap of the mask."""
        lengths = run.buffer.rollout_lengths
        mask, starts = (to_rows(run.buffer.joined(name), lengths) for name in ("loss_mask", "group_starts"))
        after_gap = mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1) > 1)[:, 1:]
        return int((after_gap & ~starts[:, 1:]).sum())

    assert spans(fit(boundary_at_turn_ends=True)) == 0
    assert spans(fit(boundary_at_turn_ends=False)) > 0


def look_up(key: str) -> str:
    """Look a key up.

    Args:
        key: The key.
    """
    return key


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, False),
        ({"tools": [look_up]}, True),
        ({"tools": [look_up], "boundary_at_turn_ends": False}, False),
        ({"boundary_at_turn_ends": True}, True),
    ],
)
def test_turns_end_groups_by_default_where_there_are_tools(make_module, options, expected):
    module = make_module(GroupPPO, **options)
    assert module.boundary_at_turn_ends is expected
    assert module.run_options()["boundary_at_turn_ends"] is expected  # a checkpoint compares the value, not the default


# The critic is trained at the starts of token groups: head, trunk and backward run for nothing else.

CRITICS = {"copy": PolicyCopyCritic(head_std=0.3), "lora": LoRACritic(r=4, head_std=0.3)}
SHARED = {"shared": SharedTrunkCritic(head_std=0.3), "shared, detached": SharedTrunkCritic(detach=True, head_std=0.3)}
# tau = 2 and rewards at the end only: groups of two tokens where values hardly differ, more where they do.
CUT = {"group_variance_threshold": 2.0, "adaptive_threshold": False}


class Counts:
    """Rows that the value head gets and tokens that go through the trunk, with gradient enabled."""

    def __init__(self, module):
        module.configure_model()
        self.rows, self.tokens, self.head_gradients = [], [], []
        module.critic.head.register_forward_hook(self.head)
        module.critic.trunk.register_forward_hook(self.trunk, with_kwargs=True)

    def head(self, head, args, values):
        if torch.is_grad_enabled():
            self.rows.append(len(values))
            values.register_hook(lambda gradient: self.head_gradients.append(gradient[:, 0].clone()))

    def trunk(self, trunk, args, kwargs, output):
        if torch.is_grad_enabled():
            self.tokens.append(output.last_hidden_state.shape[:-1].numel())


@pytest.fixture
def fit_counted(tmp_path, make_module):
    def run(cls=GroupPPO, **options):
        options = {"engine": RaggedEngine(), "sampling": SamplingConfig(max_new_tokens=12), **options}
        module = make_module(cls, **options)
        counts = Counts(module)
        trainer = {"precision": "64-true"}
        return tiny_runs.fit(tmp_path, module=module, trainer=trainer, data={"shuffle": False}), counts

    return run


@pytest.mark.parametrize("critic", [*CRITICS, *SHARED])
def test_head_and_trunk_run_only_up_to_group_starts(fit_counted, critic):
    source = (CRITICS | SHARED)[critic]
    run, counts = fit_counted(critic=source, **CUT)
    starts, mask = run.buffer.joined("group_starts"), run.buffer.joined("loss_mask")
    assert counts.rows == [int(starts.sum())]
    assert int(starts.sum()) < 0.8 * int(mask.sum())
    assert torch.equal(run.buffer.joined("value_mask"), starts)
    (gradient,) = counts.head_gradients
    assert gradient.shape == (int(starts.sum()),)
    assert (gradient != 0).any()
    everywhere, all_counts = fit_counted(critic=source, critic_positions="all", **CUT)
    assert all_counts.rows == [int(mask.sum())]
    assert torch.equal(everywhere.buffer.joined("value_mask"), mask)
    if critic in CRITICS:
        own = [rows.nonzero().flatten().tolist() for rows in starts.split(run.buffer.rollout_lengths.tolist())]
        prompts = sum(len(group.prompt_ids) for group in run.buffer.groups)
        whole = prompts + len(starts)
        assert counts.tokens == [prompts + sum(places[-1] + 1 for places in own if places)]
        # PPO reads the value before the last trained token; nothing is behind it but tool output.
        assert whole >= fit_counted(PPO, critic=source)[1].tokens[0] > counts.tokens[0]


@pytest.mark.parametrize(("critic", "sharing"), [("copy", "shared"), ("lora", "shared"), ("copy", "repeated")])
def test_the_gradient_is_that_of_whole_rollouts(fit_counted, monkeypatch, critic, sharing):
    def keep_all(groups, ends):
        return truncate_rollouts(groups, [len(rollout.token_ids) for group in groups for rollout in group.rollouts])

    truncated, counts = fit_counted(critic=CRITICS[critic], sharing={"mode": sharing}, **CUT)
    monkeypatch.setattr(ppo_module, "truncate_rollouts", keep_all)
    whole, whole_counts = fit_counted(critic=CRITICS[critic], sharing={"mode": sharing}, **CUT)
    assert whole_counts.rows == counts.rows
    assert sum(whole_counts.tokens) > sum(counts.tokens) or sharing == "repeated"  # the longest row may stay
    compare_gradients(truncated.gradients[0], whole.gradients[0])


def test_later_states_get_no_gradient(fit_counted, monkeypatch):
    """Zero gradient off the starts, seen at the hidden states themselves."""
    seen, original = [], ppo_module.Critic.values

    def values(self, batch, index=None, *, states=None):
        if torch.is_grad_enabled() and states is not None:
            states.retain_grad()
            seen.append((states, index))
        return original(self, batch, index, states=states)

    monkeypatch.setattr(ppo_module.Critic, "values", values)
    fit_counted(critic=SHARED["shared"], rewards=constant(1.0), critic_warmup_steps=1, **CUT)
    ((states, index),) = seen
    touched = states.grad.abs().sum(dim=1).nonzero().flatten()
    assert set(touched.tolist()) <= set(index.tolist())
    assert len(touched) > 0
