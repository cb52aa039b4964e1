"""Every parameter of GROUP PPO changes the result, and none takes a value that it cannot honour."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers.sweeps import sweep_pairs

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.callbacks.token_groups import TokenGroupMonitor
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.functional.token_groups import token_group_counts
from pl_grouprl.models import PolicyCopyCritic, SharedTrunkCritic
from pl_grouprl.types import Rollout, SamplingConfig

BASE = {
    "critic": PolicyCopyCritic(head_std=0.3), "whiten_advantages": False, "gamma": 0.95,
    "group_variance_threshold": 2.0, "adaptive_threshold": False, "bootstrap_truncated": True,
}  # fmt: skip


def rewards(completions, **columns):
    return [len(set(text)) / 5 - 0.3 * (len(text) % 2) for text in completions]


@pytest.fixture
def fit(make_module, make_data, make_trainer, ragged_engine, history):
    def run(cls=GroupPPO, max_steps=1, policy=None, **options):
        defaults = {"engine": ragged_engine(logprobs=True), "rewards": rewards}
        defaults |= {"sampling": SamplingConfig(max_new_tokens=12), "policy": policy}
        module, record = make_module(cls, **{**defaults, **BASE, **options}), history(keep_tensors=True)
        trainer = make_trainer(max_steps=max_steps, callbacks=[record], precision="64-true")
        trainer.fit(module, make_data(shuffle=False))
        return module, record

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


@pytest.fixture(scope="module")
def unchanged():
    """The module and the record of the run with no change: filled by the first test that needs them."""
    return []


@pytest.mark.parametrize(("change", "what"), CHANGES)
def test_every_parameter_changes_the_result(fit, unchanged, change, what):
    if not unchanged:
        unchanged += fit()
    (module, record), (other, other_record) = unchanged, fit(**change)
    one, two = module.last_rollouts, other.last_rollouts
    differs = {
        name: not torch.equal(one.joined(key), two.joined(key))
        for name, key in (("starts", "group_starts"), ("advantages", "advantages"), ("value_mask", "value_mask"))
    }
    assert differs[what]
    if what != STARTS:
        assert [name for name, is_other in differs.items() if is_other] == [what]
    assert any(not torch.equal(g, other_record.gradients[0][n]) for n, g in record.gradients[0].items())


def test_the_size_of_the_sketch_matters(fit):
    one, other = (fit(score_norm="sketch", sketch_dim=dim)[0].last_rollouts for dim in (1, 64))
    assert not torch.equal(one.joined("group_starts"), other.joined("group_starts"))


class PlainPPO(PPO):
    """PPO that leaves the options of token groups alone."""

    def __init__(self, *args, group_variance_threshold, adaptive_threshold, **kwargs):
        super().__init__(*args, **kwargs)


def test_groups_of_one_token_are_ppo(fit):
    (_, grouped), (_, ppo) = fit(group_max_size=1), fit(PlainPPO)
    for name, gradient in ppo.gradients[0].items():
        torch.testing.assert_close(grouped.gradients[0][name], gradient, rtol=1e-9, atol=1e-12)


def test_modes_of_the_advantage(fit):
    buffers = {mode: fit(advantage_mode=mode)[0].last_rollouts for mode in ("broadcast", "endpoint", "variable_lambda")}
    mask, causes = (buffers["endpoint"].joined(name) for name in ("loss_mask", "group_causes"))
    starts = buffers["endpoint"].joined("group_starts")
    broadcast, endpoint, variable = (buffer.joined("advantages") for buffer in buffers.values())
    assert torch.equal(endpoint, torch.where(causes > 0, broadcast, 0.0))
    assert torch.equal(variable[starts], broadcast[starts])
    assert not torch.equal(variable[mask], broadcast[mask])


def test_whitening_leaves_tokens_without_an_advantage_at_zero(fit):
    raw, white = (fit(advantage_mode="endpoint", whiten_advantages=on)[0].last_rollouts for on in (False, True))
    ends = white.joined("group_causes") > 0
    raw_A, white_A = raw.joined("advantages")[ends], white.joined("advantages")[ends]
    torch.testing.assert_close(white_A, (raw_A - raw_A.mean()) / (raw_A.var() + 1e-8).sqrt())
    assert not white.joined("advantages")[~ends].any()


def test_boundaries_do_not_see_the_whitening(fit):
    one, other = (fit(whiten_advantages=on)[0].last_rollouts for on in (False, True))
    assert torch.equal(one.joined("group_starts"), other.joined("group_starts"))


def test_scaling_all_rewards_changes_no_boundary(fit):
    # With values of exactly 0 delta is the reward.
    zero = {"critic": PolicyCopyCritic(head_std=0.0), "beta": 0.5, "kl": {"place": "reward", "type": "k1"}}

    def scaled(completions, **columns):
        return [64 * reward for reward in rewards(completions)]

    one, other = fit(**zero)[0].last_rollouts, fit(rewards=scaled, **zero)[0].last_rollouts
    assert torch.equal(one.joined("group_starts"), other.joined("group_starts"))


def test_the_threshold_moves_by_the_formula(fit):
    adaptive = {"adaptive_threshold": True, "group_variance_threshold": None}
    module, record = fit(**adaptive, threshold_lr=0.5)
    counts = token_group_counts(module.token_groups)
    compression = 1 - counts["positions"].item() / counts["tokens"].item()
    assert 0 < compression < 0.75
    assert module.token_group_threshold == 4.0 == record.steps[0]["token_group/threshold"]
    assert module.threshold_controller.threshold == pytest.approx(4.0 * math.exp(0.5 * (0.75 - compression)))
    for change, start, after in (
        ({"threshold_lr": 0.1}, 4.0, 4.0 * math.exp(0.1 * (0.75 - compression))),
        ({"threshold_lr": 0.5, "max_threshold": 4.1}, 4.0, 4.1),
        ({"threshold_lr": 0.5, "min_threshold": 6.0}, 6.0, None),
        ({"threshold_lr": 0.5, "target_compression": 0.5}, 2.0, None),
        ({"threshold_lr": 0.5, "group_variance_threshold": 3.0}, 3.0, None),
    ):
        other, _ = fit(**{**adaptive, **change})
        counts = token_group_counts(other.token_groups)
        compressed = 1 - counts["positions"].item() / counts["tokens"].item()
        assert other.token_group_threshold == pytest.approx(start)
        if after is None:
            target = change.get("target_compression", 0.75)
            low = change.get("min_threshold", 1.0)
            after = min(max(start * math.exp(0.5 * (target - compressed)), low), 10.0)
        assert other.threshold_controller.threshold == pytest.approx(after)


def test_one_threshold_for_all_updates_of_a_batch_of_rollouts(fit):
    adaptive = {"adaptive_threshold": True, "group_variance_threshold": None, "threshold_lr": 0.5}
    _, record = fit(max_steps=4, num_iterations=2, **adaptive)
    thresholds = [step["token_group/threshold"] for step in record.steps]
    assert thresholds[0] == thresholds[1] == 4.0
    assert thresholds[2] == thresholds[3] != 4.0


def test_token_groups_after_a_rollout(fit, make_module):
    assert make_module(GroupPPO).token_groups is None
    assert make_module(GroupPPO).token_group_threshold == 4.0
    module, _ = fit()
    groups, buffer = module.token_groups, module.last_rollouts
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


def test_the_monitor_reads_them(make_module, make_data, make_trainer, ragged_engine):
    module = make_module(GroupPPO, engine=ragged_engine(), **BASE)
    trainer = make_trainer(max_steps=1, callbacks=[TokenGroupMonitor()])
    trainer.fit(module, make_data(shuffle=False))
    counts = {name: count.item() for name, count in token_group_counts(module.token_groups).items()}
    tokens, positions = counts["tokens"], counts["positions"]
    expected = {
        "total_tokens": tokens, "advantage_positions": positions, "compression_ratio": 1 - positions / tokens,
        "speedup_factor": tokens / positions, "avg_group_size": tokens / positions, "threshold": 2.0,
        **{name: counts[name] / positions for name in counts if name.startswith("ended_by")},
    }  # fmt: skip
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert len(expected) == 9
    for name, value in expected.items():
        assert logged[f"token_group/{name}"] == pytest.approx(value, rel=1e-6), name


def test_log_ratio_needs_a_sampler_that_differs(fit):
    # The engine in the process samples from the very policy that is trained.
    with pytest.raises(ValueError, match="use score_norm='logit'"):
        fit(score_norm="log_ratio", engine=None)
    module, _ = fit(score_norm="log_ratio")
    assert module.token_groups.ends.any()


def test_log_ratio_needs_log_probabilities(fit, ragged_engine):
    with pytest.raises(ValueError, match="score_norm is 'log_ratio', but RaggedEngine reports no log-probabilities"):
        fit(score_norm="log_ratio", engine=ragged_engine())


REFUSED = [
    ({"group_variance_threshold": 0}, "group_variance_threshold is 0"),
    ({"group_variance_threshold": math.inf}, "group_variance_threshold is inf"),
    ({"group_max_size": 0}, "group_max_size .* is 0"),
    ({"group_epsilon": -1e-6}, "group_epsilon is -1e-06"),
    ({"threshold_lr": -1}, "threshold_lr is -1"),
    ({"min_threshold": 0}, "min_threshold is 0"),
    ({"max_threshold": 0.5}, "max_threshold is 0.5"),
    ({"target_compression": 0.3}, "target_compression is 0.3"),
    ({"target_compression": 0.8, "group_max_size": 4}, "target_compression is 0.8; .* 0.75"),
    ({"score_norm": "l2"}, "score_norm is 'l2'"),
    ({"score_norm": "sketch", "sketch_dim": 0}, "dim is 0"),
    ({"sketch_dim": 7}, "sketch_dim is 7 and score_norm is 'logit', which makes no sketch; set score_norm to 'sketch'"),
    ({"score_norm": "log_ratio", "sketch_dim": 64}, "sketch_dim is 64 and score_norm is 'log_ratio'"),
    ({"group_epsilon": math.nan}, "group_epsilon is nan"),
    ({"group_epsilon": math.inf}, "group_epsilon is inf"),
    ({"group_max_size": 1}, "target_compression is 0.75; .* adaptive_threshold"),
    ({"group_variance_threshold": 50.0, "max_threshold": 10.0}, r"is 50.0, outside .* max_threshold \(10.0\)"),
    ({"adaptive_threshold": False, "threshold_lr": -5}, "threshold_lr is -5"),
    ({"boundary_signal": "mc"}, "boundary_signal is 'mc'"),
    ({"advantage_mode": "last"}, "advantage_mode is 'last'"),
    ({"critic_positions": "ends"}, "critic_positions is 'ends'"),
]


def test_a_sketch_has_64_numbers_by_default(make_module):
    assert make_module(GroupPPO, score_norm="sketch").sketch.dim == 64
    assert make_module(GroupPPO, score_norm="sketch", sketch_dim=7).sketch.dim == 7
    assert make_module(GroupPPO).sketch is None


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_out_of_range(make_module, options, message):
    with pytest.raises(ValueError, match=message):
        make_module(GroupPPO, **options)


def constant(value):
    return lambda completions, **columns: [value] * len(completions)


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
    "one token": ({"group_max_size": 1, "sampling": SamplingConfig(max_new_tokens=1)}, True),
}


@pytest.mark.parametrize(
    ("edge", "cls", "critic"),
    sweep_pairs(
        itertools.product(EDGES, [PPO, GroupPPO], ["shared", "copy"]),
        quick=[
            *((edge, GroupPPO, "copy") for edge in EDGES),
            *((edge, PPO, "shared") for edge in ("no reward", "empty rollouts", "all cut, bootstrapped")),
        ],
    ),
)
def test_edges_are_finite(make_module, make_data, make_trainer, ragged_engine, history, cls, edge, critic):
    options, moves = EDGES[edge]
    options = {"engine": ragged_engine()} | options
    if cls is PPO:
        options.pop("group_max_size", None)
    if edge != "zero rewards, zero values":
        options["critic"] = SharedTrunkCritic(head_std=0.1) if critic == "shared" else PolicyCopyCritic(head_std=0.1)
    if "group_max_size" in options:
        options["target_compression"] = 0.0
    record = history(keep_tensors=True)
    module = make_module(
        cls, num_iterations=2, num_mini_batches=2, beta=0.1, kl={"place": "reward", "target": 0.1},
        optimizer=OptimizerConfig(1e-3, weight_decay=0.1), **options,
    )  # fmt: skip
    module.configure_model()
    start = {name: p.detach().clone() for name, p in module.named_parameters()}
    make_trainer(max_steps=4, callbacks=[record]).fit(module, make_data())
    assert module.optimization.nonfinite_steps == 0
    for step, weights in zip(record.steps, record.weights, strict=True):
        assert all(p.isfinite().all() for p in weights.values())
        for name in ("loss", "grad_norm", "value/loss", "value/clip_ratio", "kl_coef"):
            assert math.isfinite(step[name]), name
    for name in ("advantages", "returns", "values"):
        assert module.last_rollouts.joined(name).isfinite().all(), name
    changed = any(not torch.equal(p, start[name]) for name, p in record.weights[-1].items())
    assert moves is None or changed == moves


def test_groups_end_at_turns_if_asked_to(fit):
    def spans(module):
        """How many groups go on after a gap of the mask."""
        buffer = module.last_rollouts
        mask, starts = (to_rows(buffer.joined(name), buffer.rollout_lengths) for name in ("loss_mask", "group_starts"))
        after_gap = mask[:, 1:] & ~mask[:, :-1] & (mask.cumsum(1) > 1)[:, 1:]
        return int((after_gap & ~starts[:, 1:]).sum())

    assert spans(fit(boundary_at_turn_ends=True)[0]) == 0
    assert spans(fit(boundary_at_turn_ends=False)[0]) > 0


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
