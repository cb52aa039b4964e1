"""Rewards: gathered over ranks, in workers, from hostile graders and judges, and batches without any."""

from __future__ import annotations

import csv
import logging
import math
import os
import signal
from pathlib import Path

import pytest
import torch
from helpers.episodes import make_episode, make_group
from helpers.hostile_graders import ATTACKS, FAILS, Hostile
from helpers.judge_server import judge_server, reply
from helpers.tiny_runs import ScriptedEngine, TinyPolicy, constant, same, weights_of
from helpers.watched_processes import runs, until, zombies
from helpers.worker_rewards import blocks, length, never, patient, raises_always
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from transformers import AutoModelForTokenClassification

from pl_grouprl.callbacks import CompletionsTable
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.functional.advantages.outcomes import opo_advantages
from pl_grouprl.functional.advantages.temporal import generalized_advantages, reinforce_plus_plus_advantages, td_errors
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.rewards import Judge, ProcessRewardModel, Weighted
from pl_grouprl.rewards import workers as workers_module
from pl_grouprl.rewards.apply import Failure, PendingRewards, apply_rewards
from pl_grouprl.training import rewarder as group_rewards
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.rewarder import gather_rewards, has_token_rewards, rewards_per_token, subtract_kl_penalties
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import Rollout, RolloutGroup

NAN = math.nan


def first_rank():
    rollouts = [Rollout([1, 2], reward=2.0, rewards={"a": 1.0, "b": None}), Rollout([3], reward=None)]
    return [RolloutGroup([1], rollouts)]


def second_rank():
    steps = [Rollout([4, 5, 6], reward=3.5, token_rewards=[1.0, None, 2.0], rewards={"a": 3.0, "b": 0.5})]
    return [RolloutGroup([2], steps), RolloutGroup([3], [Rollout([], reward=0.0), Rollout([7], reward=1.0)])]


@pytest.fixture
def gather(monkeypatch):
    """What each of the two ranks gathers."""

    def both(**options):
        sent = []
        monkeypatch.setattr(group_rewards, "gather_plain", lambda value, device: sent.append(value) or [value])
        run = PlainRun(torch.nn.Linear(1, 1))
        for groups in (first_rank(), second_rank()):
            gather_rewards(groups, run, **options)
        monkeypatch.setattr(group_rewards, "gather_plain", lambda value, device: sent)
        runs = [PlainRun(torch.nn.Linear(1, 1), global_rank=rank) for rank in (0, 1)]
        return [
            gather_rewards(own, run, **options) for own, run in zip((first_rank(), second_rank()), runs, strict=True)
        ]

    return both


def test_each_rank_has_the_rewards_of_all_and_knows_its_own(gather):
    for rank, rewards in enumerate(gather()):
        torch.testing.assert_close(rewards.outcomes, torch.tensor([2.0, NAN, 0.5, 0.0, 1.0]), equal_nan=True)
        assert rewards.group_ids_E.tolist() == [0, 0, 1, 2, 2]
        assert rewards.lengths_E.tolist() == [2, 1, 3, 0, 1]
        expected = torch.tensor([NAN, NAN, NAN, 1.0, NAN, 2.0, NAN])
        torch.testing.assert_close(rewards.step_rewards_N, expected, equal_nan=True)
        assert rewards.greedy is None
        assert torch.arange(5)[rewards.own_E].tolist() == [[0, 1], [2, 3, 4]][rank]
        assert torch.arange(7)[rewards.own_N].tolist() == [[0, 1, 2], [3, 4, 5, 6]][rank]


def test_columns_greedy_rollouts_and_no_tokens(gather):
    greedy = [RolloutGroup([1], [Rollout([9], reward=0.25)])]
    rewards = gather_rewards(first_rank(), PlainRun(torch.nn.Linear(1, 1)), greedy=greedy)
    assert rewards.greedy.tolist() == [0.25, 0.25]
    assert rewards.step_rewards_N is None
    assert [has_token_rewards(groups) for groups in (first_rank(), second_rank())] == [False, True]
    rewards = gather(functions=["a", "b"])[0]  # a column per function
    expected = [[1.0, NAN], [NAN, NAN], [3.0, 0.5], [NAN, NAN], [NAN, NAN]]
    torch.testing.assert_close(rewards.outcomes, torch.tensor(expected), equal_nan=True)


def test_penalties_are_subtracted_once():
    buffer = RolloutBuffer(second_rank())
    buffer.put("kl_penalty", torch.tensor([0.25, 0.5, 0.0, 0.125]))
    (first,), (second, third) = (group.rollouts for group in subtract_kl_penalties(buffer))
    assert [first.reward, first.outcome_reward, second.reward, third.reward] == [2.75, -0.25, 0.0, 0.875]
    assert buffer.groups[0].rollouts[0].reward == 3.5


def test_estimators_get_the_number_of_tokens_that_the_model_wrote():
    groups = [make_group(make_episode(reward=1.0), Rollout([1, 2], reward=0.0))]
    rewards = gather_rewards(groups, PlainRun(torch.nn.Linear(1, 1)))
    assert (rewards.lengths_E.tolist(), rewards.sampled_E.tolist()) == ([6, 2], [4, 2])
    # The baseline of OPO is (4 * 1 + 2 * 0) / 6.
    advantages = opo_advantages(rewards.outcomes, rewards.group_ids_E, rewards.sampled_E)
    assert advantages.tolist() == pytest.approx([1 / 3, -2 / 3])


def test_rewards_of_an_episode_go_to_the_models_tokens():
    """An outcome to its last token, one for a tool's result to the token before, one for the prompt to the first."""
    rollout = make_episode(
        observation=1, reward=7.0, token_rewards=[1.0, None, None, None, None, 2.0, None], finish_reason="length"
    )
    buffer = RolloutBuffer([make_group(rollout)])
    assert rewards_per_token(buffer).tolist() == [0, 1, 0, 2, 0, 0, 4]
    ends_with_a_result = make_episode(loss_mask=[1, 1, 1, 0, 0, 0], reward=3.0)
    assert rewards_per_token(RolloutBuffer([make_group(ends_with_a_result)])).tolist() == [0, 0, 3, 0, 0, 0]


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


def test_advantages_with_a_critic_skip_tool_results():
    """The state after a call is the one in which the model reads the result: V at its next token."""
    buffer = RolloutBuffer([make_group(make_episode(reward=8.0))])
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    rewards_BT = to_rows(rewards_per_token(buffer), buffer.rollout_lengths)
    values_BT = torch.tensor([[1.0, 2.0, 3.0, NAN, NAN, 5.0]])
    errors = td_errors(rewards_BT, values_BT, mask_BT, gamma=1.0)
    assert errors.tolist() == [[1, 1, 2, 0, 0, 3]]
    advantages, returns = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[2.375, 2.75, 3.5, 0, 0, 3]]
    assert returns.tolist() == [[3.375, 4.75, 6.5, 0, 0, 8]]


def test_reward_to_go_of_an_episode_is_whitened_over_the_models_tokens():
    buffer = RolloutBuffer([make_group(make_episode(reward=2.0), Rollout([1, 2], reward=0.0))])
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    rewards_BT = to_rows(rewards_per_token(buffer), buffer.rollout_lengths)
    # 2 at 4 tokens, 0 at 2: mean 4/3, squares 4 * (2/3)^2 + 2 * (4/3)^2 = 16/3, variance 16/15
    scale = (16 / 15 + 1e-8) ** 0.5
    high, low = (2 - 4 / 3) / scale, (0 - 4 / 3) / scale
    advantages = reinforce_plus_plus_advantages(rewards_BT, mask_BT)
    assert advantages[0].tolist() == pytest.approx([high] * 3 + [0, 0, high])
    assert advantages[1].tolist() == pytest.approx([low] * 2 + [0] * 4)


def test_reward_functions_are_called_once_per_episode_with_the_last_row():
    seen = []

    def length(completions, completion_ids, **columns):
        seen.append((completions, completion_ids))
        return [[float(token) for token in ids] if len(ids) > 1 else float(len(ids)) for ids in completion_ids]

    def whole_groups(groups):
        return [[1.0 for _ in group.rollouts] for group in groups]

    rows = [Rollout([1], text="a", episode=0), Rollout([2, 3], text="b", episode=0), Rollout([4], text="c")]
    group = RolloutGroup([9], rows, prompt="p")
    metrics = apply_rewards([group], [length, whole_groups])
    assert seen == [(["b", "c"], [[2, 3], [4]])]
    assert [row.reward for row in rows] == [6.0, 6.0, 2.0]
    assert [row.rewards for row in rows] == [{"length": 5.0, "whole_groups": 1.0}] * 2 + [
        {"length": 1.0, "whole_groups": 1.0}
    ]
    assert [row.token_rewards for row in rows] == [None, [2.0, 3.0], [1.0]]
    assert metrics["rewards/length/mean"] == 3.0


# Options.


class Stays:
    stays_in_process = True

    def __call__(self, completions):
        return length(completions)


def test_workers_change_nothing_and_end_with_the_run(fit, monkeypatch):
    made, new = [], workers_module._Worker.start
    monkeypatch.setattr(workers_module._Worker, "start", lambda self: (made.append(self), new(self)))
    options = {"rewards": length, "engine": ScriptedEngine(), "num_iterations": 2}
    limits = {"data": {"val": True}, "trainer": {"limit_val_batches": 1}}
    alone = fit(steps=2, **options, **limits)
    beside = fit(steps=2, reward_calls={"workers": 2, "timeout": 60.0}, **options, **limits)
    assert same(alone.weights[-1], beside.weights[-1])
    assert [worker.is_alive() for worker in made] == [False, False]
    assert [worker.process.pid for worker in made] == [None, None]


def test_failures_are_judged_by_the_options(fit):
    options = {"rewards": raises_always, "engine": ScriptedEngine()}
    run = fit(reward_calls={"workers": 1, "max_failed_share": 1.0, "retries": 0}, **options)
    assert run.buffer.metrics["rewards/raises_always/invalid"] == 16.0
    with pytest.raises(RuntimeError, match=r"'raises_always' raised OSError.*failed for 16 of 16"):
        fit(reward_calls={"workers": 1, "max_failed_share": 0.25}, **options)


def test_weights_may_change_during_a_run(fit):
    weighted, means = Weighted(length), []

    class Anneal(Callback):
        def on_train_batch_end(self, trainer, module, *args):
            means.append(module.last_rollouts.metrics["reward"] / module.last_rollouts.metrics["rewards/length/mean"])
            weighted.weight = 10.0

    fit(steps=2, rewards=[weighted], engine=ScriptedEngine(), callbacks=[Anneal()])
    assert means == pytest.approx([1.0, 10.0])


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"reward_calls": {"workers": -1}}, "reward_calls.workers"),
        (
            {"reward_calls": {"timeout": 3.0}, "rewards": [length, patient]},
            r"reward_calls.timeout is 3.0 .*\['length'\]",
        ),
        ({"reward_calls": {"timeout": 3.0}, "rewards": Stays()}, r"reward_calls.timeout is 3.0 .*\['Stays'\]"),
        ({"reward_calls": {"workers": 1, "timeout": 0.0}}, "reward_calls.timeout"),
        ({"reward_calls": {"workers": 1, "timeout": math.nan}}, "reward_calls.timeout"),
        ({"reward_calls": {"retries": -1}}, "reward_calls.retries"),
        ({"reward_calls": {"max_failed_share": 1.5}}, "max_failed_share"),
        ({"guards": {"max_unrewarded_batches": 0}}, "max_unrewarded_batches"),
    ],
)
def test_options_that_are_refused(make_module, options, name):
    with pytest.raises(ValueError, match=name):
        make_module(**options)


def test_functions_that_workers_cannot_run_are_refused_at_setup(fit):
    for rewards, name in ((lambda completions: [1.0 for _ in completions], "'reward_1'"), (patient, "'patient'")):
        with pytest.raises(ValueError, match=name):
            fit(rewards=rewards, reward_calls={"workers": 1})


def test_async_functions_have_a_time_limit_without_workers(fit):
    fit(rewards=patient, engine=ScriptedEngine(), reward_calls={"timeout": 0.3})
    for rewards in (never, blocks):
        with pytest.raises(RuntimeError, match=rf"'{rewards.__name__}' took longer than reward_calls.timeout=0.3"):
            fit(rewards=rewards, engine=ScriptedEngine(), reward_calls={"timeout": 0.3})


# Hostile graders: time-limited and counted.


QUICK = {
    "hang", "take_all_memory", "fork_and_return_twice", "leave_a_child", "flood", "leave_at_once", "raise_no_exception",
    "leave_an_alarm", "kill_itself", "signal_in_a_thread", "change_everything",
}  # fmt: skip


@pytest.fixture
def seen(monkeypatch):
    """What went wrong in each call that failed."""
    whats, join = [], PendingRewards._join

    def join_and_see(self, reward, calls, outcomes):
        whats.extend(outcome.what for outcome in outcomes if isinstance(outcome, Failure))
        return join(self, reward, calls, outcomes)

    monkeypatch.setattr(PendingRewards, "_join", join_and_see)
    return whats


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("names", "timeout"),
    [pytest.param(QUICK, 8.0, id="quick"), pytest.param(set(ATTACKS), 60.0, id="all", marks=pytest.mark.slow)],
)
def test_a_run_continues_with_hostile_graders(names, timeout, fit, tmp_path, capfd, seen):
    process = os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGALRM)
    run = fit(
        steps=3,
        rewards=Hostile(tmp_path, sorted(names)),
        reward_calls={
            "workers": 2, "timeout": timeout, "memory_limit_mb": 1024, "retries": 0, "max_failed_share": 1.0,
        },
    )  # fmt: skip
    failed = [step["rewards/Hostile/invalid"] for step in run.steps]
    assert len(failed) == 3
    assert sum(failed) == len(names & {attack.__name__ for attack in FAILS}), "\n".join(sorted(seen))
    assert failed[-1] == 0
    assert all(torch.isfinite(own).all() for own in run.weights[-1].values())
    assert not same(run.weights[0], run.weights[-1])
    assert (os.getcwd(), dict(os.environ), signal.getsignal(signal.SIGALRM)) == process
    workers = [int((tmp_path / name).read_text()) for name in names]
    until(lambda: not any(map(runs, workers)) and zombies() == [])


# Batches without a reward.


class LateReward:
    """None for all rollouts but those of some calls."""

    def __init__(self, given=()):
        self.given = given
        self.calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        gives = self.calls in self.given
        return [float(len(text)) if gives else None for text in completions]


def test_batches_without_a_reward_end_the_run_and_are_counted_beyond_a_checkpoint(fit):
    options = {"reward_calls": {"max_failed_share": 1.0}, "guards": {"max_unrewarded_batches": 4}}
    rewards = [LateReward(), Weighted(constant(math.nan), name="score")]
    with pytest.warns(UserWarning, match="no rollout of a batch has a reward"):
        saved = fit(steps=3, rewards=rewards, save=True, **options)
    assert saved.module.rewarder.unrewarded_batches == 3
    assert same(saved.weights[-1], weights_of(saved.module))
    rewards[0].calls = 0
    message = r"4 batches in a row \(guards.max_unrewarded_batches=4\).* LateReward .* 16 .* 0; score .* 0 .* 16\."
    with pytest.raises(RuntimeError, match=message):
        fit(steps=8, rewards=rewards, resume=3, **options)
    assert rewards[0].calls == 1


def test_a_function_that_applies_to_nobody_in_a_step_logs_no_mean(fit, tmp_path):
    """And its rewards start the count of batches without one again."""

    def graded(completions, **columns):
        return [{"score": 1.0, "extra": 2.0} if late.calls == 2 else None for _ in completions]

    late, logger = LateReward((1, 3)), CSVLogger(tmp_path, version="")
    rewards = [late, Weighted(graded, name="graded")]
    run = fit(
        steps=4, rewards=rewards, trainer={"logger": logger, "log_every_n_steps": 1},
        reward_calls={"max_failed_share": 1.0}, guards={"max_unrewarded_batches": 2},
    )  # fmt: skip
    assert run.module.rewarder.unrewarded_batches == 1
    with open(tmp_path / "lightning_logs" / "metrics.csv", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    names = ("LateReward/mean", "LateReward/std", "graded/mean", "graded/extra")
    rows = [row for row in rows if row["rewards/LateReward/none"]]
    assert [float(row["rewards/LateReward/none"]) for row in rows] == [0, 16, 0, 16]
    assert "nan" not in [value for row in rows for name, value in row.items() if name.startswith("rewards/")]
    assert [[name for name in names if row[f"rewards/{name}"]] for row in rows] == [
        ["LateReward/mean", "LateReward/std"], ["graded/mean", "graded/extra"],
        ["LateReward/mean", "LateReward/std"], [],
    ]  # fmt: skip


# Rewards of models.

KEY = "sk-very-secret"


def letters(request):
    """Grades the share of letters among the first 10 characters of a completion; refuses some."""
    text = request.question.split("completion]\n")[1].split("\n[")[0]
    return reply("No." if text[:1].isalpha() else f"Grade: {sum(character.isalpha() for character in text[:10])}")


def test_a_run_with_a_judge_counts_failures_and_keeps_the_key_to_itself(fit, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with judge_server(letters) as (server, url), caplog.at_level(logging.DEBUG):
        rubric = "Is {completion} like {answer}?"
        judge = Judge(url, "m", rubric, api_key_env="JUDGE_KEY", cache_dir=str(tmp_path / "cache"))
        run = fit(
            steps=2, rewards=judge, reward_calls={"max_failed_share": 0.9}, trainer={"logger": CSVLogger(tmp_path)},
            callbacks=[ModelCheckpoint(tmp_path / "checkpoints"), CompletionsTable()],
        )  # fmt: skip
    for step in run.steps:
        assert step["rewards/Judge/grade"] == pytest.approx(10 * step["reward"])
    assert 0 < sum(step["rewards/Judge/invalid"] for step in run.steps) < 32
    assert {request.headers["Authorization"] for request in server.requests} == {f"Bearer {KEY}"}
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert {".ckpt", ".csv", ".json", ".jsonl"} <= {file.suffix for file in files}
    assert not [file for file in files if KEY.encode() in file.read_bytes()]
    assert KEY not in caplog.text


def test_grpo_trains_with_a_process_reward_model(fit):
    config = TinyPolicy().load().config
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForTokenClassification.from_config(config)
    kept = weights_of(model)
    run = fit(steps=2, rewards=ProcessRewardModel(model, tokenizer=digit_tokenizer(), separator="e"))
    assert run.buffer.metrics["rewards/ProcessRewardModel/invalid"] == 0
    assert run.buffer.metrics["rewards/ProcessRewardModel/std"] > 0
    assert not same(TinyPolicy().load().parameters(), run.module.policy.parameters())
    assert same(kept, weights_of(model))  # it is never trained itself
