"""Whole short runs of PPO and GROUP PPO: every critic, group sizes, sharing, precision."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
from helpers.sweeps import sweep, sweep_pairs

from pl_grouprl.algorithms import PPO, GroupPPO, OptimizerConfig
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.models.critic import LoRACritic

CRITICS = {
    "copy": PolicyCopyCritic(head_std=0.1),
    "shared": SharedTrunkCritic(head_std=0.1),
    "shared, detached": SharedTrunkCritic(detach=True, head_std=0.1),
    "lora": LoRACritic(r=4, head_std=0.1),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of a causal language model and of a reward model, as transformers writes them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

    shape = {
        "vocab_size": len(digit_tokenizer()), "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 64,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("critics")
    with torch.random.fork_rng():
        torch.manual_seed(3)
        Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder / "causal")
        model = Qwen3ForSequenceClassification(Qwen3Config(**shape, num_labels=1, pad_token_id=0))
        model.score.weight.data.normal_(std=0.5)
        model.save_pretrained(folder / "classifier")
    return {"causal": str(folder / "causal"), "classifier": str(folder / "classifier"), "head": model.score.weight.data}


def flat(module, part):
    return torch.cat([p.detach().flatten().float() for p in getattr(module, part).parameters() if p.requires_grad])


def largest(left, right):
    return (left - right).abs().max().item()


@pytest.mark.parametrize(
    ("critic", "num_generations"),
    sweep_pairs(
        itertools.product([*CRITICS, "causal", "classifier"], [1, 4]),
        quick=[("copy", 1), ("shared", 4), ("shared, detached", 1), ("lora", 4), ("causal", 1), ("classifier", 4)],
    ),
)
def test_every_critic_trains(make_module, make_data, make_trainer, history, saved, critic, num_generations):
    source = CRITICS.get(critic) or saved[critic]
    if isinstance(source, str) and num_generations == 4:
        source = PretrainedCritic(source)  # the same as its path
    runs, records = {}, {}
    for sharing in ("shared", "repeated"):
        module = make_module(
            PPO, critic=source, num_generations=num_generations,
            sharing={"mode": sharing, "verify": sharing == "shared"}, num_iterations=2, num_mini_batches=2,
            optimizer=OptimizerConfig(learning_rate=1e-3),
        )  # fmt: skip
        module.configure_model()
        start = {part: flat(module, part) for part in ("policy", "critic")}
        records[sharing] = history()
        make_trainer(max_steps=5, callbacks=[records[sharing]]).fit(module, make_data())
        runs[sharing] = {part: flat(module, part) for part in ("policy", "critic")}
        for part, weights in start.items():
            assert largest(runs[sharing][part], weights) > 1e-4, part
    for part in runs["shared"]:
        # AdamW turns a gradient near 0 into a step of up to the learning rate, so it is the mean that is compared.
        assert (runs["shared"][part] - runs["repeated"][part]).abs().mean() < 1e-5
    for left, right in zip(records["shared"].steps, records["repeated"].steps, strict=True):
        for name in ("loss", "value/loss", "value/explained_variance", "grad_norm/critic"):
            assert left[name] == pytest.approx(right[name], abs=2e-4, rel=1e-3), name


def test_the_head_of_a_reward_model_becomes_the_value_head(make_module, saved):
    module = make_module(PPO, critic=saved["classifier"])
    module.configure_model()
    assert torch.equal(module.critic.head.weight, saved["head"])
    plain = make_module(PPO, critic=saved["causal"])
    plain.configure_model()
    assert plain.critic.head.weight.std() < 0.01


def test_a_copy_of_the_policy_is_the_default(make_module):
    module = make_module(PPO)
    module.configure_model()
    critic = module.critic
    assert not critic.shares_trunk
    assert all(
        torch.equal(a, b) for a, b in zip(critic.trunk.parameters(), module.policy.model.parameters(), strict=True)
    )
    module.configure_model()
    assert module.critic is critic


@pytest.mark.parametrize(
    ("cls", "critic", "precision"),
    sweep_pairs(
        itertools.product([PPO, GroupPPO], CRITICS, ["bf16-true", "bf16-mixed"]),
        quick=[
            (PPO, "copy", "bf16-mixed"),
            (PPO, "shared, detached", "bf16-true"),
            (GroupPPO, "shared", "bf16-mixed"),
            (GroupPPO, "lora", "bf16-true"),
        ],
    ),
)
def test_bf16(make_module, make_data, make_trainer, history, cls, critic, precision):
    record = history()
    module = make_module(
        cls,
        critic=CRITICS[critic],
        num_iterations=2,
        num_mini_batches=2,
        beta=0.1,
        kl={"place": "reward"},
        sharing={"verify": True},
    )
    make_trainer(max_steps=4, precision=precision, callbacks=[record]).fit(module, make_data())
    assert module.policy.dtype == (torch.bfloat16 if precision == "bf16-true" else torch.float32)
    for name in ("advantages", "values", "returns", "old_logprobs"):
        assert module.last_rollouts.tokens[name][0].dtype == torch.float32, name
    for step in record.steps:
        assert math.isfinite(step["loss"])
        assert step["grad_norm/policy"] > 0
        assert step["grad_norm/critic"] > 0


@pytest.mark.parametrize("cls", sweep([PPO, GroupPPO], quick=[GroupPPO]))
def test_sharing_changes_nothing_over_many_updates(make_module, make_data, make_trainer, history, cls):
    losses = {}
    for sharing in ("shared", "repeated"):
        record = history()
        module = make_module(
            cls, critic=PolicyCopyCritic(head_std=0.1), sharing={"mode": sharing}, num_iterations=2, num_mini_batches=2,
            optimizer=OptimizerConfig(learning_rate=1e-4), beta=0.05,
        )  # fmt: skip
        make_trainer(max_steps=12, callbacks=[record], precision="64-true").fit(module, make_data())
        losses[sharing] = [(step["loss"], step["value/loss"]) for step in record.steps]
        ratio = record.steps[-1]["prefix/token_ratio"]
        assert (ratio > 2) if sharing == "shared" else (ratio <= 1)
    for left, right in zip(losses["shared"], losses["repeated"], strict=True):
        assert left == pytest.approx(right, abs=1e-5)


def test_the_critic_learns_a_constant_reward(make_module, make_data, make_trainer, history):
    # All rewards 1, gamma and critic_lam 1: every return is 1, whatever the policy does.
    record = history()
    module = make_module(
        PPO, rewards=lambda completions, **columns: [1.0] * len(completions), critic_lam=1.0, cliprange_value=None,
        critic_optimizer=OptimizerConfig(learning_rate=3e-2), optimizer=OptimizerConfig(learning_rate=0.0),
    )  # fmt: skip
    make_trainer(max_steps=24, callbacks=[record]).fit(module, make_data())
    assert record.steps[0]["value/loss"] == pytest.approx(0.5, abs=0.02)  # values near 0: (0 - 1)^2 / 2
    assert record.steps[-1]["value/loss"] < 0.01
    assert "value/explained_variance" not in record.steps[-1]  # nothing varies that could be explained


def test_the_policy_learns(make_module, make_data, make_trainer, history):
    # Letters are rewarded; a random policy writes about 60 % of them.
    for cls in (PPO, GroupPPO):
        record = history()
        module = make_module(cls, num_generations=8, optimizer=OptimizerConfig(learning_rate=1e-2))
        make_trainer(max_steps=20, callbacks=[record]).fit(module, make_data())
        rewards = [step["reward"] for step in record.steps]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.2


def test_lora_critic_follows_the_policy_and_leaves_it_alone(make_module, make_data, make_trainer):
    module = make_module(PPO, critic=CRITICS["lora"], optimizer=OptimizerConfig(learning_rate=1e-2))
    make_trainer(max_steps=3).fit(module, make_data())
    theirs = dict(module.policy.model.named_parameters())
    tied = dict(module.critic.trunk.named_parameters())
    assert module.critic.tied
    for name, source in module.critic.tied.items():
        assert tied[name].data_ptr() == theirs[source].data_ptr()
        assert tied[name].grad is None
    alone = make_module(PPO, critic=CRITICS["lora"], critic_warmup_steps=3)
    alone.configure_model()
    start = copy.deepcopy(alone.policy.state_dict())
    make_trainer(max_steps=3).fit(alone, make_data())
    assert all(torch.equal(value, start[name]) for name, value in alone.policy.state_dict().items())
