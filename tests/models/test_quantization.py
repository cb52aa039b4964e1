"""Frozen weights of 4 bits: their bytes, gradients through them, parity, copies, merging, cost, and what is refused."""

import copy

import pytest
import torch
from helpers.quantized import FLOAT, move_adapter, quantized_policy, save_policy
from helpers.tiny_models import tiny_model

from pl_grouprl.attention import check_parity, find_decoder
from pl_grouprl.models import FourBit, LoRAAdapter, LoRACritic, ModelCost, PolicyCopyCritic, PretrainedPolicy
from pl_grouprl.models.adapters import adapters_off, is_quantized, merged_copy, quantized_layers
from pl_grouprl.utilities.tolerances import computing_dtype

IDS = torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def model(folder):
    return move_adapter(quantized_policy(folder).load())


def dense(folder, quantized):
    """The unquantized model with the dequantized weights."""
    from bitsandbytes.functional import dequantize_4bit

    model = PretrainedPolicy(folder).load()
    for name, layer in quantized_layers(quantized):
        weight = model.get_submodule(name.removesuffix(".base_layer")).weight
        weight.data = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
    return model


def test_a_layer_has_half_a_byte_per_weight_and_its_scales(folder):
    model = quantized_policy(folder).load()
    layers = dict(quantized_layers(model))
    assert len(layers) == 2 * 7  # every linear layer of the two decoder layers
    layer = layers["model.layers.0.mlp.up_proj.base_layer"]
    assert layer.weight.nbytes == 64 * 128 // 2
    assert layer.weight.quant_state.absmax.nbytes == 64 * 128 // 64
    assert layer.weight.quant_state.state2.absmax.nbytes == 4  # 256 scales share one, and there are 128
    others = {p.dtype for name, p in model.named_parameters() if "base_layer" not in name}
    assert others == {torch.float32}
    plain = quantized_policy(folder, FourBit(double_quant=False)).load()
    state = dict(quantized_layers(plain))["model.layers.0.mlp.up_proj.base_layer"].weight.quant_state
    assert state.absmax.nbytes == 4 * 64 * 128 // 64


def test_only_the_adapter_is_trained_and_its_gradients_are_those_of_the_dequantized_base(folder, model):
    expected = move_adapter(LoRAAdapter(r=4).add_to(dense(folder, model))).train()
    model.train()
    for own in (model, expected):
        own(IDS).logits.square().mean().backward()
    wanted = {name: p.grad for name, p in expected.named_parameters() if p.requires_grad}
    found = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_are_the_same_after_sampling(model):
    """bitsandbytes repacks weights in evaluation mode on some CPUs, for a kernel without a gradient."""

    def gradients():
        model.train().zero_grad()
        model(IDS).logits.square().mean().backward()
        return [p.grad.clone() for p in model.parameters() if p.requires_grad]

    before = gradients()
    with torch.no_grad():
        model.eval()(IDS)
    assert all(torch.equal(a, b) for a, b in zip(before, gradients(), strict=True))
    assert all(gradient.abs().max() > 0 for gradient in before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shared_and_repeated_prefixes_agree(folder, dtype):
    model = move_adapter(quantized_policy(folder, FourBit(compute_dtype=dtype)).load()).train()
    assert computing_dtype(model) == getattr(torch, dtype)
    report = check_parity(model)
    assert report.passed, report
    assert 1e-12 < report.mean_logprob_difference < report.tolerance.logprob


def test_the_reference_is_the_quantized_base(folder, model):
    model.eval()
    with torch.no_grad(), adapters_off(model):
        base = model(IDS).logits
    torch.testing.assert_close(base, dense(folder, model).eval()(IDS).logits, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        assert (model(IDS).logits - base).abs().max() > 1e-2


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_does_not_round_to_4_bits(folder, tmp_path, use_dora):
    policy = PretrainedPolicy(folder, adapter=LoRAAdapter(r=4, use_dora=use_dora), quantization=FLOAT)
    model = move_adapter(policy.load()).eval()
    before = {name: p.clone() for name, p in model.named_parameters()}
    merged = merged_copy(model)
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert is_quantized(model)
    merged.save_pretrained(tmp_path)
    again = PretrainedPolicy(str(tmp_path)).load().eval()  # a plain checkpoint
    assert not is_quantized(again)
    torch.testing.assert_close(again(IDS).logits, merged(IDS).logits)


@pytest.mark.parametrize("use_dora", [False, True])
def test_merging_keeps_transposed_weights_transposed(tmp_path, use_dora):
    tiny_model("gpt2").save_pretrained(tmp_path / "base")
    adapter = LoRAAdapter(r=4, use_dora=use_dora)
    model = move_adapter(PretrainedPolicy(str(tmp_path / "base"), adapter=adapter, quantization=FLOAT).load()).eval()
    merged_copy(model).save_pretrained(tmp_path / "merged")
    merged = PretrainedPolicy(str(tmp_path / "merged")).load().eval()
    with torch.no_grad():
        torch.testing.assert_close(merged(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)


def test_a_critic_shares_the_quantized_base(model):
    critic = LoRACritic(r=4, head_std=0.1).load(model)
    own, theirs = dict(quantized_layers(critic.trunk)), dict(quantized_layers(find_decoder(model)))
    assert own.keys() == theirs.keys()
    for name, layer in own.items():
        assert layer.weight.data_ptr() == theirs[name].weight.data_ptr()
        assert layer.weight.quant_state is layer.quant_state is theirs[name].weight.quant_state
    critic.retie(model)
    with torch.no_grad(), adapters_off(model), adapters_off(critic.trunk):
        expected = find_decoder(model)(IDS).last_hidden_state
        assert torch.equal(critic.trunk(IDS).last_hidden_state, expected)
    assert not any("layers" in name and "lora" not in name for name in critic.state_dict())


def test_a_separate_critic_is_dequantized(model):
    critic = PolicyCopyCritic().load(model)
    assert not is_quantized(critic)
    assert all(p.requires_grad and p.dtype == torch.float32 for p in critic.parameters())
    torch.testing.assert_close(
        critic.trunk.eval()(IDS).last_hidden_state, model.eval().model(IDS).last_hidden_state, rtol=1e-4, atol=1e-5
    )


def test_packed_weights_count_whole(folder, model):
    plain = PretrainedPolicy(folder, adapter=LoRAAdapter(r=4)).load()
    assert ModelCost.of(find_decoder(model)) == ModelCost.of(find_decoder(plain))


def test_copies_compute_the_same(model):
    model.eval()
    assert torch.equal(copy.deepcopy(model)(IDS).logits, model(IDS).logits)


def test_incompatible_options_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="4 bits"):
        PretrainedPolicy(folder, quantization=FLOAT).load()
    with pytest.raises(ValueError, match="kernels"):
        quantized_policy(folder, kernels="compile")
    with pytest.raises(ValueError, match="gguf_file"):
        quantized_policy(str(tmp_path), gguf_file="own.gguf")
    model = PretrainedPolicy(folder).load_as("AutoModelForCausalLM")
    saved = quantized_policy(folder).load_as("AutoModelForCausalLM")
    saved.save_pretrained(tmp_path)  # in 4 bits
    with pytest.raises(ValueError, match="4 bits"):
        PretrainedPolicy(str(tmp_path)).load()
    with pytest.raises(ValueError, match="quantized already"):
        quantized_policy(str(tmp_path)).load()
    again = PretrainedPolicy(str(tmp_path), adapter=LoRAAdapter(r=4)).load().eval()
    assert torch.equal(again(IDS).logits, saved(IDS).logits)
    assert (saved(IDS).logits - model(IDS).logits).abs().max() > 1e-3
