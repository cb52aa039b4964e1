"""GRPO trains with a process reward model: process supervision of its steps."""

from __future__ import annotations

import torch
from transformers import AutoModelForTokenClassification

from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.rewards import ProcessRewardModel


def test_grpo_trains_with_a_process_reward_model(make_module, make_data, make_trainer, tiny_policy):
    config = tiny_policy().load().config
    config.num_labels = 2
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForTokenClassification.from_config(config)
    reward = ProcessRewardModel(model, tokenizer=digit_tokenizer(), separator="e")
    kept = [own.detach().clone() for own in model.parameters()]
    module = make_module(rewards=reward)
    make_trainer(max_steps=2).fit(module, make_data())
    metrics = module.last_rollouts.metrics
    assert metrics["rewards/ProcessRewardModel/invalid"] == 0
    assert metrics["rewards/ProcessRewardModel/std"] > 0
    before = [own.detach() for own in tiny_policy().load().parameters()]
    after = list(module.policy.parameters())
    assert not all(map(torch.equal, before, after))
    assert all(torch.isfinite(own).all() for own in after)
    assert all(map(torch.equal, kept, model.parameters()))  # it is never trained itself
