"""What is asked of a strategy, on one device; and what each strategy refuses before anything is loaded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn

from pl_grouprl import GRPO, PPO
from pl_grouprl.distributed.strategies import FSDP1Support, FSDP2Support, StrategySupport, support_of
from pl_grouprl.models import LoRACritic
from pl_grouprl.models.adapters import LoRAAdapter
from pl_grouprl.models.policy import PretrainedPolicy


def reward(completions, **columns):
    return [0.0 for _ in completions]


def with_gradient(values):
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


@pytest.fixture
def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=16, num_hidden_layers=2, **sizes))


@pytest.fixture
def parameters():
    return [with_gradient([3.0, 0.0]), with_gradient([4.0]), nn.Parameter(torch.ones(2))]


def test_gradients_are_those_of_the_parameters(parameters):
    support = StrategySupport(None)
    assert support.norm(parameters) == 5
    support.scale(parameters, 0.5)
    support.clamp(parameters, 1.75)
    assert [p.grad.tolist() if p.grad is not None else None for p in parameters] == [[1.5, 0.0], [1.75], None]
    support.skip_in_next_step(parameters[:1])
    assert support.norm(parameters) == 1.75


def test_a_factor_goes_where_the_gradients_are(monkeypatch):
    factors = []
    monkeypatch.setattr(torch, "_foreach_mul_", lambda gradients, factor: factors.append(factor))
    parameter = nn.Parameter(torch.ones(2, device="meta"))
    parameter.grad = torch.ones(2, device="meta")
    StrategySupport(None).scale([parameter], torch.tensor(0.5))
    assert [factor.device.type for factor in factors] == ["meta"]


@pytest.mark.gpu
def test_offloaded_gradients_are_scaled_by_a_factor_on_the_gpu(parameters):
    StrategySupport(None).scale(parameters, torch.tensor(0.5, device="cuda"))
    assert [p.grad.tolist() for p in parameters[:2]] == [[1.5, 0.0], [2.0]]


def test_the_zero_loss_depends_on_every_trained_parameter():
    trained, frozen = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(1), requires_grad=False)
    zero = StrategySupport(None).zero_loss_over([trained, frozen])
    zero.backward()
    assert zero == 0
    assert trained.grad.tolist() == [[0, 0], [0, 0]]
    assert frozen.grad is None


def test_an_unknown_strategy_is_refused():
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    assert type(support_of(trainer)) is StrategySupport
    trainer._accelerator_connector.strategy = SimpleNamespace()
    with pytest.raises(ValueError, match="strategy is SimpleNamespace"):
        support_of(trainer)


def of_fsdp1(**options):
    return FSDP1Support(SimpleNamespace(strategy=FSDPStrategy(**options)))


def of_fsdp2(tensor_parallel=1):
    mesh = {"tensor_parallel": SimpleNamespace(size=lambda: tensor_parallel)}
    return FSDP2Support(SimpleNamespace(strategy=SimpleNamespace(device_mesh=mesh), world_size=2))


SHARDED, COMPILED = (of_fsdp1, of_fsdp2), PretrainedPolicy("gpt2", kernels="compile")


def test_fsdp1_wraps_only_decoder_layers(tiny_llama):
    module = nn.Module()
    module.policy = tiny_llama
    layers = set(tiny_llama.model.layers)
    for policy in (None, {type(next(iter(layers)))}):
        support = of_fsdp1(auto_wrap_policy=policy)
        support.shard(module)
        wraps = support.trainer.strategy.kwargs["auto_wrap_policy"]
        assert {m for m in module.modules() if wraps(module=m, recurse=False, nonwrapped_numel=0)} == layers
    with pytest.raises(ValueError, match="auto_wrap_policy"):
        of_fsdp1(auto_wrap_policy={nn.Linear}).shard(module)


@pytest.mark.parametrize(
    ("support", "module", "message"),
    [
        (of_fsdp1, lambda: GRPO("gpt2", reward, max_tokens_per_micro_batch=64), "max_tokens_per_micro_batch is 64"),
        (of_fsdp1, lambda: PPO("gpt2", reward, critic_warmup_steps=3), "critic_warmup_steps is 3"),
        (of_fsdp1, lambda: GRPO(PretrainedPolicy("gpt2", adapter=LoRAAdapter(r=2)), reward), "adapter is LoRAAdapter"),
        *((own, lambda: PPO("gpt2", reward, critic=LoRACritic()), "critic is a LoRACritic") for own in SHARDED),
        *((own, lambda: GRPO(PretrainedPolicy("gpt2", kernels="compile"), reward), "kernels") for own in SHARDED),
        (lambda: of_fsdp2(tensor_parallel=2), lambda: GRPO("gpt2", reward), "tensor_parallel_size=1"),
        (lambda: of_fsdp1(use_orig_params=False), lambda: GRPO("gpt2", reward), "use_orig_params=False"),
    ],
)
def test_what_cannot_be_sharded_is_refused(support, module, message):
    with pytest.raises(ValueError, match=message):
        support().check(module())
    for own in SHARDED:
        own().check(PPO("gpt2", reward))
