"""Exports of a model with an adapter: merged into a whole model, or the adapter alone."""

import peft
import pytest
import torch
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import shared_prefix
from pl_grouprl.callbacks import ExportPolicy
from pl_grouprl.models import LoRAAdapter

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def base(tmp_path):
    """Folder of the base model."""
    tiny_model("qwen3").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def load(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def adapted(base, use_dora=False, by_peft=False):
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


@pytest.mark.parametrize("by_peft", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_the_adapter_alone(fit, counter, tmp_path, base, use_dora, by_peft):
    counter.policy = adapted(base, use_dora, by_peft)
    fit(counter, ExportPolicy(tokenizer_attribute=None, adapter="separate"), max_steps=1)
    folder = tmp_path / "version_0" / "policy"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in folder.iterdir()}
    assert not (folder / "model.safetensors").exists()
    expected = counter.policy(IDS).logits
    assert torch.equal(peft.PeftModel.from_pretrained(load(base), folder)(IDS).logits, expected)
    if not use_dora:  # transformers 5.23 does not find DoRA's norms in a folder of PEFT's
        assert torch.equal(load(folder)(IDS).logits, expected)
    assert torch.equal(LoRAAdapter(path=str(folder)).add_to(load(base))(IDS).logits, expected)


@pytest.mark.parametrize("by_peft", [False, True])
@pytest.mark.parametrize("use_dora", [False, True])
def test_merged_by_default(fit, counter, tmp_path, base, use_dora, by_peft):
    counter.policy = model = adapted(base, use_dora, by_peft)
    expected, before = model(IDS).logits, {name: p.clone() for name, p in model.named_parameters()}
    with shared_prefix(model):  # as it is until the end of a fit
        fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    folder = tmp_path / "version_0" / "policy"
    assert not (folder / "adapter_config.json").exists()
    merged = load(folder)
    assert not any("lora" in name for name, _ in merged.named_parameters())
    torch.testing.assert_close(merged(IDS).logits, expected, atol=2e-5, rtol=1e-4)
    assert (merged(IDS).logits - load(base)(IDS).logits).abs().max() > 0.1
    # The live model goes on.
    assert torch.equal(model(IDS).logits, expected)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_experts_and_tied_weights_are_exported(fit, counter, tmp_path):
    model = LoRAAdapter(r=4).add_to(tiny_model("qwen3_moe", tie_word_embeddings=True))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data += 0.1
    counter.policy = model
    fit(counter, ExportPolicy(tokenizer_attribute=None), max_steps=1)
    merged = load(tmp_path / "version_0" / "policy")
    torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, atol=2e-5, rtol=1e-4)
    assert merged.lm_head.weight is merged.model.embed_tokens.weight


def test_a_model_without_an_adapter_has_none_to_save(fit, counter):
    counter.policy = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"ExportPolicy\(adapter='separate'\) .* the Qwen3ForCausalLM has none"):
        fit(counter, ExportPolicy(tokenizer_attribute=None, adapter="separate"), max_steps=1)
    assert counter.trainer.global_step == 0
    with pytest.raises(ValueError, match="adapter is 'both'"):
        ExportPolicy(adapter="both")
