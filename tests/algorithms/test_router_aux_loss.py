"""The routers' loss in GRPO and PPO: the same for shared and repeated prompts, and transformers' own number."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from helpers.rollouts import mini_batch
from helpers.versions import needs

from pl_grouprl.algorithms import GRPO, PPO, OptimizerConfig
from pl_grouprl.attention import shared_prefix
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import SharedTrunkCritic, score
from pl_grouprl.models.score import record_router_logits, router_balancing_loss
from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup

COEF = 0.5
GROUPS = [
    RolloutGroup([3, 4, 5, 6, 7], [Rollout([8, 9]), Rollout([]), Rollout([10, 11, 12])]),
    RolloutGroup([9, 8, 7], [Rollout([6])]),
]


class MixturePolicy:
    """The same random mixture of experts each time: 2 of 4 experts in each of 2 layers."""

    def __init__(self, checkpointing: bool = False, reentrant: bool = False, model_type: str = "qwen3_moe") -> None:
        self.checkpointing = checkpointing
        self.reentrant = reentrant
        self.model_type = model_type

    def load(self):
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(
            self.model_type, vocab_size=len(digit_tokenizer()), hidden_size=32, intermediate_size=48,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64,
            num_experts=4, num_local_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            initializer_range=0.1, eos_token_id=1, pad_token_id=0,
        )  # fmt: skip
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config)
        if self.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": self.reentrant})
        return model

    def load_tokenizer(self):
        return digit_tokenizer()


def own_loss(model, groups):
    """Transformers' load-balancing loss of the padded rows."""
    inputs = pack(groups, "repeated").model_inputs
    return model(**inputs, output_router_logits=True, use_cache=False).aux_loss


@pytest.fixture
def fit(make_module, make_data, make_trainer, ragged_engine, history):
    """One optimizer step; returns the history and the module."""

    def run(coef, sharing="shared", cls=GRPO, policy=None, num_mini_batches=1, max_steps=1, **kwargs):
        seen = history(keep_tensors=True)
        module = make_module(
            cls=cls, policy=policy or MixturePolicy(), engine=ragged_engine(), sharing={"mode": sharing},
            router_aux_loss_coef=coef, num_mini_batches=num_mini_batches,
            optimizer=OptimizerConfig(learning_rate=1e-3), **kwargs,
        )  # fmt: skip
        trainer = make_trainer(max_steps=max_steps, accumulate_grad_batches=num_mini_batches, callbacks=[seen])
        trainer.fit(module, make_data())
        return seen, module

    return run


def assert_same_gradients(left, right, tolerance=1e-4):
    assert left.keys() == right.keys()
    largest = max(g.norm() for g in right.values() if g is not None)
    for name, gradient in left.items():
        if gradient is not None:
            assert (gradient - right[name]).norm() <= tolerance * max(right[name].norm(), 1e-2 * largest), name


@pytest.mark.parametrize("checkpointing", [False, True])
def test_shared_and_repeated_prompts_give_the_same_loss_and_gradients(fit, checkpointing):
    runs = [fit(COEF, sharing, policy=MixturePolicy(checkpointing))[0] for sharing in ("shared", "repeated")]
    shared, repeated = (run.steps[0] for run in runs)
    assert shared["prefix/token_ratio"] > 1.2
    assert shared["policy/router_aux_loss"] > 2.01  # 2 is balanced
    for name in ("policy/router_aux_loss", "loss"):
        assert shared[name] == pytest.approx(repeated[name], rel=1e-5), name
    assert_same_gradients(runs[0].gradients[0], runs[1].gradients[0])


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
@pytest.mark.parametrize(
    "model_type", ["qwen3_moe", "mixtral", "gpt_oss", pytest.param("granitemoe", marks=needs("transformers", "5.21"))]
)
def test_it_is_transformers_loss_of_the_repeated_rows(model_type, sharing):
    model = MixturePolicy(model_type=model_type).load()
    expected = own_loss(model, GROUPS)
    batch = pack(GROUPS, sharing)
    with shared_prefix(model) if sharing == "shared" else nullcontext():
        with record_router_logits(model) as recorded:
            score(model, batch)
        actual = router_balancing_loss(model, batch, recorded)
        gradients = torch.autograd.grad(actual, list(model.parameters()), allow_unused=True)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=0)
    names = [name for name, _ in model.named_parameters()]
    theirs = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    assert any(gradient is not None and gradient.norm() > 0 for gradient in theirs)
    assert_same_gradients(dict(zip(names, gradients, strict=True)), dict(zip(names, theirs, strict=True)))


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_mini_batches_are_weighted_by_their_share_of_the_loss(fit, sharing):
    (with_loss, module), (without, _) = (fit(coef, sharing, num_mini_batches=2) for coef in (COEF, 0.0))
    model = MixturePolicy().load().train()
    parts = [mini_batch(module.last_rollouts, index) for index in range(2)]
    counts = [int(tokens["loss_mask"].sum()) for _, tokens in parts]
    assert counts[0] != counts[1]
    losses = [own_loss(model, groups) for groups, _ in parts]
    for step, loss in zip(with_loss.steps, losses, strict=True):
        assert step["policy/router_aux_loss"] == pytest.approx(loss.item(), rel=1e-5)
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    (COEF * mean).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    last = [run.gradients[-1] for run in (with_loss, without)]
    actual = {name: last[0][f"policy.{name}"] - last[1][f"policy.{name}"] for name in expected}
    assert_same_gradients(actual, expected, tolerance=1e-3)


def test_without_the_option_nothing_is_recorded(fit, monkeypatch):
    from pl_grouprl.training import objective

    monkeypatch.setattr(objective, "record_router_logits", None)
    seen, _ = fit(0.0)
    assert "policy/router_aux_loss" not in seen.steps[0]


def test_it_balances_the_experts(fit):
    seen, _ = fit(10.0, max_steps=5)
    values = [step["policy/router_aux_loss"] for step in seen.steps]
    assert values[-1] < values[0] - 0.02


@pytest.mark.parametrize("critic", [None, SharedTrunkCritic(head_std=0.1)])
def test_ppo_has_it_too_but_not_while_the_critic_warms_up(fit, critic):
    seen, _ = fit(COEF, cls=PPO, critic=critic, critic_warmup_steps=1, max_steps=2)
    assert "policy/router_aux_loss" not in seen.steps[0]
    assert seen.steps[1]["policy/router_aux_loss"] > 2
    repeated, _ = fit(COEF, "repeated", cls=PPO, critic=critic, critic_warmup_steps=1, max_steps=2)
    for name in ("policy/router_aux_loss", "loss"):
        assert seen.steps[1][name] == pytest.approx(repeated.steps[1][name], rel=1e-4), name


def test_a_policy_without_routers_is_refused(make_module, make_data, make_trainer):
    module = make_module(router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef=0.01 for a policy of model type 'qwen3'"):
        make_trainer(max_steps=1).fit(module, make_data())


def test_routers_that_choose_by_a_correction_bias_are_refused(make_module):
    module = make_module(policy=MixturePolicy(model_type="minimax_m2"), router_aux_loss_coef=0.01)
    with pytest.raises(ValueError, match="model type 'minimax_m2': its routers choose by a correction bias"):
        module.configure_model()


def test_out_of_range_is_refused(make_module):
    for value in (-0.1, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="router_aux_loss_coef is"):
            make_module(router_aux_loss_coef=value)


def test_reentrant_checkpointing_is_refused(fit):
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        fit(COEF, "repeated", policy=MixturePolicy(checkpointing=True, reentrant=True))


def test_recording_leaves_the_model_as_it_was():
    model = MixturePolicy().load()
    inputs = pack(GROUPS, "repeated").model_inputs
    before = len(model.model._forward_hooks), len(model.model._forward_pre_hooks)
    with pytest.raises(KeyError), record_router_logits(model):
        raise KeyError
    assert (len(model.model._forward_hooks), len(model.model._forward_pre_hooks)) == before
    assert model.model(**inputs).get("router_logits") is None
    with pytest.raises(RuntimeError, match="the recorded router logits"):
        router_balancing_loss(model, pack(GROUPS), [])
