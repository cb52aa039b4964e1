"""Switching adapters off, merging them in a copy, taking them out of one; models that PEFT itself has wrapped."""

import copy

import peft
import pytest
import torch
from helpers.tiny_models import FAMILIES, random_groups, tiny_model
from torch import nn

from pl_grouprl.attention import check_parity, find_decoder, shared_prefix
from pl_grouprl.models import LoRAAdapter, PolicyCopyCritic, SharedTrunkCritic, rollout_logprobs
from pl_grouprl.models.adapters import adapter_layers, adapters_off, has_adapters, merged_copy
from pl_grouprl.packing import pack
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.types import SamplingConfig

IDS = torch.tensor([[1, 2, 3, 4, 5]])
GROUPS = random_groups(0, [(9, [4, 0, 7]), (3, [1])])


def adapted(family="llama", **options):
    model = LoRAAdapter(r=4, **options).add_to(tiny_model(family)).train()
    torch.manual_seed(5)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


def wrapped(family="llama", **options):
    """What users do: PEFT's own model around theirs."""
    targets = ["c_attn"] if family == "gpt2" else ["q_proj", "o_proj"]
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False, **options)
    return peft.get_peft_model(tiny_model(family), config).train()


def flags(model):
    return {name: p.requires_grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("make", [adapted, wrapped])
@pytest.mark.parametrize("use_dora", [False, True])
def test_off_equals_the_base_bitwise_and_on_is_restored(make, use_dora):
    model, base = make(use_dora=use_dora), tiny_model("llama")
    before, trained = model(IDS).logits, flags(model)
    with adapters_off(model):
        off = model(IDS).logits
        assert not off.requires_grad
    assert torch.equal(off, base(IDS).logits)
    assert not torch.allclose(before, off)
    assert torch.equal(model(IDS).logits, before)
    assert flags(model) == trained
    with pytest.raises(RuntimeError, match="stop"), adapters_off(model):
        raise RuntimeError("stop")
    assert torch.equal(model(IDS).logits, before)
    assert flags(model) == trained


def test_off_with_shared_prefixes():
    model, base = adapted("qwen3"), tiny_model("qwen3")
    with shared_prefix(model), adapters_off(model):
        off = rollout_logprobs(model, GROUPS)
    for actual, expected in zip(off, rollout_logprobs(base, GROUPS), strict=True):
        assert torch.equal(actual, expected)


def test_off_does_not_change_other_settings():
    """An adapter that was frozen stays so, and one that was off stays off."""
    model = adapted()
    for parameter in find_decoder(model).layers[0].parameters():
        parameter.requires_grad_(False)
    trained = flags(model)
    for layer in adapter_layers(model):
        layer.enable_adapters(False)
    disabled = model(IDS).logits
    with adapters_off(model):
        pass
    assert torch.equal(model(IDS).logits, disabled)
    for layer in adapter_layers(model):
        layer.enable_adapters(True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained[name])
    with adapters_off(model):
        pass
    assert flags(model) == trained


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_weights_trained_besides_the_adapter_are_refused(bias):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], bias=bias)
    model = peft.get_peft_model(tiny_model("qwen2"), config)
    trained = flags(model)
    with pytest.raises(ValueError, match=r"trains \d+ weights besides its adapters, .*bias'"), adapters_off(model):
        pass
    assert flags(model) == trained


def test_a_model_without_adapters_cannot_switch_them_off():
    with pytest.raises(ValueError, match="LlamaForCausalLM has no adapters to switch off"), adapters_off(tiny_model()):
        pass


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_merged_copy_computes_the_same_and_changes_nothing(family, use_dora):
    model = adapted(family, use_dora=use_dora)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits, plain = model(IDS).logits, tiny_model(family)
    merged = merged_copy(model)
    assert type(merged) is type(plain)
    assert not has_adapters(merged)
    assert merged.state_dict().keys() == plain.state_dict().keys()
    torch.testing.assert_close(merged(IDS).logits, logits, atol=2e-5, rtol=1e-4)
    assert torch.equal(model(IDS).logits, logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # What has no adapter exists once.
    assert merged.get_input_embeddings().weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


def test_modules_that_peft_trains_in_full():
    model, base = wrapped(modules_to_save=["lm_head"]), tiny_model("llama")
    model.get_base_model().lm_head.modules_to_save["default"].weight.data += 0.1
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, base(IDS).logits)
    torch.testing.assert_close(merged_copy(model)(IDS).logits, model(IDS).logits, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_prefixes_are_shared_in_a_peft_model(family, use_dora):
    model = wrapped(family, use_dora=use_dora)
    report = check_parity(model)
    assert report.passed, str(report)
    pairs = zip(rollout_logprobs(model, GROUPS), rollout_logprobs(model, GROUPS, sharing="repeated"), strict=True)
    for shared, repeated in pairs:
        torch.testing.assert_close(shared, repeated, atol=1e-5, rtol=1e-5)
    rows = torch.randint(1, 61, (1, 40)).repeat(3, 1)
    rows[:, -4:] = torch.arange(1, 13).reshape(3, 4)
    mask = torch.ones_like(rows)
    expected = model(rows, attention_mask=mask, labels=rows)
    with shared_prefix(model) as context:
        actual = model(rows, attention_mask=mask, labels=rows)
        assert context.last_call.token_ratio > 2
    torch.testing.assert_close(actual.logits, expected.logits, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(actual.loss, expected.loss)


@pytest.mark.parametrize("make", [adapted, wrapped])
def test_rollouts_are_sampled_with_the_adapter_on(make):
    """The sampler's log-probabilities are those of the adapted policy."""
    model = make().eval()
    engine = HFRolloutEngine()
    engine.bind(model)
    (rollouts,) = engine.generate([[5, 6, 7, 8]], SamplingConfig(max_new_tokens=6), num_generations=3, seed=0)
    from pl_grouprl.types import RolloutGroup

    for rollout, scored in zip(rollouts, rollout_logprobs(model, [RolloutGroup([5, 6, 7, 8], rollouts)]), strict=True):
        torch.testing.assert_close(torch.tensor(rollout.logprobs), scored.detach(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("make", [adapted, wrapped])
def test_a_copied_critic_includes_the_merged_adapter(make):
    model = make()
    batch = pack(GROUPS)
    critic = PolicyCopyCritic(head_std=0.3).load(model)
    shared = SharedTrunkCritic(head_std=0.3).load(model)
    assert all(p.requires_grad for p in critic.parameters())
    assert not has_adapters(critic)
    with shared_prefix(critic.trunk), shared_prefix(model):
        torch.testing.assert_close(critic.values(batch), shared.values(batch), atol=1e-4, rtol=1e-4)
    theirs = {p.data_ptr() for p in model.parameters()}
    assert not {p.data_ptr() for p in critic.parameters()} & theirs


def test_a_copy_of_an_adapted_model_is_one():
    model = adapted()
    duplicate = copy.deepcopy(model)
    nn.init.zeros_(duplicate.lm_head.weight)
    with adapters_off(duplicate):
        assert not duplicate(IDS).logits.any()
    assert model(IDS).logits.any()
