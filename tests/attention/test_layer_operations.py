"""What a layer does around attention in the CUDA path: no synchronization, few copies.

FlashAttention runs in closed form on CPU here, so that all around it is the code that runs on a GPU.
"""

from collections import Counter

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from torch.utils._python_dispatch import TorchDispatchMode

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends import cascade as cascade_plan
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.attention.backends.kernels import CUDAKernel
from pl_grouprl.packing import SharedPrefixLayout, pack
from pl_grouprl.types import Rollout, RolloutGroup

LAYOUTS = {
    "one group": SharedPrefixLayout.from_groups([(20, [5, 7])]),
    "groups": SharedPrefixLayout.from_groups([(20, [5, 7]), (9, [3, 4])]),
    "a tree": SharedPrefixLayout([9, 4, 2, 3, 5], [None, 0, 1, 1, 0]),
}
WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "unique_dim", "_unique2", "bincount"}
"""Operators whose result decides a shape or goes to the host."""

OF_THE_MARKER = {"_local_scalar_dense"}
"""Reading the marker in place of the mask, which is always on the CPU."""

MADE_ON_HOST = {"lift_fresh", "arange", "cumsum", "repeat_interleave"}
"""What building an index or a mask takes; on CUDA some of it is a copy to the device."""

COPIES = {"index_select", "index", "index_copy_", "index_add_", "clone", "copy_", "_to_copy", "cat", "constant_pad_nd"}


class Operations(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def cuda_path(monkeypatch):
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    monkeypatch.setitem(cascade_plan.CHAIN, "cpu", cascade_plan.CHAIN["cuda"])
    with flash_attention_on_cpu():
        yield


def of_a_step(num_layers, layout, **inputs):
    """Operators of one step of a Qwen3, forward and backward, all plans made."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, dtype=torch.bfloat16,
    )  # fmt: skip
    decoder = Qwen3ForCausalLM._from_config(config).model
    inputs = {"input_ids": torch.arange(layout.num_tokens)[None], "prefix_layout": layout, "use_cache": False} | inputs
    with shared_prefix(decoder, "cascade"), Operations() as operations:
        hidden = decoder(**inputs).last_hidden_state
        hidden.sum().backward()
    return operations.counts


@pytest.mark.parametrize("layout", LAYOUTS)
def test_further_layers_neither_synchronize_nor_build_plans(layout):
    layout = LAYOUTS[layout]
    of_a_step(1, layout)
    further = of_a_step(4, layout) - of_a_step(2, layout)
    assert further["_flash_attention_backward"] == 2 * (1 + max(layout.depths))
    assert further.keys() & (WAITS | MADE_ON_HOST) <= OF_THE_MARKER


def test_before_the_layers_only_the_callers_positions_are_checked():
    batch = pack([RolloutGroup([5, 6, 7], [Rollout([8, 9]), Rollout([10])])])
    of_a_step(1, batch.layout, **batch.model_inputs)
    waits = of_a_step(1, batch.layout, **batch.model_inputs).keys() & WAITS
    assert waits == OF_THE_MARKER
    own = {**batch.model_inputs, "position_ids": batch.model_inputs["position_ids"] + 1}
    assert of_a_step(1, batch.layout, **own)["equal"] == 1


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        # The merge: two bfloat16 tensors become float32, and back; the contiguous log-sum-exp and its part, backward.
        # The kernel's own output and log-sum-exp are copied, because checkpointing may have saved them.
        ("one group", {"_to_copy": 3, "copy_": 1, "clone": 2}),
        # Query, key, value, output and log-sum-exp by index, and back; backward the gradient too.
        ("groups", {"_to_copy": 3, "copy_": 1, "clone": 1, "index_select": 11, "index_copy_": 2, "index_add_": 3}),
    ],
)
def test_copies_of_a_layer(name, allowed):
    layout, rule = LAYOUTS[name], AttentionRule(0.3)
    tensors = [
        torch.randn(1, layout.num_tokens, heads, 8, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for heads in (4, 2, 2)
    ]
    for _ in range(2):  # the first makes the plan
        with Operations() as operations:
            out = get_backend("cascade")(*tensors, layout, rule)
            torch.autograd.grad(out, tensors, torch.ones(out.shape, dtype=out.dtype))
    assert {name: count for name, count in operations.counts.items() if name in COPIES} == allowed
