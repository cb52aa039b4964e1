"""Rewards of tokens through the algorithms, against lists worked out again from the rollouts."""

from __future__ import annotations

import statistics

import pytest
import torch
from helpers.sweeps import sweep
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, Estimate, GroupPPO, OptimizerConfig, RolloutBuffer
from pl_grouprl.functional.masked import from_rows
from pl_grouprl.models import PolicyCopyCritic
from pl_grouprl.rewards import Weighted
from pl_grouprl.training.buffer import outcomes_or_steps_differ, rewards_differ, without_rewards
from pl_grouprl.training.rewarder import rewards_per_token
from pl_grouprl.types import Rollout, RolloutGroup


def steps(completion_ids, **columns):
    """Every other token ends a step; some rollouts have none, some no reward at all."""
    return [None if sum(ids) % 7 == 6 else [_step(i, token) for i, token in enumerate(ids)] for ids in completion_ids]


def _step(i, token):
    return None if (i + token) % 2 else 0.1 * (token % 5) - 0.2 * i


def outcome(completions, **columns):
    return [None if len(text) == 4 else float(sum(c.isalpha() for c in text)) for text in completions]


def rollouts_of(module):
    return [rollout for group in module.last_rollouts.groups for rollout in group.rollouts]


def group_of(module):
    return [index for index, group in enumerate(module.last_rollouts.groups) for _ in group.rollouts]


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
    rollouts, groups = rollouts_of(module), group_of(module)
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
def step(make_module, make_data, make_trainer, scripted_engine):
    def run(cls=GRPO, rewards=steps, trainer=None, **options):
        module = make_module(cls, rewards=rewards, **{"engine": scripted_engine, **options})
        make_trainer(max_steps=1, **(trainer or {})).fit(module, make_data(shuffle=False))
        return module

    return run


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_process_supervision(step, scale):
    module = step(scale_rewards=scale)
    rollouts = rollouts_of(module)
    assert any(rollout.reward is None for rollout in rollouts)
    assert any(rollout.token_rewards and not rollout.step_rewards for rollout in rollouts)
    assert any(not rollout.token_ids for rollout in rollouts)
    advantages = module.last_rollouts.joined("advantages")
    assert advantages.tolist() == pytest.approx(by_hand(module, {"steps": 1.0}, scale), abs=1e-5)
    assert advantages.abs().max() > 0.1


def test_outcomes_and_steps_are_added(step):
    rewards = [Weighted(steps, 2.0), Weighted(outcome, 0.5)]
    module = step(rewards=rewards)
    expected = by_hand(module, {"steps": 2.0, "outcome": 0.5})
    assert module.last_rollouts.joined("advantages").tolist() == pytest.approx(expected, abs=1e-5)
    rollouts = [rollout for rollout in rollouts_of(module) if rollout.reward is not None]
    means = {name: statistics.fmean(r.rewards[name] for r in rollouts if r.rewards[name] is not None)
             for name in ("steps", "outcome")}  # fmt: skip
    metrics = module.last_rollouts.metrics
    assert metrics["reward"] == pytest.approx(statistics.fmean(rollout.reward for rollout in rollouts))
    assert {name: metrics[f"rewards/{name}/mean"] for name in means} == pytest.approx(means)


def test_equal_steps_and_equal_outcomes_give_exactly_zero(step):
    def same(completion_ids, **columns):
        return [[0.1 if i % 2 else None for i in range(len(ids))] for ids in completion_ids]

    module = step(rewards=[same, Weighted(lambda completions: [0.3] * len(completions), 1.0, "end")])
    assert not module.last_rollouts.joined("advantages").any()


def test_truncated_rollouts_count_and_are_not_trained(step):
    module = step(mask_truncated_completions=True)
    buffer = module.last_rollouts
    expected = torch.tensor(by_hand(module, {"steps": 1.0}))
    torch.testing.assert_close(buffer.joined("advantages"), expected, rtol=0, atol=1e-5)
    cut = [r.finish_reason == "length" for r in rollouts_of(module) for _ in r.token_ids]
    assert any(cut)
    assert not buffer.joined("loss_mask")[torch.tensor(cut)].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"advantage_estimator": name}, f"advantage_estimator='{name}'")
            for name in ("rloo", "opo", "remax", "grpo_passk")
        ),
        ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "'reinforce_plus_plus_baseline'"),
        ({"multi_objective_aggregation": "normalize_then_sum"}, "multi_objective_aggregation"),
        ({"beta": 0.1, "kl": {"place": "reward"}}, "kl.place='reward'"),
    ],
)
def test_what_compares_whole_rollouts_refuses_rewards_of_tokens(step, options, message):
    with pytest.raises(ValueError, match=f"a reward function returned a reward per token, .*{message}"):
        step(**options)
    step(rewards=outcome, **options)


def test_reinforce_plus_plus_discounts_them(step):
    options = {"advantage_estimator": "reinforce_plus_plus", "advantage_options": {"gamma": 0.5}}
    module = step(rewards=[steps, outcome], **options)
    returns, trained = [], []
    for rollout in rollouts_of(module):
        row = [value or 0.0 for value in (steps([rollout.token_ids])[0] or [0.0] * len(rollout.token_ids))]
        end = outcome([rollout.text])[0] or 0.0
        to_go, own = 0.0, []
        for t in reversed(range(len(row))):
            to_go = row[t] + (end if t == len(row) - 1 else 0.5 * to_go)
            own.insert(0, to_go)
        returns += own
        trained += [rollout.reward is not None] * len(row)
    kept = [value for value, bit in zip(returns, trained, strict=True) if bit]
    mean, std = statistics.fmean(kept), statistics.stdev(kept)
    expected = [(value - mean) / std if bit else 0.0 for value, bit in zip(returns, trained, strict=True)]
    assert module.last_rollouts.joined("advantages").tolist() == pytest.approx(expected, abs=1e-5)


# Rewards on the token axis.


def test_rewards_are_at_trained_tokens_and_add_up():
    rollouts = [
        Rollout([1] * 4, reward=7.0, token_rewards=[1.0, None, 2.0, None]),  # an outcome of 4
        Rollout([1] * 6, reward=15.0, token_rewards=[1.0, 2.0, None, 4.0, 8.0, None], loss_mask=[0, 1, 1, 0, 0, 1]),
        Rollout([1] * 2, reward=3.0, token_rewards=[1.0, 2.0], loss_mask=[0, 0]),
        Rollout([1] * 2, reward=None, token_rewards=[1.0, 2.0]),
        Rollout([], reward=1.0, token_rewards=[]),
        Rollout([1] * 3, reward=0.5),
    ]
    buffer = RolloutBuffer([RolloutGroup([1], rollouts)])
    rows = rewards_per_token(buffer).split([len(rollout.token_ids) for rollout in rollouts])
    assert [row.tolist() for row in rows] == [
        [1.0, 0.0, 2.0, 4.0],
        [0.0, 3.0, 12.0, 0.0, 0.0, 0.0],  # from before the first trained token, and from the tool output
        [0.0, 0.0],
        [0.0, 0.0],
        [],
        [0.0, 0.0, 0.5],
    ]


def test_a_buffer_with_token_rewards_survives_its_state():
    group = RolloutGroup([1], [Rollout([1, 2], reward=1.0, token_rewards=[None, 1.0]), Rollout([3], reward=0.0)])
    restored = RolloutBuffer.from_state_dict(RolloutBuffer([group]).state_dict())
    assert restored.groups[0].rollouts == group.rollouts
    older = RolloutBuffer([group]).state_dict()
    for rollout in older["groups"][0]["rollouts"]:
        del rollout["token_rewards"]  # as in a checkpoint of an older version
    assert RolloutBuffer.from_state_dict(older).groups[0].rollouts[0].token_rewards is None


@pytest.mark.parametrize(
    ("rewards", "tokens", "teaches"),
    [
        ([1.0, 1.0], [[1.0, None], [0.5, 0.5]], True),
        ([1.0, 1.0], [[1.0, None], [None, 1.0]], False),
        ([1.0, 2.0], [None, None], True),
        ([1.0, None], [[0.5, 0.5], [1.0, 2.0]], False),
        ([0.0, 0.0], [[None, None], [None, None]], False),
    ],
)
def test_groups_whose_steps_differ_are_kept(rewards, tokens, teaches):
    group = RolloutGroup(
        [1], [Rollout([1, 2], reward=r, token_rewards=own) for r, own in zip(rewards, tokens, strict=True)]
    )
    assert rewards_differ(group) is teaches
    assert not rewards_differ(without_rewards(group))


def test_grpo_keeps_groups_by_what_it_compares():
    longer = [Rollout([1, 2], reward=2.0, token_rewards=[1.0, 1.0]), Rollout([1], reward=1.0, token_rewards=[1.0])]
    assert rewards_differ(RolloutGroup([1], longer))  # for a critic, the longer one is better
    assert not outcomes_or_steps_differ(RolloutGroup([1], longer))
    opposed = [Rollout([1], reward=1.0, token_rewards=[1.0]), Rollout([1], reward=1.0)]
    assert not rewards_differ(RolloutGroup([1], opposed))  # the sums are equal
    assert outcomes_or_steps_differ(RolloutGroup([1], opposed))


# An override's result.


class PerToken(GRPO):
    """Each token's advantage is its position."""

    def compute_advantages(self, groups):
        return torch.cat([torch.arange(len(r.token_ids)) for group in groups for r in group.rollouts])


def test_an_override_returns_advantages_per_token(step):
    module = step(PerToken, rewards=outcome)
    expected = [float(i) for rollout in rollouts_of(module) for i in range(len(rollout.token_ids))]
    assert module.last_rollouts.joined("advantages").tolist() == expected


class UnevenEngine:
    """As many rollouts as tokens: of 0 and 2 tokens."""

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        return [[Rollout([14 + g, 12][: 2 * (g % 2)]) for g in range(num_generations)] for _ in prompts]


class Numbered(GRPO):
    def compute_advantages(self, groups):
        return torch.arange(sum(len(group.rollouts) for group in groups)).float()


def test_as_many_rollouts_as_tokens(step):
    per_rollout = step(Numbered, rewards=outcome, engine=UnevenEngine()).last_rollouts.joined("advantages")
    assert per_rollout.tolist() == [float(i - i % 2 + 1) for i in range(16)]
    per_token = step(Numbered, rewards=steps, engine=UnevenEngine()).last_rollouts.joined("advantages")
    assert per_token.tolist() == [float(i) for i in range(16)]
    module = step(rewards=steps, engine=UnevenEngine())
    expected = by_hand(module, {"steps": 1.0})
    assert module.last_rollouts.joined("advantages").tolist() == pytest.approx(expected, abs=1e-5)


class FlatPPO(PPO):
    """The same on the axis of response tokens."""

    def estimate(self, rows, buffer, scores):
        flat = [
            None if own is None else from_rows(own, buffer.rollout_lengths)
            for own in super().estimate(rows, buffer, scores)
        ]
        return Estimate(*flat)


def test_an_estimate_per_token(step):
    buffers = [step(cls, rewards=[steps, outcome]).last_rollouts for cls in (PPO, FlatPPO)]
    for name in ("advantages", "returns", "value_mask"):
        assert torch.equal(*(buffer.joined(name) for buffer in buffers))


# Resuming.

RUNS = {
    "grpo": (GRPO, {}),
    "ppo": (PPO, {"critic": PolicyCopyCritic(head_std=0.1)}),
    "group_ppo": (GroupPPO, {"critic": PolicyCopyCritic(head_std=0.1)}),
}


@pytest.mark.parametrize("run", sweep(RUNS, quick=["grpo", "group_ppo"]))
def test_resume_within_unfinished_rollouts_is_exact(make_module, make_data, make_trainer, tmp_path, run):
    cls, options = RUNS[run]

    def fit(max_steps, checkpoint=None, callbacks=()):
        module = make_module(
            cls, rewards=[steps, outcome], num_mini_batches=2, optimizer=OptimizerConfig(1e-2), **options
        )
        make_trainer(max_steps=max_steps, callbacks=list(callbacks)).fit(
            module, make_data(), ckpt_path=checkpoint, weights_only=True
        )
        return module

    saving = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(4, callbacks=[saving])
    for at in (1, 3):
        resumed = fit(4, tmp_path / f"step={at}.ckpt")
        assert all(torch.equal(value, whole.state_dict()[name]) for name, value in resumed.state_dict().items())
        held = [rollout.token_rewards for rollout in rollouts_of(resumed)]
        assert held == [rollout.token_rewards for rollout in rollouts_of(whole)]
        assert any(held)
