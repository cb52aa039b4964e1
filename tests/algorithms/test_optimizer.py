from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import nn

from pl_grouprl.algorithms import PPO
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.training.checks import check_quantized
from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer


def test_schedules_by_hand():
    linear = OptimizerConfig(warmup_steps=1, schedule="linear", final_fraction=0.2)
    # Half the rate in the one step of warm-up, then from 1 to 0.2 over the 4 steps that are left.
    factors = [linear.learning_rate_factor(step, 5) for step in range(7)]
    assert factors == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2])
    cosine = OptimizerConfig(schedule="cosine")
    assert [cosine.learning_rate_factor(step, 4) for step in (0, 2, 4)] == pytest.approx([1.0, 0.5, 0.0])
    assert OptimizerConfig().learning_rate_factor(10**6, math.inf) == 1.0


def test_groups_have_names_rates_and_decay():
    policy, critic = nn.Linear(2, 2), nn.Linear(2, 1, bias=False)
    made = build_optimizer(
        {"policy": (policy, OptimizerConfig(1e-3, weight_decay=0.1)), "critic": (critic, OptimizerConfig(1e-2))},
        lambda: pytest.fail("no schedule needs the length of the run"),
    )
    groups = {g["name"]: (g["params"], g["initial_lr"], g["weight_decay"]) for g in made["optimizer"].param_groups}
    assert groups == {
        "policy": ([policy.weight], 1e-3, 0.1),
        "policy_no_decay": ([policy.bias], 1e-3, 0.0),
        "critic": ([critic.weight], 1e-2, 0.0),
    }
    assert made["lr_scheduler"]["interval"] == "step"


def test_each_part_has_its_schedule():
    parts = {
        "policy": (nn.Linear(1, 1), OptimizerConfig(1.0, schedule="linear")),
        "critic": (nn.Linear(1, 1), OptimizerConfig(1.0)),
    }
    made = build_optimizer(parts, lambda: 4)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    assert [group["lr"] for group in made["optimizer"].param_groups] == [0.75, 1.0]


def test_a_schedule_needs_an_end():
    with pytest.raises(ValueError, match="the run has no end; set max_steps or max_epochs"):
        build_optimizer({"policy": (nn.Linear(1, 1), OptimizerConfig(schedule="cosine"))}, lambda: math.inf)


@pytest.mark.parametrize(
    "options", [{"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"learning_rate": float("inf")}, {"max_grad_norm": 0.0}]
)
def test_options_out_of_range(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"OptimizerConfig\.{name} is .*; it must be "):
        OptimizerConfig(**options)


class Net(nn.Module):
    """Embeddings, matrices, vectors, and a head with a single row."""

    def __init__(self):
        super().__init__()
        self.embedding, self.up, self.down = nn.Embedding(10, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 1, bias=False)

    def forward(self, ids):
        return self.head(self.norm(self.down(self.up(self.embedding(ids)).tanh())))


def step(module, optimizer, times=1):
    for _ in range(times):
        module.zero_grad()
        module(torch.arange(10)).sub(1).square().mean().backward()
        optimizer.step()


def test_any_class_trains_with_its_options():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net()
    expected = copy.deepcopy(module)
    config = OptimizerConfig(0.1, weight_decay=0.1, optim="torch.optim.SGD", optim_args={"momentum": 0.5})
    optimizer = build_optimizer({"policy": (module, config)}, lambda: 0)["optimizer"]
    matrices = [p for p in expected.parameters() if p.ndim > 1]
    vectors = [p for p in expected.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    step(module, optimizer, 3)
    step(expected, torch.optim.SGD(groups, 0.1, momentum=0.5), 3)
    assert type(optimizer) is torch.optim.SGD
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), expected.parameters(), strict=True))


def test_options_of_adamw_itself():
    config = OptimizerConfig(optim_args={"amsgrad": True})
    parts = {"policy": (Net(), config), "critic": (Net(), OptimizerConfig())}
    optimizer = build_optimizer(parts, lambda: 0)["optimizer"]
    assert type(optimizer) is torch.optim.AdamW
    assert [group["amsgrad"] for group in optimizer.param_groups] == [True, False]


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net()
    expected = copy.deepcopy(module)
    config = OptimizerConfig(0.01, weight_decay=0.1, optim="torch.optim.Muon", optim_args={"momentum": 0.9})
    made = build_optimizer({"policy": (module, config)}, lambda: 0)
    muon = torch.optim.Muon([expected.up.weight, expected.down.weight], 0.01, weight_decay=0.1, momentum=0.9)
    vectors = [p for p in expected.parameters() if p.ndim == 1]
    rest = [{"params": [expected.embedding.weight, expected.head.weight]}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(rest, 0.01, weight_decay=0.1)
    for _ in range(3):
        step(module, made["optimizer"])
        step(expected, muon)
        adamw.step()  # with the same gradients
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), expected.parameters(), strict=True))
    assert [group["name"] for group in made["optimizer"].param_groups] == [
        "policy_embeddings", "policy_others", "policy_no_decay", "policy",
    ]  # fmt: skip


def test_schedules_reach_each_of_several_optimizers():
    parts = {
        "policy": (nn.Linear(2, 2, bias=False), OptimizerConfig(1.0, schedule="linear", optim="torch.optim.SGD")),
        "critic": (nn.Linear(2, 2, bias=False), OptimizerConfig(1.0)),
    }
    made = build_optimizer(parts, lambda: 4)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    rates = {group["name"]: group["lr"] for own in made["optimizer"].optimizers for group in own.param_groups}
    assert rates == {"policy": 0.75, "critic": 1.0}


def test_several_optimizers_are_copied_as_one(tiny_policy):
    made = build_optimizer({"policy": (tiny_policy().load(), OptimizerConfig(optim="torch.optim.Muon"))}, lambda: 0)
    copied = copy.deepcopy(made["optimizer"])
    groups = [group for own in copied.optimizers for group in own.param_groups]
    assert all(group is own for group, own in zip(groups, copied.param_groups, strict=True))
    assert all(own.state is copied.state for own in copied.optimizers)


def test_an_output_head_is_left_to_adamw(tiny_policy):
    made = build_optimizer({"policy": (tiny_policy().load(), OptimizerConfig(optim="torch.optim.Muon"))}, lambda: 0)
    groups = {group["name"]: group["params"] for group in made["optimizer"].param_groups}
    assert len(groups["policy_embeddings"]) == 2  # the head is not tied
    assert len(groups["policy"]) == 2 * 7  # linear layers of two decoder layers
    assert {p.ndim for p in groups["policy_no_decay"]} == {1}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"optim": "torch.optim.SGD", "optim_args": {"momentun": 1}}, "optim_args has 'momentun'"),
        ({"optim": "torch.optim.SGD", "optim_args": {"lr": 1}}, "optim_args has 'lr'"),
        ({"optim_args": {"betas": (0.9, 0.9)}}, "optim_args has 'betas'"),
        ({"optim": "torch.optim.SGD", "betas": (0.9, 0.9)}, "betas is"),
        ({"optim": "torch.optim.Rprop", "weight_decay": 0.1}, "weight_decay is"),
        ({"optim": "torch.optim.Muon", "state_bits": 8}, "state_bits is 8"),
    ],
)
def test_optimizers_that_are_refused(options, error):
    with pytest.raises(ValueError, match=error):
        OptimizerConfig(**options)


def saving(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(
    "config",
    [
        OptimizerConfig(1e-2, optim="torch.optim.SGD", optim_args={"momentum": 0.9}),
        OptimizerConfig(1e-2, weight_decay=0.1, schedule="linear", max_grad_norm=1.0, optim="torch.optim.Muon"),
    ],
    ids=["SGD", "Muon"],
)
def test_a_resumed_run_is_exact(config, make_module, make_data, make_trainer, tmp_path):
    """The critic has AdamW, the policy another class."""

    def fit(checkpoint=None, callbacks=()):
        module = make_module(PPO, num_mini_batches=2, optimizer=config, critic_optimizer=OptimizerConfig(1e-2))
        trainer = make_trainer(max_steps=4, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        return dict(module.named_parameters()), trainer.optimizers[0].state_dict()["state"]

    whole, states = fit(callbacks=[saving(tmp_path)])
    resumed, again = fit(tmp_path / "step=2.ckpt")
    assert any("momentum_buffer" in own for own in states.values())
    assert any("exp_avg" in own for own in states.values())
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    for number, own in states.items():
        assert all(torch.equal(value, again[number][name]) for name, value in own.items())
    with pytest.raises(ValueError, match=r"optimizer\.optim is 'torch\.optim\.AdamW' \(was 'torch.optim"):
        make_trainer(max_steps=4).fit(
            make_module(
                PPO, num_mini_batches=2, optimizer=OptimizerConfig(1e-2), guards={"allow_changed": ["optimizer"]}
            ),
            make_data(train_size=8),
            ckpt_path=tmp_path / "step=2.ckpt",
            weights_only=True,
        )


def test_muon_trains_an_adapter_alone(make_module, make_data, make_trainer, tiny_policy):
    """All of LoRA's weights are matrices, so there is no second optimizer."""
    pytest.importorskip("peft")
    loaded = LoRAAdapter(r=4).add_to(tiny_policy().load())
    policy = SimpleNamespace(load=lambda: loaded, load_tokenizer=digit_tokenizer)
    start = {name: p.clone() for name, p in loaded.named_parameters()}
    trainer = make_trainer(max_steps=2)
    trainer.fit(make_module(policy=policy, optimizer=OptimizerConfig(1e-2, optim="torch.optim.Muon")), make_data())
    assert type(trainer.optimizers[0]) is torch.optim.Muon
    moved = {name for name, p in loaded.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if "lora_" in name}


@pytest.mark.slow
def test_a_run_with_moments_of_8_bits_of_torchao_resumes_exactly(
    make_module, make_data, make_trainer, tiny_policy, tmp_path, monkeypatch
):
    pytest.importorskip("torchao")
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torchao compiles its step, which sets it
    config = OptimizerConfig(1e-2, optim="torchao.optim.AdamW8bit", optim_args={"block_size": 64})

    def fit(checkpoint=None, callbacks=()):
        module = make_module(policy=tiny_policy(hidden_size=64), optimizer=config)
        trainer = make_trainer(max_steps=2, callbacks=list(callbacks))
        trainer.fit(module, make_data(), ckpt_path=checkpoint, weights_only=True)
        return dict(module.named_parameters()), trainer.optimizers[0]

    safe = SafeCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole, optimizer = fit(callbacks=[safe])
    resumed, _ = fit(tmp_path / "step=1.ckpt", [SafeCheckpoint(dirpath=tmp_path / "again")])
    assert "OptimState8bit" in {type(own["exp_avg"]).__name__ for own in optimizer.state.values()}
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())


@pytest.mark.parametrize(("strategy", "works"), [(ModelParallelStrategy, True), (FSDPStrategy, False)])
def test_strategies_that_flatten_weights_are_refused(make_module, monkeypatch, strategy, works):
    module = make_module(optimizer=OptimizerConfig(optim="torch.optim.Muon"))
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(trainer.strategy, "__class__", strategy)
    module.trainer = trainer
    with nullcontext() if works else pytest.raises(ValueError, match=r"optim is torch\.optim\.Muon under FSDP"):
        check_quantized(module)


def test_adamw_is_fused_as_asked_unless_its_own_options_choose():
    layer = torch.nn.Linear(2, 2)

    def group(**options):
        parts = {"policy": (layer, OptimizerConfig(**options))}
        return build_optimizer(parts, lambda: 1, fused=True)["optimizer"].param_groups[0]

    assert group()["fused"] is True
    chosen = group(optim_args={"foreach": True})
    assert (chosen["fused"], chosen["foreach"]) == (None, True)
