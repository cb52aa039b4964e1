"""GRPO, PPO and GROUP PPO on branching rollouts: groups of different sizes, in any batch, rank or resumed run."""

import pytest
import torch
from conftest import TinyPolicy, share_of_letters
from helpers.chance_episodes import STOPS, ChancePolicy, chance_rows, double, register_chance_calls
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from pl_grouprl.algorithms import GRPO, PPO, GroupPPO, OptimizerConfig
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo import MostFrequentDigit
from pl_grouprl.types import SamplingConfig

EVERY_2 = {"points": "every_n", "width": 2, "depth": 2, "every_n": 2}


def make(cls=GRPO, branching=EVERY_2, **options):
    defaults = {
        "num_generations": 2,
        "sampling": SamplingConfig(max_new_tokens=6),
        "optimizer": OptimizerConfig(1e-2, eps=1e-4),
        "num_mini_batches": 2,
        "verify": False,
    }
    return cls(TinyPolicy(), share_of_letters, branching=branching, **(defaults | options))


def data(**options):
    task = MostFrequentDigit(prompt_length=20, majority_share=0.4, train_size=12, val_size=2)
    return PromptDataModule(task, task, **({"batch_size": 4} | options))


class Record(Callback):
    def __init__(self):
        self.groups, self.metrics, self.validated = [], [], []

    def on_train_batch_end(self, trainer, module, *_):
        self.groups.append([list(group.rollouts) for group in module.last_rollouts.groups])
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer, module, outputs, *_):
        self.validated += outputs["groups"]


def fit(module, tmp_path, *callbacks, prompts=None, ckpt_path=None, **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0}
    defaults = {"max_steps": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **quiet}
    record = Record()
    trainer = Trainer(callbacks=[record, *callbacks], **(defaults | options))
    trainer.fit(module, prompts or data(), ckpt_path=ckpt_path, weights_only=None if ckpt_path is None else True)
    return record


def weights(module):
    return torch.cat([weight.detach().flatten() for weight in module.parameters()])


@pytest.mark.parametrize("cls", [GRPO, PPO, GroupPPO])
def test_two_steps(cls, tmp_path):
    before = weights_of_a_new(cls)
    module = make(cls)
    record = fit(module, tmp_path, limit_val_batches=0)
    groups, metrics = record.groups[0], record.metrics[0]
    sizes = [len(rollouts) for rollouts in groups]
    assert len(set(sizes)) > 1
    assert metrics["branching/leaves"] == sum(sizes) / len(sizes)
    lengths = sum(len(rollout.token_ids) for rollouts in groups for rollout in rollouts)
    assert metrics["completions/mean_length"] == pytest.approx(lengths / sum(sizes))
    sampled = metrics["branching/sampled_tokens"] * len(sizes)
    assert metrics["branching/token_ratio"] == pytest.approx(lengths / sampled)
    assert lengths > sampled
    assert len(weights(module)) >= len(before)
    assert not torch.equal(weights(module)[: len(before)], before)


def weights_of_a_new(cls):
    return torch.cat([weight.detach().flatten() for weight in TinyPolicy().load().parameters()])


def test_options_that_make_groups_differ_otherwise(tmp_path):
    """One root; prompts replaced; sampling ahead; a token budget; validation, which does not branch."""
    one_root = {"num_generations": 1, "dynamic_sampling": True, "max_tokens_per_micro_batch": 60, "num_mini_batches": 1}
    ahead = {"rollout_ahead": 1, "importance_sampling": "token_truncate"}
    module = make(branching={"points": "entropy", "width": 3, "depth": 2}, val_num_generations=2, **one_root, **ahead)
    assert module.max_rollouts == 5
    record = fit(module, tmp_path, limit_val_batches=1)
    assert all(len(rollouts) > 1 for rollouts in record.groups[0])  # the others have nothing to compare
    assert [len(group.rollouts) for group in record.validated] == [2, 2]
    assert all(rollout.branch_path == () for group in record.validated for rollout in group.rollouts)


@pytest.mark.parametrize("options", [{}, {"rollout_ahead": 1, "importance_sampling": "token_truncate"}])
def test_a_resumed_run_continues_to_the_bit(options, tmp_path):
    def run(folder, ckpt_path=None):
        saved = ModelCheckpoint(dirpath=tmp_path / folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        module = make(**options)
        record = fit(module, tmp_path, saved, max_steps=4, ckpt_path=ckpt_path, limit_val_batches=0)
        return weights(module), record.groups

    whole, groups = run("whole")
    resumed, more = run("resumed", tmp_path / "whole" / "step=1.ckpt")  # between two updates of a batch
    assert torch.equal(whole, resumed)
    assert more == groups[1:]
    assert any(rollout.branch_points for rollouts in more[0] for rollout in rollouts)


def test_a_run_is_not_resumed_with_other_branch_points(tmp_path):
    saved = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    fit(make(), tmp_path, saved, limit_val_batches=0)
    with pytest.raises(ValueError, match=r"branching"):
        fit(make(branching=EVERY_2 | {"width": 3}), tmp_path, ckpt_path=tmp_path / "step=2.ckpt", max_steps=3)


def test_episodes(tmp_path, monkeypatch):
    monkeypatch.setattr("pl_grouprl.chat.families._PARSERS", [])
    register_chance_calls()
    module = GRPO(
        ChancePolicy(eos_token_id=1),
        lambda completions, **columns: [float(len(own)) for own in completions],
        tools=[double],
        num_generations=2,
        branching={"points": "turn", "width": 2},
        sampling=SamplingConfig(max_new_tokens=30, stop_token_ids=STOPS),
        max_turn_tokens=12,
        max_episode_tokens=100,
        verify=False,
    )
    record = fit(module, tmp_path, prompts=PromptDataModule(chance_rows(4), batch_size=2))
    assert {len(rollout.branch_points) for rollouts in record.groups[0] for rollout in rollouts} == {0, 1}
    assert record.metrics[0]["branching/token_ratio"] > 1
    assert record.metrics[0]["episode/turns"] > 1


def test_options_of_a_run():
    with pytest.raises(ValueError, match="Branching.budget is 3, but the 2 roots alone may take 12 tokens"):
        make(branching=EVERY_2 | {"budget": 3})
    with pytest.raises(ValueError, match="every_n is None with points='every_n'"):
        make(branching={"points": "every_n"})
    with pytest.raises(ValueError, match="GRPO.branching"):
        make(branching="turn")
    with pytest.raises(ValueError, match=r"num_generations is 1; .*compares the rollouts"):
        make(branching=None, num_generations=1)
