"""Levels that follow the reward: chosen as by hand, the same when resumed at any step, also with rollouts ahead."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from pl_grouprl import PromptDataModule
from pl_grouprl.callbacks import Curriculum

AHEAD = {"max_staleness": 1, "importance_sampling": {"mode": "token_truncate"}}
ROWS = [
    {"prompt": f"{number}{level}{number}", "answer": "two", "level": level}
    for number in range(6)
    for level in (0, 1, 2)
]
OPTIONS = {"threshold": 0.5, "window": 2, "fall_below": 0.49}


class Steps(Callback):
    def __init__(self):
        self.rollouts, self.levels, self.rewards, self.prompts, self.logged = [], [], [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.rollouts.append(batch.rollout_number)
        self.levels.append({prompt.columns["level"] for prompt in batch.prompts})
        self.prompts.append([prompt.prompt for prompt in batch.prompts])
        self.rewards.append(module.last_rollouts.metrics["reward"])
        self.logged.append(float(trainer.callback_metrics.get("curriculum/level", -1)))


def by_hand(rewards, ahead, threshold, window, fall_below):
    """The level of each rollout, from the rewards of all."""
    levels, level, counted = [0] * (1 + ahead), 0, []
    for number, reward in enumerate(rewards):
        if levels[number] == level:
            counted.append(reward)
        if len(counted) >= window:
            mean = sum(counted[-window:]) / window
            change = (mean > threshold and level < 2) - (mean < fall_below and level > 0)
            level, counted = level + change, [] if change else counted
        levels.append(level)
    return levels[: len(rewards)]


@pytest.fixture
def run(make_module, make_trainer, tmp_path):
    def fit(steps=10, *, checkpoint=None, save=False, updates=1, curriculum=OPTIONS, **options):
        record = Steps()
        saving = [ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
        module = make_module(num_mini_batches=updates, **options)
        callbacks = [record, Curriculum(**curriculum), *(saving if save else [])]
        make_trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=save).fit(
            module, PromptDataModule(ROWS, batch_size=2), ckpt_path=checkpoint, weights_only=True
        )
        return record, [value.detach().clone() for value in module.policy.parameters()]

    return fit


@pytest.mark.parametrize("options", [{}, AHEAD], ids=["", "ahead"])
def test_levels_follow_the_rewards(run, options):
    record, _ = run(8, **options)
    levels = by_hand(record.rewards, len(options) // 2, **OPTIONS)
    assert record.levels == [{level} for level in levels]
    assert record.logged == levels
    assert len(set(levels)) > 1


@pytest.mark.parametrize("options", [{"updates": 2}, AHEAD], ids=["two updates", "ahead"])
def test_resume_is_exact(run, tmp_path, options):
    whole, weights = run(5, save=True, **options)
    assert len({level for levels in whole.levels for level in levels}) > 1
    for step in range(2, 5):
        record, resumed = run(5, checkpoint=tmp_path / f"step={step}.ckpt", **options)
        assert record.prompts == whole.prompts[step:]
        assert record.logged == whole.logged[step:]
        assert all(torch.equal(left, right) for left, right in zip(weights, resumed, strict=True))


def test_a_later_run_with_the_same_data_has_all_levels_again(make_module, make_trainer):
    data, record = PromptDataModule(ROWS, batch_size=2), Steps()
    for callbacks in ([Curriculum(), record], [record]):
        make_trainer(max_steps=6, callbacks=callbacks, enable_checkpointing=False).fit(make_module(), data)
    assert record.levels[:6] == [{0}] * 6
    assert set().union(*record.levels[6:]) == {0, 1, 2}


def test_a_metric_that_rollouts_lack_and_rows_without_levels(run):
    with pytest.raises(ValueError, match=r"Curriculum.metric is 'rewards/exact'; rollouts have \['completions"):
        run(1, curriculum={"metric": "rewards/exact"})
    with pytest.raises(ValueError, match="train, row 0: column 'stage' is None"):
        run(1, curriculum={"column": "stage"})
