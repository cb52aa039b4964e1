"""A run whose reward functions give nothing ends, on all ranks, with their names and counts."""

from __future__ import annotations

import csv

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from pl_grouprl.rewards import Weighted


class LateReward:
    """None for all rollouts but those of some calls."""

    def __init__(self, given=()):
        self.given = given
        self.calls = 0

    def __call__(self, completions, **columns):
        self.calls += 1
        gives = self.calls in self.given
        return [float(len(text)) if gives else None for text in completions]


def broken(completions, **columns):
    return [float("nan") for _ in completions]


def fit(make_module, make_data, make_trainer, rewards, steps=8, checkpoint=None, **options):
    module = make_module(rewards=rewards, reward_calls={"max_failed_share": 1.0}, **options)
    trainer = make_trainer(max_steps=steps)
    trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
    return trainer, module


def test_batches_without_a_reward_end_the_run(make_module, make_data, make_trainer):
    rewards = [LateReward(), Weighted(broken, name="score")]
    message = (
        r"no rollout had a reward in 3 batches in a row \(guards.max_unrewarded_batches=3\), so nothing is learned\. "
        r"Of the rollouts of the last one LateReward returned None for 16 and no finite number for 0; score returned "
        r"None for 0 and no finite number for 16\. Fix the reward functions"
    )
    with pytest.raises(RuntimeError, match=message):
        fit(make_module, make_data, make_trainer, rewards, guards={"max_unrewarded_batches": 3})
    assert rewards[0].calls == 3


def test_a_reward_in_between_starts_the_count_again(make_module, make_data, make_trainer):
    trainer, module = fit(
        make_module, make_data, make_trainer, LateReward((3, 6)), guards={"max_unrewarded_batches": 3}
    )
    assert trainer.global_step == 8
    assert module.rewarder.unrewarded_batches == 2


def test_the_count_continues_from_a_checkpoint(make_module, make_data, make_trainer, tmp_path):
    options = {"guards": {"max_unrewarded_batches": 4}}
    trainer, _ = fit(make_module, make_data, make_trainer, LateReward(), steps=3, **options)
    trainer.save_checkpoint(tmp_path / "state.ckpt")
    assert torch.load(tmp_path / "state.ckpt", weights_only=True)["pl_grouprl"]["unrewarded"] == {
        "unrewarded_batches": 3
    }
    resumed = LateReward()
    with pytest.raises(RuntimeError, match="no rollout had a reward in 4 batches in a row"):
        fit(make_module, make_data, make_trainer, resumed, checkpoint=tmp_path / "state.ckpt", **options)
    assert resumed.calls == 1


def test_a_function_that_applies_to_nobody_in_a_step_logs_no_mean(make_module, make_data, make_trainer, tmp_path):
    def graded(completions, **columns):
        return [{"score": 1.0, "extra": 2.0} if late.calls == 2 else 1.0 for _ in completions]

    late, logger = LateReward((1, 3)), CSVLogger(tmp_path, version="")
    trainer = make_trainer(max_steps=4, logger=logger, log_every_n_steps=1)
    trainer.fit(make_module(rewards=[late, Weighted(graded, name="graded")]), make_data())
    with open(tmp_path / "lightning_logs" / "metrics.csv", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["reward"]]
    assert "nan" not in [value for row in rows for value in row.values()]
    applies = [[name for name in ("LateReward/mean", "LateReward/std", "graded/mean", "graded/extra")
                if row[f"rewards/{name}"]] for row in rows]  # fmt: skip
    always = ["graded/mean"]
    assert applies == [
        ["LateReward/mean", "LateReward/std", *always], [*always, "graded/extra"],
        ["LateReward/mean", "LateReward/std", *always], always,
    ]  # fmt: skip
    assert [float(row["rewards/LateReward/none"]) for row in rows] == [0, 16, 0, 16]


def test_the_limit_is_at_least_one(make_module):
    with pytest.raises(ValueError, match=r"guards.max_unrewarded_batches is 0; it must be at least 1"):
        make_module(guards={"max_unrewarded_batches": 0})
