"""The formulas of memory are what small models allocate."""

import itertools
from itertools import chain

import pytest
import torch
import transformers
from helpers.peak_memory import Peak
from helpers.quantized import save_policy
from helpers.sweeps import sweep, sweep_pairs
from helpers.tiny_models import random_groups

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends.saved import save_attention
from pl_grouprl.models import FourBit, LoRAAdapter, PretrainedPolicy, hidden_states, score
from pl_grouprl.models.adapters import quantized_layers
from pl_grouprl.packing import pack
from pl_grouprl.planning.memory import (
    METHODS,
    KeptBytes,
    LayerBytes,
    Method,
    count_kept,
    divided,
    empty_model,
    footprint_of_method,
)
from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer

FULL, LORA = METHODS[0], next(method for method in METHODS if method.name == "LoRA")
TOKENS = 128
RANK = 16


def config(layers=2, **sizes):
    from transformers import Qwen3Config

    common = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 6, "num_key_value_heads": 2,
              "head_dim": 32, "vocab_size": 61, "tie_word_embeddings": True}  # fmt: skip
    return Qwen3Config(num_hidden_layers=layers, **{**common, **sizes})


def trainable(method, **sizes):
    """A small model as the method trains it, with gradients that exist already."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(0)
    dtype = torch.float32 if method.trains_all else torch.bfloat16
    model = Qwen3ForCausalLM._from_config(config(**sizes), dtype=dtype).train()
    if not method.trains_all:
        LoRAAdapter(r=RANK).add_to(model)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return model


def held(model):
    tensors = [*model.parameters(), *model.buffers()]
    return [*tensors, *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("method", [m for m in METHODS if not m.has_reference], ids=lambda method: method.name)
def test_weights_gradients_and_moments_are_counted_exactly(method, tmp_path):
    path = save_policy(tmp_path)
    adapter = None if method.trains_all else LoRAAdapter(r=4)
    dtype = "float32" if method.trains_all else "bfloat16"
    policy = PretrainedPolicy(path, dtype, adapter=adapter, quantization=FourBit() if method.four_bits else None)
    model = policy.load().train()
    expected = footprint_of_method(policy.load_config(), method, rank=4).policy
    own = OptimizerConfig(state_bits=method.state_bits)
    optimizer = build_optimizer({"policy": (model, own)}, lambda: 0)["optimizer"]
    model(torch.tensor([[1, 2, 3]])).logits.sum().backward()
    optimizer.step()
    scales = [t for _, layer in quantized_layers(model) for t in _scales(layer.weight.quant_state)]
    assert sum(tensor.nbytes for tensor in chain(model.parameters(), scales)) == expected.weights
    assert sum(p.grad.nbytes for p in model.parameters() if p.grad is not None) == expected.gradients
    names = ("exp_avg", "exp_avg_sq", "state1", "state2", "absmax1", "absmax2")
    moments = (state[name].nbytes for state in optimizer.state.values() for name in names if name in state)
    assert sum(moments) == expected.moments


def _scales(state):
    return state.absmax, state.state2.absmax


def layer_bytes(config, method):
    adapter = None if method.trains_all else LoRAAdapter(r=RANK)
    model = empty_model(config, torch.float32 if method.trains_all else torch.bfloat16, adapter)
    return LayerBytes.of(model, autocast=True, width=4)


def activations(method, layers, tokens, checkpointing, **sizes):
    """Bytes that the decoder keeps after its forward pass, and the peak of forward and backward pass."""
    model = trainable(method, layers=layers, **sizes)
    if checkpointing:
        saving = {"context_fn": save_attention} if checkpointing == "attention" else {}
        model.gradient_checkpointing_enable({"use_reentrant": False} | saving)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    with Peak(held(model)) as peak:
        with torch.autocast("cpu", torch.bfloat16):
            states = model.model(ids, use_cache=False).last_hidden_state
        kept = peak.live
        states.backward(torch.ones_like(states))
    return torch.tensor([kept, peak.peak])


@pytest.mark.parametrize(("method", "checkpointing"), [(FULL, False), (FULL, True), (LORA, True), (FULL, "attention")])
def test_activations_are_counted(method, checkpointing, record_property):
    """Per token, so that copies of weights cancel; attention keeps no scores."""
    runs = {(n, t): activations(method, n, t, checkpointing) for n in (1, 3) for t in (TOKENS, 2 * TOKENS)}
    one, three = ((runs[n, 2 * TOKENS] - runs[n, TOKENS]) / TOKENS for n in (1, 3))
    (kept_per_layer, _), (_, peak) = (three - one) / 2, three
    if checkpointing:
        saved = 6 * (2 * 32 + 4) if checkpointing == "attention" else 0
        assert kept_per_layer == (4 if method.trains_all else 2) * 96 + saved
    else:
        one, three = (layer_bytes(config(layers), method).kept.total for layers in (1, 3))
        assert kept_per_layer == (three - one) / 2
    error = sum(layer_bytes(config(3), method).activations(checkpointing)) / peak - 1
    record_property("figure", f"the estimate is {error:+.1%} off the peak of three layers")
    assert abs(error) < 0.08


@pytest.mark.parametrize("method", sweep([FULL, LORA], quick=[FULL]), ids=lambda method: method.name)
def test_a_packed_row_takes_what_the_formula_says(method, record_property):
    """The row of a group with a shared prefix, with logits of a larger vocabulary, checkpointed."""
    sizes = {"layers": 3, "vocab_size": 4096}
    (group,) = random_groups(0, [(128, [64] * 6)])
    model = trainable(method, **sizes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    batch = pack([group])
    with Peak(held(model)) as peak, shared_prefix(model):
        with torch.autocast("cpu", torch.bfloat16):
            total = score(model, batch).logprobs_N.sum()
        total.backward()
    tokens = 128 + 6 * 64
    own = config(3, vocab_size=4096)
    expected = footprint_of_method(own, method)
    expected = expected.copies + expected.activations(tokens, True) + expected.logits(tokens, True)
    record_property("figure", f"measured {peak.peak / expected:.2f} of the formula")
    assert 0.6 < peak.peak / expected < 1.25


FAMILIES = ["qwen3", "llama", "gemma3_text", "olmo2", "mistral", "qwen3_moe"]


def family_config(family, layers=3):
    from transformers import AutoConfig

    sizes = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 8, "num_key_value_heads": 2,
             "head_dim": 32, "moe_intermediate_size": 96, "num_experts": 8, "num_experts_per_tok": 2}  # fmt: skip
    tokens = {"vocab_size": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return AutoConfig.for_model(family, num_hidden_layers=layers, **sizes, **tokens)


def really_saved(model, groups):
    """Bytes of the storages that autograd saves in a shared row of real tensors, without those of weights."""
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    saved = {}

    def pack_tensor(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    batch = pack(groups)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor)
    with shared_prefix(model), torch.autocast("cpu", torch.bfloat16), hooks:
        hidden_states(model, batch)
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.parametrize(
    ("family", "method"),
    sweep_pairs(
        itertools.product(FAMILIES, [FULL, LORA]),
        quick=[*((family, FULL) for family in ("gemma3_text", "qwen3_moe")), ("qwen3", LORA)],
    ),
)
def test_what_autograd_saves_is_counted(family, method, record_property):
    """In a packed row with a shared prompt, under bfloat16 autocast; per token, so that copies of weights cancel."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = family_config(family)
    dtype, adapter = (torch.float32, None) if method.trains_all else (torch.bfloat16, LoRAAdapter(r=RANK))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    if adapter is not None:
        adapter.add_to(model)
    groups = random_groups(0, [(128, [64] * 4)] * 3)
    one, three = really_saved(model, groups[:1]), really_saved(model, groups)
    actual = (three - one) / (2 * (128 + 64 * 4))
    counted = count_kept(empty_model(config, dtype, adapter), autocast=True).total
    record_property("figure", f"{counted} bytes per token counted, {actual:.0f} saved: {counted / actual - 1:+.1%}")
    assert counted == pytest.approx(actual, rel=0.05)


@pytest.mark.parametrize(
    ("family", "options", "counted"),
    [
        ("gemma4_text", {}, True),  # heads differ between layers
        ("falcon", {"alibi": True}, False),  # needs its mask
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, False),
    ],
)
def test_every_family_has_an_estimate(family, options, counted):
    from transformers import AutoConfig

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = empty_model(AutoConfig.for_model(family, **options))
    layers = LayerBytes.of(model, autocast=True, width=2)
    assert layers.is_counted == counted
    assert min(*layers.activations(True), *layers.activations(False), layers.cache) > 0


def test_caches_by_hand():
    """Two heads of 32 numbers in bfloat16 for keys and values; 3 prompts of 100 tokens, 12 sequences of 20 more."""
    number = 2 * 2 * 32 * 2
    mistral = family_config("mistral", layers=2)
    mistral.sliding_window, mistral.layer_types = 50, ["full_attention", "sliding_attention"]
    hybrid = family_config("qwen3_5_text", layers=4)  # one layer of four has attention
    for config, expected in [
        (family_config("qwen3", layers=2), 2 * (3 * 100 + 12 * 20)),
        (mistral, (3 * 100 + 12 * 20) + 12 * 50),
        (hybrid, 3 * 100 + 12 * 20),
    ]:
        layers = LayerBytes(config, KeptBytes(0, 0, 0, 0), width=2)
        assert layers.caches(3, 100, 12, 20) == number * expected


def qwen3_06b(layers=28):
    return config(layers, hidden_size=1024, intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8,
                  head_dim=128, vocab_size=151936)  # fmt: skip


def test_parameters_are_those_of_the_model():
    """By hand for Qwen3-0.6B: embeddings, and per layer attention, MLP and norms."""
    attention, mlp, norms = 1024 * 128 * (16 + 8 + 8 + 16), 3 * 1024 * 3072, 2 * 1024 + 2 * 128
    count = 151936 * 1024 + 28 * (attention + mlp + norms) + 1024
    assert count == 596_049_920
    assert footprint_of_method(qwen3_06b(), FULL).policy.weights == 4 * count


def test_a_reference_is_another_copy_of_the_weights():
    without, with_reference = (footprint_of_method(qwen3_06b(4), own) for own in METHODS[:2])
    assert with_reference.resident - without.resident == without.policy.weights
    lora = footprint_of_method(qwen3_06b(4), LORA)
    assert lora.reference == 0
    assert lora.resident < without.resident / 7
    four = footprint_of_method(qwen3_06b(4), Method("", False, four_bits=True))
    linear = 4 * (1024 * 128 * 48 + 3 * 1024 * 3072)
    assert lora.policy.weights - four.policy.weights == pytest.approx(linear * (16 - 4.127) / 8, rel=1e-4)


@pytest.mark.parametrize(
    ("strategy", "per_weight"),
    [("single", 16), ("ddp", 20), ("fsdp2", 2), ("deepspeed_stage_2", 4 + 16 / 8), ("deepspeed_stage_3", 20 / 8)],
)
def test_strategies_divide_as_the_table_of_the_docs(strategy, per_weight):
    whole = footprint_of_method(config(), FULL)
    count = whole.policy.weights / 4
    assert divided(whole, strategy, 8).resident == pytest.approx(per_weight * count, abs=4)
