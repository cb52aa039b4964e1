"""Kernels that layers launch on a GPU, counted on a CPU: operators that compute, and liger-kernel's, by a stand-in."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from helpers import fake_liger
from helpers.flash_attention import flash_attention_on_cpu
from helpers.tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.kernels import CUDAKernel
from pl_grouprl.models.kernels import fuse_layers
from pl_grouprl.packing import SharedPrefixLayout
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.hf import attention
from pl_grouprl.rollout.hf.static_batch import StaticBatch
from pl_grouprl.types import SamplingConfig

NO_KERNELS = {
    *("view", "_unsafe_view", "transpose", "t", "squeeze", "unsqueeze", "expand", "slice", "select", "detach"),
    *("permute", "unbind", "split", "as_strided", "alias", "reshape", "_reshape_alias", "split_with_sizes", "view_as"),
    *("empty_like", "empty", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "is_same_size"),
    *("promote_types", "unfold", "narrow"),
}


class Kernels(TorchDispatchMode):
    """Counts operators that compute."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ not in NO_KERNELS:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted():
    """Yields counts, complete at its end."""
    fake_liger.LAUNCHED.clear()
    with Kernels() as kernels:
        yield kernels.counts
    kernels.counts.update(fake_liger.LAUNCHED)


@pytest.fixture(params=[False, True], ids=["own layers", "fused layers"])
def is_fused(request, monkeypatch):
    if request.param:
        fake_liger.install(monkeypatch)
    return request.param


def one_kernel(function):
    """A function that counts as one kernel, as it is on CUDA."""

    def launch(*args, **kwargs):
        with _disable_current_modes():
            out = function(*args, **kwargs)
        fake_liger.LAUNCHED[function.__name__] += 1
        return out

    return launch


def of_update(layers, is_fused, checkpointing):
    """Kernels of the forward and the backward pass of a decoder over a prompt and its eight rollouts."""
    shape = {"hidden_size": 80, "intermediate_size": 304, "head_dim": 32, "num_key_value_heads": 1}
    model = tiny_model("qwen3", num_hidden_layers=layers, dtype=torch.bfloat16, **shape).model.train()
    if is_fused:
        fuse_layers(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layout = SharedPrefixLayout.from_groups([(64, [16] * 8)])
    inputs = {"input_ids": torch.arange(layout.num_tokens)[None] % 61, "prefix_layout": layout, "use_cache": False}
    with shared_prefix(model, "cascade"):
        with counted() as forward:
            hidden = model(**inputs).last_hidden_state
        with counted() as backward:
            hidden.sum().backward()
    return sum(forward.values()), sum(backward.values())


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_layer_of_an_update(is_fused, checkpointing, monkeypatch):
    """The backward pass of checkpointing runs the forward pass, too."""
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    monkeypatch.setattr(cascade, "merge", one_kernel(cascade.merge))
    monkeypatch.setitem(cascade.CHAIN, "cpu", 0)
    monkeypatch.setitem(cascade.LONG_RUN, "cpu", 1)
    with flash_attention_on_cpu():
        most, least = (of_update(layers, is_fused, checkpointing) for layers in (2, 1))
    forward, backward = (more - fewer for more, fewer in zip(most, least, strict=True))
    assert forward <= (23 if is_fused else 61)
    assert (
        backward
        <= {(False, False): 107, (False, True): 166, (True, False): 40, (True, True): 61}[is_fused, checkpointing]
    )


def test_a_decoding_step_of_qwen3_0_6b(is_fused, monkeypatch):
    """With all layers and tokens of it; widths change nothing."""
    monkeypatch.setattr(attention, "attend_runs", one_kernel(attention.attend_runs))
    monkeypatch.setattr(attention, "merge", one_kernel(attention.merge))
    shape = {"vocab_size": 151_936, "hidden_size": 16, "intermediate_size": 16}
    model = tiny_model("qwen3", num_hidden_layers=28, dtype=torch.bfloat16, **shape)
    if is_fused:
        fuse_layers(model)
    steps, step = [], StaticBatch._step

    def watched(batch, logits):
        with counted() as kernels:
            step(batch, logits)
        steps.append(kernels)

    monkeypatch.setattr(StaticBatch, "_step", watched)
    engine = HFRolloutEngine(model)
    engine.generate([[5] * 300], SamplingConfig(max_new_tokens=4), num_generations=3, seed=0)
    assert sum(steps[-1].values()) <= (700 if is_fused else 1_760), steps[-1]
