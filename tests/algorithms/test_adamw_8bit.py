"""AdamW with moments of 8 bits: what they cost, how near the weights stay, and that a run resumes exactly."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.sweeps import sweep
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from pl_grouprl.algorithms import PPO, OptimizerConfig
from pl_grouprl.training.checks import check_quantized
from pl_grouprl.training.optimizer import build_optimizer
from pl_grouprl.utilities import optional

EIGHT = OptimizerConfig(1e-3, weight_decay=0.1, state_bits=8)


class Net(nn.Module):
    """An embedding, a large matrix, a bias, and a matrix with fewer than 4096 numbers."""

    def __init__(self):
        super().__init__()
        self.embedding, self.large, self.small = (
            nn.Embedding(100, 64),
            nn.Linear(64, 100),
            nn.Linear(100, 10, bias=False),
        )

    def forward(self, ids):
        return self.small(self.large(self.embedding(ids)).tanh())


def train(config, steps):
    """The model after some steps, how far each weight went from its start, and the optimizer."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Net()
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


def saving(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize("part", sweep(["policy", "critic"], quick=["critic"]))
def test_a_resumed_run_is_exact(make_module, make_data, make_trainer, tiny_policy, tmp_path, part):
    """One part with 8 bits, the other with 32, in one optimizer."""
    eight, plain = OptimizerConfig(1e-2, weight_decay=0.1, state_bits=8), OptimizerConfig(1e-2)
    options = {"optimizer": eight, "critic_optimizer": plain}
    if part == "critic":
        options = {"optimizer": plain, "critic_optimizer": eight}

    def fit(checkpoint=None, callbacks=()):
        module = make_module(PPO, policy=tiny_policy(hidden_size=64), num_mini_batches=2, **options)
        trainer = make_trainer(max_steps=4, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        return dict(module.named_parameters()), trainer.optimizers[0]

    whole, optimizer = fit(callbacks=[saving(tmp_path)])
    resumed, again = fit(tmp_path / "step=2.ckpt")
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    states = zip(optimizer.state.values(), again.state.values(), strict=True)
    assert all(torch.equal(one["state1"], other["state1"]) for one, other in states)
    bits = {name.partition(".")[0] for name, p in whole.items() if "qmap1" in optimizer.state.get(p, {})}
    assert bits == {part}


def test_the_bits_of_a_run_cannot_change(make_module, make_data, make_trainer, tmp_path):
    make_trainer(max_steps=1, callbacks=[saving(tmp_path)]).fit(make_module(), make_data())
    module = make_module(optimizer=OptimizerConfig(1e-2, state_bits=8), guards={"allow_changed": ["optimizer"]})
    with pytest.raises(ValueError, match="state_bits"):
        make_trainer(max_steps=2).fit(module, make_data(), ckpt_path=tmp_path / "step=1.ckpt", weights_only=True)


@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy])
@pytest.mark.parametrize("option", ["optimizer", "critic_optimizer"])
def test_strategies_that_shard_are_refused(make_module, monkeypatch, strategy, option):
    module = make_module(PPO, **{"optimizer": OptimizerConfig(), option: EIGHT})
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(trainer.strategy, "__class__", strategy)
    monkeypatch.setattr(trainer.strategy, "config", {}, raising=False)
    module.trainer = trainer
    with pytest.raises(ValueError, match=f"state_bits is 8 under {strategy.__name__}"):
        check_quantized(module)


def test_it_names_the_extra_if_bitsandbytes_is_missing(monkeypatch):
    monkeypatch.setattr(optional, "BITSANDBYTES_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'pl-grouprl[bitsandbytes]'")):
        OptimizerConfig(state_bits=8)
