"""Parameter groups, schedules, optimizers by name and moments of 8 bits, and that runs with them resume exactly."""

from __future__ import annotations

import copy
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from helpers.sweeps import sweep
from helpers.tiny_runs import TinyPolicy, make_module, same
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from pl_grouprl.algorithms import PPO
from pl_grouprl.callbacks import SafeCheckpoint
from pl_grouprl.demo.tasks import digit_tokenizer
from pl_grouprl.models import LoRAAdapter
from pl_grouprl.training.checks import check_quantized
from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer
from pl_grouprl.utilities import optional

EIGHT = OptimizerConfig(1e-3, weight_decay=0.1, state_bits=8)


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


@pytest.mark.parametrize("optim", ["torch.optim.AdamW", "torch.optim.SGD"])
def test_each_part_has_its_schedule(optim):
    """In one optimizer, or in one of several."""
    parts = {
        "policy": (nn.Linear(1, 1, bias=False), OptimizerConfig(1.0, schedule="linear", optim=optim)),
        "critic": (nn.Linear(1, 1, bias=False), OptimizerConfig(1.0)),
    }
    made = build_optimizer(parts, lambda: 4)
    made["optimizer"].step()
    made["lr_scheduler"]["scheduler"].step()
    own = getattr(made["optimizer"], "optimizers", [made["optimizer"]])
    assert {group["name"]: group["lr"] for one in own for group in one.param_groups} == {"policy": 0.75, "critic": 1.0}
    with pytest.raises(ValueError, match="the run has no end"):
        build_optimizer(parts, lambda: math.inf)


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


def nets():
    """The same random weights twice."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = Net()
    return module, copy.deepcopy(module)


def test_any_class_trains_with_its_options():
    module, expected = nets()
    config = OptimizerConfig(0.1, weight_decay=0.1, optim="torch.optim.SGD", optim_args={"momentum": 0.5})
    optimizer = build_optimizer({"policy": (module, config)}, lambda: 0)["optimizer"]
    matrices = [p for p in expected.parameters() if p.ndim > 1]
    vectors = [p for p in expected.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    step(module, optimizer, 3)
    step(expected, torch.optim.SGD(groups, 0.1, momentum=0.5), 3)
    assert type(optimizer) is torch.optim.SGD
    assert same(module.parameters(), expected.parameters())


def test_options_of_adamw_itself():
    def groups(fused=False, **options):
        parts = {"policy": (Net(), OptimizerConfig(**options)), "critic": (Net(), OptimizerConfig())}
        optimizer = build_optimizer(parts, lambda: 0, fused=fused)["optimizer"]
        assert type(optimizer) is torch.optim.AdamW
        return {group["name"]: group for group in optimizer.param_groups}

    own = groups(optim_args={"amsgrad": True})
    assert (own["policy"]["amsgrad"], own["critic"]["amsgrad"]) == (True, False)
    assert groups(fused=True)["policy"]["fused"] is True
    own = groups(fused=True, optim_args={"foreach": True})  # its own options choose
    assert (own["policy"]["fused"], own["policy"]["foreach"]) == (None, True)


def test_muon_trains_the_matrices_of_layers_and_adamw_the_rest():
    module, expected = nets()
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
    assert same(module.parameters(), expected.parameters())
    assert [group["name"] for group in made["optimizer"].param_groups] == [
        "policy_embeddings", "policy_others", "policy_no_decay", "policy",
    ]  # fmt: skip


def test_several_optimizers_of_a_language_model():
    made = build_optimizer({"policy": (TinyPolicy().load(), OptimizerConfig(optim="torch.optim.Muon"))}, lambda: 0)
    own = {group["name"]: group["params"] for group in made["optimizer"].param_groups}
    assert len(own["policy_embeddings"]) == 2  # the head is not tied
    assert len(own["policy"]) == 2 * 7  # linear layers of two decoder layers
    assert {p.ndim for p in own["policy_no_decay"]} == {1}
    copied = copy.deepcopy(made["optimizer"])  # as one
    groups = [group for one in copied.optimizers for group in one.param_groups]
    assert all(group is other for group, other in zip(groups, copied.param_groups, strict=True))
    assert all(one.state is copied.state for one in copied.optimizers)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"learning_rate": math.inf}, "learning_rate"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"betas": (1.0, 0.9)}, "betas"),
        ({"betas": (0.9, math.nan)}, "betas"),
        ({"eps": 0.0}, "eps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"warmup_steps": -1}, "warmup_steps"),
        ({"schedule": "sqrt"}, "schedule"),
        ({"schedule": "linear", "final_fraction": 2.0}, "final_fraction"),
        ({"final_fraction": 0.1}, "final_fraction"),  # of a constant rate, which never falls
        ({"optim": "torch.optim.SGD", "optim_args": {"momentun": 1}}, "optim_args has 'momentun'"),
        ({"optim": "torch.optim.SGD", "optim_args": {"lr": 1}}, "optim_args has 'lr'"),
        ({"optim_args": {"betas": (0.9, 0.9)}}, "optim_args has 'betas'"),
        ({"optim": "torch.optim.SGD", "betas": (0.9, 0.9)}, "betas is"),
        ({"optim": "torch.optim.Rprop", "weight_decay": 0.1}, "weight_decay is"),
        ({"optim": "torch.optim.Muon", "state_bits": 8}, "state_bits is 8"),
    ],
    ids=str,
)
def test_options_that_are_refused(options, name):
    with pytest.raises(ValueError, match=name):
        OptimizerConfig(**options)


# Moments of 8 bits.


class Large(nn.Module):
    """An embedding, a large matrix, a bias, and a matrix with fewer than 4096 numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.large = nn.Embedding(100, 64), nn.Linear(64, 100)
        self.small = nn.Linear(100, 10, bias=False)

    def forward(self, ids):
        return self.small(self.large(self.embedding(ids)).tanh())


def train(config, steps):
    """The model after some steps, how far each weight went from its start, and the optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Large()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = build_optimizer({"policy": (model, config)}, lambda: 0)["optimizer"]
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(100, (64,), generator=generator)
    target = torch.randint(10, (64,), generator=generator)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids), target).backward()
        optimizer.step()
    return model, {name: p.detach() - start[name] for name, p in model.named_parameters()}, optimizer


def test_large_matrices_have_two_bytes_per_weight_and_the_rest_has_eight():
    model, _, optimizer = train(EIGHT, 1)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert {name: (group["state_bits"], group["weight_decay"]) for name, group in groups.items()} == {
        "policy": (8, 0.1), "policy_embeddings": (32, 0.1), "policy_no_decay": (8, 0.0),
    }  # fmt: skip
    assert [id(p) for p in groups["policy_embeddings"]["params"]] == [id(model.embedding.weight)]

    def moments(parameter):
        own = optimizer.state[parameter]
        return sum(own[name].nbytes for name in ("state1", "state2", "absmax1", "absmax2") if name in own)

    assert moments(model.large.weight) == 2 * 6400 + 2 * 4 * 25  # a scale for each 256 numbers
    assert moments(model.embedding.weight) == 8 * 6400
    assert moments(model.small.weight) == 8 * 1000
    assert moments(model.large.bias) == 8 * 100


def test_weights_stay_near_those_of_32_bits(record_property):
    _, moved, _ = train(EIGHT, 50)
    _, expected, optimizer = train(OptimizerConfig(1e-3, weight_decay=0.1), 50)
    assert type(optimizer) is torch.optim.AdamW
    errors = {name: float((moved[name] - own).norm() / own.norm()) for name, own in expected.items()}
    record_property("figure", f"of the way of 50 steps: {errors['large.weight']:.3f} in the large matrix")
    assert 1e-3 < errors["large.weight"] < 0.1  # a number of 8 bits is off by a few percent
    others = {name: own for name, own in errors.items() if name != "large.weight"}
    assert max(others.values()) < errors["large.weight"] / 2  # 32 bits, but gradients of another matrix


def test_the_extra_is_named_if_bitsandbytes_is_missing(monkeypatch):
    monkeypatch.setattr(optional, "BITSANDBYTES_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'pl-grouprl[bitsandbytes]'")):
        OptimizerConfig(state_bits=8)


@pytest.mark.parametrize(
    ("strategy", "options", "error"),
    [
        *((kind, {"optimizer": EIGHT}, f"state_bits is 8 under {kind.__name__}")
          for kind in (ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy)),
        (FSDPStrategy, {"critic_optimizer": EIGHT}, "state_bits is 8 under FSDPStrategy"),
        (FSDPStrategy, {"optimizer": OptimizerConfig(optim="torch.optim.Muon")}, "optim is torch.optim.Muon"),
        (ModelParallelStrategy, {"optimizer": OptimizerConfig(optim="torch.optim.Muon")}, None),
    ],
)  # fmt: skip
def test_strategies_that_shard_are_refused(monkeypatch, strategy, options, error):
    module = make_module(PPO, **options)
    module.trainer = trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(trainer.strategy, "__class__", strategy)
    monkeypatch.setattr(trainer.strategy, "config", {}, raising=False)
    with nullcontext() if error is None else pytest.raises(ValueError, match=error):
        check_quantized(module)


# Runs.

EIGHT_BITS = {"optimizer": OptimizerConfig(1e-2), "critic_optimizer": OptimizerConfig(1e-2, state_bits=8)}
RUNS = {
    "SGD": {"optimizer": OptimizerConfig(1e-2, optim="torch.optim.SGD", optim_args={"momentum": 0.9})},
    "Muon": {
        "optimizer": OptimizerConfig(
            1e-2, weight_decay=0.1, schedule="linear", max_grad_norm=1.0, optim="torch.optim.Muon"
        ),
        "critic_optimizer": OptimizerConfig(1e-2),
    },
    "8 bits": EIGHT_BITS,
    "8 bits, policy": dict(zip(EIGHT_BITS, reversed(EIGHT_BITS.values()), strict=True)),
}


@pytest.mark.parametrize("run", sweep(RUNS, quick=["Muon", "8 bits"]))
def test_a_resumed_run_is_exact(run, fit):
    """Policy and critic have different optimizers."""
    options = {"critic_optimizer": OptimizerConfig(1e-2)} | RUNS[run]
    options |= {"policy": TinyPolicy(hidden_size=64), "num_mini_batches": 2}
    whole = fit(PPO, steps=3, save=True, **options)
    resumed = fit(PPO, steps=3, resume=1, **options)
    kinds = {key for own in whole.trainer.optimizers[0].state.values() for key in own}
    assert kinds >= ({"state1", "qmap1"} if "8" in run else {"momentum_buffer", "exp_avg"})
    assert same(resumed.weights[-1], whole.weights[-1])
    assert same(resumed.moments[-1], whole.moments[-1])
    other = {"optimizer": OptimizerConfig(1e-2), "critic_optimizer": OptimizerConfig(1e-2)}
    with pytest.raises(ValueError, match=r"optimizer\.(optim|state_bits) is"):
        fit(PPO, steps=3, resume=1, **options | other, guards={"allow_changed": ["optimizer", "critic_optimizer"]})


def test_muon_trains_an_adapter_alone(fit):
    """All of LoRA's weights are matrices, so there is no second optimizer."""
    pytest.importorskip("peft")
    loaded = LoRAAdapter(r=4).add_to(TinyPolicy().load())
    policy = SimpleNamespace(load=lambda: loaded, load_tokenizer=digit_tokenizer)
    start = {name: p.clone() for name, p in loaded.named_parameters()}
    run = fit(steps=2, policy=policy, optimizer=OptimizerConfig(1e-2, optim="torch.optim.Muon"))
    assert type(run.trainer.optimizers[0]) is torch.optim.Muon
    moved = {name for name, p in loaded.named_parameters() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if "lora_" in name}


@pytest.mark.slow
def test_a_run_with_moments_of_8_bits_of_torchao_resumes_exactly(fit, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # torchao compiles its step, which sets it
    config = OptimizerConfig(1e-2, optim="torchao.optim.AdamW8bit", optim_args={"block_size": 64})
    options = {"steps": 2, "policy": TinyPolicy(hidden_size=64), "optimizer": config}
    safe = SafeCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    whole = fit(callbacks=[safe], **options)
    resumed = fit(callbacks=[SafeCheckpoint(dirpath=tmp_path / "again")], resume=1, **options)
    kinds = {type(own["exp_avg"]).__name__ for own in whole.trainer.optimizers[0].state.values()}
    assert "OptimState8bit" in kinds
    assert same(whole.weights[-1], resumed.weights[-1])
