"""Decisions for a GPU that does not exist: each depends only on what it is told."""

from types import SimpleNamespace

import pytest
import torch
from helpers.tiny_models import tiny_model

import pl_grouprl
from pl_grouprl.utilities.device_defaults import (
    ALWAYS_FITS,
    GIB,
    FastFloat32,
    activation_bytes,
    cached_bytes,
    checkpoints_activations,
    free_memory,
    fuses_adamw,
    sequences_at_once,
    tokens_per_micro_batch,
)


@pytest.mark.parametrize(
    ("gpu", "bfloat16", "accelerator", "expected"),
    [
        (True, True, "auto", "bf16-mixed"),
        (True, True, "gpu", "bf16-mixed"),
        (True, True, "cuda", "bf16-mixed"),
        (True, True, "cpu", "32-true"),
        (True, False, "auto", "32-true"),  # a V100
        (False, False, "auto", "32-true"),
    ],
)
def test_precision(gpu, bfloat16, accelerator, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
    assert pl_grouprl.default_precision(accelerator) == expected


def weight(device, is_floating_point=True):
    return SimpleNamespace(device=torch.device(device), is_floating_point=lambda: is_floating_point)


def test_adamw_is_fused_if_all_weights_are_on_a_gpu_and_no_gradient_is_scaled():
    assert fuses_adamw([weight("cuda"), weight("cuda:1")]) is True
    assert fuses_adamw([weight("cuda"), weight("cpu")]) is None
    assert fuses_adamw([weight("cuda"), weight("cuda", is_floating_point=False)]) is None
    assert fuses_adamw([weight("cuda")], scaler=object()) is None
    assert fuses_adamw([torch.zeros(1)]) is None


def test_activations_are_recomputed_on_a_gpu_unless_it_is_set():
    found = [checkpoints_activations(*own) for own in ((None, "cuda"), (None, "cpu"), (False, "cuda"), (True, "cpu"))]
    assert found == [True, False, False, True]
    assert checkpoints_activations("attention", "cpu") == "attention"


def test_sequences_at_once():
    assert sequences_at_once(128, 80 * 2**20, lambda: 60 * GIB) == 128  # 10 GiB
    assert sequences_at_once(1024, 352 * 2**20, lambda: 70 * GIB) == 64  # 35 GiB hold 101
    assert sequences_at_once(4, 100 * GIB, lambda: 70 * GIB) == 1
    assert sequences_at_once(256, ALWAYS_FITS // 256, lambda: pytest.fail("asked")) == 256


def test_tokens_per_micro_batch():
    mib = 2**20
    assert tokens_per_micro_batch(40 * GIB, 8 * GIB, mib) == 20 * 1024  # 70 % of 40, minus 8
    assert tokens_per_micro_batch(10 * GIB, 6 * GIB, mib) == 1024
    assert tokens_per_micro_batch(10 * GIB, 60 * GIB, mib) == 1024


def test_free_memory_of_a_gpu_counts_what_its_allocator_does_not_use(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 30 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 10 * GIB)
    assert free_memory(torch.device("cuda")) == 25 * GIB
    assert free_memory(torch.device("cpu")) > 0


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text"])
def test_cached_bytes_are_those_of_a_cache(family):
    model = tiny_model(family)
    cache = model(torch.arange(1, 6)[None], use_cache=True).past_key_values
    held = sum(states.nbytes for layer in cache.layers for states in (layer.keys, layer.values))
    assert cached_bytes(model.config, 4) == held // 5
    assert cached_bytes(SimpleNamespace(), 4) == 0


class Mixed:
    """A config whose layers differ, which transformers does not let anybody read from the whole."""

    def __init__(self, head_sizes):
        self.layer_types = ["sliding_attention", "full_attention", "linear_attention"]
        common = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 8}
        self.per_layer_config = [SimpleNamespace(**common, head_dim=size) for size in head_sizes]

    def __getattr__(self, name):
        raise RuntimeError(f"{name} differs between layers")


def test_layers_of_different_sizes():
    config = Mixed([8, 16, 64])
    assert cached_bytes(config, 2) == 2 * 2 * (2 * 8 + 2 * 16)
    kept = [40 * 32 + 12 * 6 * size + 10 * 8 for size in (8, 16, 64)]
    assert activation_bytes(config, 2, checkpointing=False) == sum(kept) + kept[2]
    assert activation_bytes(config, 4, checkpointing=True) == 3 * 4 * 32 + 4 * kept[2]
    saved = 4 * (2 * 8 + 4) + 4 * (2 * 16 + 4)  # of 4 heads, in two layers
    assert activation_bytes(config, 2, checkpointing="attention") == 3 * 4 * 32 + saved + 2 * kept[2]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "qwen3_moe"])
def test_activations_are_not_underestimated(family, checkpointing):
    """Against what autograd saves, counted by storage; only tensors with as many rows as there are tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_hidden_layers": 3}
    model, tokens = tiny_model(family, **sizes).train(), 97
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    saved = {}

    def pack(tensor):
        if any(size % tokens == 0 for size in tensor.shape):
            saved[tensor.untyped_storage().data_ptr()] = tensor, tensor.untyped_storage().nbytes()
        return tensor

    decoder = model.get_decoder()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        decoder(torch.arange(tokens)[None] % 50, use_cache=False)
    held = sum(size for _, size in saved.values())
    assert 0 < held <= tokens * activation_bytes(model.config, 2, checkpointing)


def unset_float32():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = torch.backends.mkldnn.matmul.fp32_precision = "none"


@pytest.fixture
def unset():
    """As in a new process, whatever ran before in this one."""
    unset_float32()
    yield
    unset_float32()


def settings():
    matmuls = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    return [torch.get_float32_matmul_precision(), *(matmul.fp32_precision for matmul in matmuls)]


@pytest.mark.usefixtures("unset")
def test_float32_products_use_tf32_on_a_gpu_until_the_run_ends():
    before, fast = settings(), FastFloat32()
    assert not fast.open("cpu")
    assert settings() == before
    assert fast.open("cuda")
    assert settings() == ["high", "tf32", "tf32"]
    fast.close()
    assert settings() == before


@pytest.mark.usefixtures("unset")
@pytest.mark.parametrize("chosen", ["highest", "medium"])
def test_a_chosen_float32_precision_is_kept(chosen):
    torch.set_float32_matmul_precision(chosen)
    before, fast = settings(), FastFloat32()
    assert not fast.open("cuda")
    fast.close()
    assert settings() == before
