"""Exports of a policy: whole or its adapter, replaced as a whole, refused before training."""

import peft
import pytest
import torch
from helpers.tiny_models import random_groups, tiny_model
from lightning.pytorch import Trainer

from pl_grouprl.attention import shared_prefix
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.callbacks.export_policy import export
from pl_grouprl.models import LoRAAdapter, LoRACritic, PolicyCopyCritic, PretrainedCritic, SharedTrunkCritic
from pl_grouprl.packing import pack

IDS = torch.tensor([[1, 2, 3]])


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@pytest.fixture
def fit_and_export(fit, counter, tmp_path):
    """Train a model for a step; returns the folder of the export."""

    def run(model, **options):
        counter.policy = model
        fit(counter, ExportPolicy(tokenizer_attribute=None, **options), max_steps=1)
        return tmp_path / "version_0" / "policy"

    return run


@pytest.fixture
def base(tmp_path):
    """Folder of the base model."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base, use_dora, by_peft):
    model = load(base)
    if by_peft:
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", use_dora=use_dora))
    else:
        LoRAAdapter(r=4, use_dora=use_dora).add_to(model)
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


KINDS = pytest.mark.parametrize(("use_dora", "by_peft"), [(False, False), (True, False), (False, True)])


@KINDS
def test_the_adapter_alone(fit_and_export, base, use_dora, by_peft):
    model = adapted(base, use_dora, by_peft)
    folder = fit_and_export(model, adapter="separate")
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()
    expected = model(IDS).logits
    assert torch.equal(peft.PeftModel.from_pretrained(load(base), folder)(IDS).logits, expected)
    if not use_dora:  # transformers 5.23 does not find DoRA's norms in a folder of PEFT's
        assert torch.equal(load(folder)(IDS).logits, expected)
    assert torch.equal(LoRAAdapter(path=str(folder)).add_to(load(base))(IDS).logits, expected)


@KINDS
def test_merged_by_default(fit_and_export, base, use_dora, by_peft):
    model = adapted(base, use_dora, by_peft)
    expected, before = model(IDS).logits, {name: p.clone() for name, p in model.named_parameters()}
    with shared_prefix(model):  # as it is until the end of a fit
        folder = fit_and_export(model)
    assert not (folder / "adapter_config.json").exists()
    merged = load(folder)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(IDS).logits, expected, atol=2e-5, rtol=1e-4)
    assert (merged(IDS).logits - load(base)(IDS).logits).abs().max() > 0.1
    # The live model is as it was.
    assert torch.equal(model(IDS).logits, expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_experts_and_tied_weights_are_exported(fit_and_export):
    model = LoRAAdapter(r=4).add_to(tiny_model("qwen3_moe", tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    merged = load(fit_and_export(model))
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, atol=2e-5, rtol=1e-4)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


@pytest.mark.parametrize("source", [PolicyCopyCritic(), SharedTrunkCritic(), LoRACritic(r=4)])
def test_a_critic_by_the_names_of_transformers(fit, counter, tmp_path, source):
    from transformers import AutoModelForTokenClassification

    counter.policy = LoRAAdapter(r=3).add_to(tiny_model("qwen3"))
    counter.critic = source.load(counter.policy)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in counter.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    groups = random_groups(0, [(9, [4, 0, 7]), (3, [1])])
    with shared_prefix(counter.critic.trunk):  # as it is until the end of a fit
        fit(counter, ExportPolicy(attribute="critic", folder="critic", tokenizer_attribute=None), max_steps=1)
        expected = counter.critic.values(pack(groups)).detach()
    folder = tmp_path / "version_0" / "critic"
    model = AutoModelForTokenClassification.from_pretrained(folder)
    assert not any("lora" in name for name, _ in model.named_parameters())
    group = groups[0]
    logits = model(torch.tensor([group.prompt_ids + group.rollouts[0].token_ids])).logits
    close = {"atol": 1e-5, "rtol": 1e-4}
    torch.testing.assert_close(logits[0, len(group.prompt_ids) - 1 : -1, 0], expected[:4], **close)
    loaded = PretrainedCritic(str(folder)).load(tiny_model("qwen3"))
    with torch.no_grad():
        torch.testing.assert_close(loaded.values(pack(groups, "repeated")), expected, **close)
    assert expected.std() > 0.01
    card = (folder / "README.md").read_text(encoding="utf-8")
    assert 'AutoModelForTokenClassification.from_pretrained("critic"' in card
    assert "chat" not in card


def test_a_former_export_is_replaced_as_a_whole_or_kept(tmp_path, monkeypatch):
    first, second = tiny_model("qwen2"), tiny_model("qwen2", seed=1)
    export(first, None, tmp_path / "policy")
    (tmp_path / "policy" / "left_over.txt").touch()
    export(second, None, tmp_path / "policy")
    assert not (tmp_path / "policy" / "left_over.txt").exists()
    monkeypatch.setattr(first, "save_pretrained", lambda folder: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        export(first, None, tmp_path / "policy")
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
    assert torch.equal(load(tmp_path / "policy")(IDS).logits, second(IDS).logits)


def test_a_trial_exports_nothing(fit, counter, tmp_path):
    counter.policy = tiny_model("qwen2")
    fit(counter, ExportPolicy(tokenizer_attribute=None), fast_dev_run=True, logger=None)
    assert not list(tmp_path.rglob("policy"))


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (None, {}, AttributeError, "policy"),
        (torch.nn.Linear(1, 1), {}, TypeError, "attribute='policy' is a Linear"),
        (
            tiny_model("qwen3"),
            {"adapter": "separate"},
            ValueError,
            "adapter='separate'.* Qwen3ForCausalLM",
        ),
        (
            LoRACritic(r=2).load(tiny_model("qwen3")),
            {"adapter": "separate"},
            ValueError,
            "lose the head of a critic",
        ),
        (PolicyCopyCritic().load(tiny_model("lfm2")), {}, ValueError, "Lfm2Config"),
        (None, {"adapter": "both"}, ValueError, "adapter is 'both'"),
    ],
)
def test_what_cannot_be_exported_is_refused_before_training(fit, counter, model, options, error, message):
    if model is not None:
        counter.policy = model
    with pytest.raises(error, match=message):
        fit(counter, ExportPolicy(tokenizer_attribute=None, **options), max_steps=1)
    assert model is None or counter.trainer.global_step == 0


def test_an_unknown_strategy_is_refused_before_training(counter):
    class Sharded:
        pass

    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    trainer._accelerator_connector.strategy = Sharded()
    with pytest.raises(ValueError, match="strategy is Sharded"):
        ExportPolicy().setup(trainer, counter, "fit")
