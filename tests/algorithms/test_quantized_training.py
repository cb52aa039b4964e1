"""Runs on a base of 4 bits: what is trained, saved and exported, that they resume exactly, and what is refused."""

from __future__ import annotations

import pytest
import torch
from helpers.copied_engine import CopiedPolicyEngine
from helpers.quantized import FLOAT, quantized_policy, save_policy
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy

from pl_grouprl.algorithms import GRPO, PPO, Distillation, OptimizerConfig
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.models import LoRACritic, PretrainedPolicy
from pl_grouprl.models.adapters import quantized_layers
from pl_grouprl.training.checks import check_quantized

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def saving(folder):
    return ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


def codes(model):
    return [layer.weight.data for _, layer in quantized_layers(model)]


@pytest.mark.parametrize(
    ("cls", "options"),
    [(GRPO, {"beta": 0.05, "sharing": {"verify": True}}), (PPO, {"critic": LoRACritic(r=4, head_std=0.1)})],
    ids=["grpo", "ppo"],
)
def test_it_trains_only_the_adapter_and_resumes_exactly(
    make_module, make_data, make_trainer, folder, tmp_path, cls, options
):
    eight = OptimizerConfig(1e-2, weight_decay=0.1, state_bits=8)

    def fit(checkpoint=None, callbacks=()):
        module = make_module(cls, policy=quantized_policy(folder), optimizer=eight, num_mini_batches=2, **options)
        trainer = make_trainer(max_steps=3, callbacks=list(callbacks))
        trainer.fit(module, make_data(train_size=8), ckpt_path=checkpoint, weights_only=True)
        return module

    whole = fit(callbacks=[saving(tmp_path)])
    start = quantized_policy(folder).load()
    assert all(torch.equal(a, b) for a, b in zip(codes(start), codes(whole.policy), strict=True))
    trained = {name for name, p in whole.named_parameters() if p.requires_grad}
    assert all(name.startswith("critic.") or "lora_" in name for name in trained)
    saved = torch.load(tmp_path / "step=1.ckpt", weights_only=True)["state_dict"]
    assert saved.keys() == trained
    moved = [(p - dict(start.named_parameters())[name]).abs().max() for name, p in whole.policy.named_parameters()
             if p.requires_grad]  # fmt: skip
    assert min(moved) > 1e-4
    resumed = dict(fit(tmp_path / "step=1.ckpt").named_parameters())
    assert all(torch.equal(value, resumed[name]) for name, value in whole.named_parameters())


def test_both_exports_are_the_trained_policy(make_module, make_data, make_trainer, folder, tmp_path):
    from peft import PeftModel

    exports = [ExportPolicy(folder="merged"), ExportPolicy(folder="separate", adapter="separate")]
    module = make_module(policy=quantized_policy(folder))
    make_trainer(max_steps=2, callbacks=[saving(tmp_path / "checkpoints"), *exports], default_root_dir=tmp_path).fit(
        module, make_data()
    )
    merged, separate = (next(tmp_path.rglob(f"{name}/config.json"), None) for name in ("merged", "separate"))
    assert separate is None  # the adapter alone
    expected = module.policy.eval()(IDS).logits
    policy = PretrainedPolicy(str(merged.parent)).load().eval()
    torch.testing.assert_close(policy(IDS).logits, expected, rtol=1e-4, atol=1e-5)
    base = PretrainedPolicy(folder, adapter=quantized_policy(folder).adapter, quantization=FLOAT).load_as(
        "AutoModelForCausalLM"
    )
    adapted = PeftModel.from_pretrained(base, next(tmp_path.rglob("adapter_config.json")).parent).eval()
    torch.testing.assert_close(adapted(IDS).logits, expected, rtol=1e-4, atol=1e-5)


def test_validation_and_sampling_ahead(make_module, make_data, make_trainer, folder):
    module = make_module(
        policy=quantized_policy(folder), max_staleness=1, importance_sampling={"mode": "token_truncate"}
    )
    trainer = make_trainer(max_steps=2)
    trainer.fit(module, make_data(val=True))
    assert trainer.global_step == 2
    trainer.validate(module, make_data(val=True), verbose=False)
    assert "val/reward" in trainer.callback_metrics


@pytest.mark.parametrize("part", ["policy", "teacher"])
@pytest.mark.parametrize("strategy", [ModelParallelStrategy, FSDPStrategy, DeepSpeedStrategy])
def test_strategies_that_shard_are_refused(make_module, monkeypatch, folder, strategy, part):
    models = {"policy": PretrainedPolicy(folder), "teacher": PretrainedPolicy(folder)} | {
        part: quantized_policy(folder)
    }
    module = make_module(Distillation, **models)
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    monkeypatch.setattr(trainer.strategy, "__class__", strategy)
    monkeypatch.setattr(trainer.strategy, "config", {}, raising=False)
    module.trainer = trainer
    with pytest.raises(ValueError, match=f"{part} has a quantization under {strategy.__name__}"):
        check_quantized(module)


@pytest.mark.parametrize("adapter", ["merged", "separate"])
def test_engines_that_receive_weights_are_refused(make_module, make_data, make_trainer, folder, adapter):
    module = make_module(policy=quantized_policy(folder), engine=CopiedPolicyEngine(adapter=adapter))
    with pytest.raises(
        ValueError, match=r"engine is CopiedPolicyEngine, .* are quantized; sample with HFRolloutEngine"
    ):
        make_trainer(max_steps=1).fit(module, make_data())
