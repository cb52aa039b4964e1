"""Rewards, engines, callbacks and overrides that change what they are handed: the run is the same, bit for bit."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.worker_rewards import ruin
from lightning.pytorch import Callback

from pl_grouprl.algorithms import GRPO
from pl_grouprl.data import PromptDataModule
from pl_grouprl.demo.tasks import digit_tokenizer

ROWS = [{"prompt": str(11 * n), "answer": "one", "extra_info": {"tags": [n]}} for n in range(10, 18)]


class RuinsBatches(Callback):
    """Ruins the prompts of a batch once the module has used them."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        for prompt in batch.prompts:
            ruin([prompt.token_ids, prompt.columns])


class RuinsOutputs(Callback):
    """Ruins what validation hands to callbacks."""

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        for group in outputs["groups"]:
            ruin([group.prompt_ids, group.columns, *(rollout.token_ids for rollout in group.rollouts)])


class RuinsGroups(GRPO):
    """Ruins the groups from which it computes advantages."""

    def compute_advantages(self, groups):
        advantages = super().compute_advantages(groups)
        for group in groups:
            ruin([group.prompt_ids, group.columns, *(rollout.token_ids for rollout in group.rollouts)])
        return advantages


class RuinsPrompts:
    """An engine that changes the prompts that it was given."""

    def __init__(self, engine):
        self.engine = engine

    def bind(self, model, tokenizer=None):
        pass

    def generate(self, prompts, sampling, *, num_generations, seed):
        rollouts = self.engine.generate(copy.deepcopy(prompts), sampling, num_generations=num_generations, seed=seed)
        ruin(prompts)
        return rollouts


def letters(completions, completion_ids, prompts, **columns):
    return [sum(c.isalpha() for c in text) / max(len(text), 1) for text in completions]


def ruins_arguments(completions, completion_ids, prompts, **columns):
    rewards = letters(completions, completion_ids, prompts)
    ruin([completions, completion_ids, prompts, columns])
    return rewards


def plain(engine):
    return {"engine": engine}, GRPO, letters, []


CASES = {
    "reward": lambda engine: ({"engine": engine}, GRPO, ruins_arguments, []),
    "engine": lambda engine: ({"engine": RuinsPrompts(engine)}, GRPO, letters, []),
    "callback, batches": lambda engine: ({"engine": engine}, GRPO, letters, [RuinsBatches()]),
    "callback, outputs": lambda engine: ({"engine": engine}, GRPO, letters, [RuinsOutputs()]),
    "compute_advantages": lambda engine: ({"engine": engine}, RuinsGroups, letters, []),
}


@pytest.fixture
def run(make_module, make_trainer, scripted_engine, parameters):
    """Two epochs with validation; returns the weights and the prompts of the data set."""

    def run(case):
        options, cls, reward, callbacks = case(scripted_engine)
        data = PromptDataModule(ROWS, ROWS[:2], batch_size=4, tokenizer=digit_tokenizer())
        module = make_module(cls=cls, rewards=reward, num_mini_batches=2, **options)
        trainer = make_trainer(max_epochs=2, callbacks=callbacks, enable_checkpointing=False)
        trainer.fit(module, data)
        return parameters(module), [vars(prompt) for split in ("train", "val") for prompt in data.prompts[split]]

    return run


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_training_and_data_are_those_of_a_run_that_changes_nothing(run, case):
    weights, prompts = run(plain)
    ruined_weights, ruined_prompts = run(case)
    assert ruined_prompts == prompts
    assert all(torch.equal(a, b) for a, b in zip(weights, ruined_weights, strict=True))
