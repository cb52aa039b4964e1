"""Kernels that layers launch on a GPU, and bytes they move, counted without one; liger-kernel's by a stand-in."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from helpers import fake_liger
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
    """Counts operators that compute, and the bytes of what they read and write."""

    def __init__(self):
        super().__init__()
        self.counts, self.moved = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name not in NO_KERNELS:
            self.counts[name] += 1
            self.moved[name] += fake_liger.num_bytes(args, kwargs, out)
        return out


@contextmanager
def counted():
    """Yields counts, complete at its end."""
    fake_liger.LAUNCHED.clear()
    fake_liger.MOVED.clear()
    with Kernels() as kernels:
        yield kernels
    kernels.counts.update(fake_liger.LAUNCHED)
    kernels.moved.update(fake_liger.MOVED)


@pytest.fixture(params=[False, True], ids=["own layers", "fused layers"])
def is_fused(request, monkeypatch):
    if request.param:
        fake_liger.install(monkeypatch)
    return request.param


def one_kernel(function, moved):
    """A function that counts as one kernel, as it is on CUDA; `moved` picks what it reads and writes."""

    def launch(*args, **kwargs):
        with _disable_current_modes():
            out = function(*args, **kwargs)
        fake_liger.LAUNCHED[function.__name__] += 1
        fake_liger.MOVED[function.__name__] += fake_liger.num_bytes(moved(*args))
        return out

    return launch


def merged(out, lse, part, part_lse, where):
    """The merged rows of `out` and `lse` are read and written, and have the size of the part."""
    return [part, part_lse] * 3


def of_update(layers, is_fused, checkpointing):
    """What a decoder of Qwen3-0.6B's widths does over a prompt of 4096 tokens and eight rollouts of 512.

    Returns:
        Kernels of the forward and of the backward pass, and bytes that each moves per token.
    """
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8}
    with torch.device("meta"):
        model = tiny_model("qwen3", num_hidden_layers=layers, head_dim=128, dtype=torch.bfloat16, **shape).model.train()
        layout = SharedPrefixLayout.from_groups([(4096, [512] * 8)])
        tokens = torch.zeros(1, layout.num_tokens, dtype=torch.long)
    if is_fused:
        fuse_layers(model)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    with shared_prefix(model, "cascade"):
        with counted() as forward:
            hidden = model(input_ids=tokens, prefix_layout=layout, use_cache=False).last_hidden_state
        with counted() as backward:
            hidden.sum().backward()
    passes = (forward, backward)
    return [sum(one.counts.values()) for one in passes] + [sum(one.moved.values()) / 8192 for one in passes]


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
def test_a_layer_of_an_update(is_fused, checkpointing, monkeypatch):
    """The backward pass of checkpointing runs the forward pass, too."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: False)  # which knows no meta tensors
    monkeypatch.setattr(cascade, "EagerKernel", lambda scale, softcap: CUDAKernel(scale))
    monkeypatch.setattr(cascade, "merge", one_kernel(cascade.merge, merged))
    monkeypatch.setitem(cascade.CHAIN, "cpu", 0)
    monkeypatch.setitem(cascade.LONG_RUN, "cpu", 1)
    most, least = (of_update(layers, is_fused, checkpointing) for layers in (2, 1))
    forward, backward, *moved = (more - fewer for more, fewer in zip(most, least, strict=True))
    assert forward <= (22 if is_fused else 60)
    assert backward <= {False: (108, 166), True: (39, 59)}[is_fused][checkpointing]
    # KiB per token, of which linear layers move 48 and 96 (143 with checkpointing).
    assert moved[0] / 1024 < (143 if is_fused else 364)
    assert moved[1] / 1024 < {False: (786, 1135), True: (253, 381)}[is_fused][checkpointing]


def test_a_decoding_step_of_qwen3_0_6b(is_fused, monkeypatch):
    """With all layers and tokens of it; widths change nothing."""
    monkeypatch.setattr(attention, "attend_runs", one_kernel(attention.attend_runs, lambda *_: []))
    monkeypatch.setattr(attention, "merge", one_kernel(attention.merge, lambda *_: []))
    shape = {"vocab_size": 151_936, "hidden_size": 16, "intermediate_size": 16}
    model = tiny_model("qwen3", num_hidden_layers=28, dtype=torch.bfloat16, **shape)
    if is_fused:
        fuse_layers(model)
    steps, step = [], StaticBatch._step

    def watched(batch, logits):
        with counted() as kernels:
            step(batch, logits)
        steps.append(kernels.counts)

    monkeypatch.setattr(StaticBatch, "_step", watched)
    engine = HFRolloutEngine(model)
    engine.generate([[5] * 300], SamplingConfig(max_new_tokens=4), num_generations=3, seed=0)
    assert sum(steps[-1].values()) <= (700 if is_fused else 1_760), steps[-1]
