"""The cascade as CUDA runs it: a kernel that knows only cumulative lengths; and, on a GPU, FlashAttention itself.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads, D head size.
"""

import pytest
import torch
from helpers.forests import Forest, attention_by_sequence, random_forest, relative_error

from pl_grouprl.attention.cascade import cascade_attention, plan_cascade
from pl_grouprl.attention.choice import get_backend
from pl_grouprl.attention.kernels import CPUKernel, VarlenCall
from pl_grouprl.packing import SharedPrefixLayout

SCALE = 0.25
CPU = torch.device("cpu")


class CumulativeKernel:
    """Attention in closed form, from the offsets alone, as FlashAttention gets them."""

    def __init__(self):
        self.calls = []

    def _scores(self, query, key, call, scale):
        cu_query, cu_key = call.cumulative(query.device)
        assert cu_query.dtype == cu_key.dtype == torch.int32
        assert cu_query[-1] == len(query)
        assert cu_key[-1] == len(key)
        assert (cu_query.diff() > 0).all()
        assert (cu_key.diff() > 0).all()
        assert query.stride(-1) == key.stride(-1) == 1
        at_query = torch.searchsorted(cu_query[1:], torch.arange(len(query)), right=True)
        at_key = torch.searchsorted(cu_key[1:], torch.arange(len(key)), right=True)
        seen = at_query[:, None] == at_key[None, :]
        if call.causal:
            place_query = torch.arange(len(query)) - cu_query[at_query]
            place_key = torch.arange(len(key)) - cu_key[at_key]
            seen &= place_key[None, :] <= place_query[:, None]
        repeated = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scores = torch.einsum("qhd,khd->hqk", query.double(), repeated.double()) * scale
        return scores.masked_fill(~seen, float("-inf"))

    def forward(self, query, key, value, call, scale):
        self.calls.append(call)
        scores = self._scores(query, key, call, scale)
        value = value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        lse = scores.logsumexp(-1)
        out = torch.einsum("hqk,khd->qhd", (scores - lse[..., None]).exp(), value.double())
        return out.to(query.dtype), lse.to(torch.promote_types(query.dtype, torch.float32))

    def backward(self, grad, query, key, value, out, lse, call, scale):
        heads = query.shape[1] // key.shape[1]
        wide_key, wide_value = (tensor.double().repeat_interleave(heads, dim=1) for tensor in (key, value))
        weights = (self._scores(query, key, call, scale) - lse.double()[..., None]).exp()
        delta = (grad.double() * out.double()).sum(-1).t()
        grad_scores = weights * (torch.einsum("qhd,khd->hqk", grad.double(), wide_value) - delta[..., None]) * scale
        grad_query = torch.einsum("hqk,khd->qhd", grad_scores, wide_key)
        grad_key = torch.einsum("hqk,qhd->khd", grad_scores, query.double())
        grad_value = torch.einsum("hqk,qhd->khd", weights, grad.double())
        folded = [g.unflatten(1, (key.shape[1], heads)).sum(2) for g in (grad_key, grad_value)]
        return grad_query.to(query.dtype), folded[0].to(key.dtype), folded[1].to(value.dtype)


def packed_inputs(tokens, heads, dtype=torch.float64, size=8):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]


def by_sequence(query, key, value, forest):
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    return attention_by_sequence(query, key, value, forest, SCALE)[0]


@pytest.mark.parametrize("kernel", [CumulativeKernel(), CPUKernel()], ids=["cumulative", "cpu"])
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
def test_plan_with_either_kernel(kernel, depth):
    for seed, heads in enumerate([(4, 4), (4, 2), (3, 1)]):
        forest = random_forest(seed, depth, roots=1 + seed)
        tensors = packed_inputs(sum(forest.lengths), heads)
        plan = plan_cascade(SharedPrefixLayout(*forest), CPU)
        out = cascade_attention(*tensors, plan, SCALE, kernel)
        expected = by_sequence(*tensors, forest)
        weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
        actual_grads = torch.autograd.grad(out, tensors, weights)
        expected_grads = torch.autograd.grad(expected, tensors, weights)
        for one, other in zip((out, *actual_grads), (expected, *expected_grads), strict=True):
            assert relative_error(one, other) < 1e-12


def test_bfloat16_with_the_cumulative_kernel():
    forest = random_forest(0, 3)
    tensors = packed_inputs(sum(forest.lengths), (4, 2), torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out = cascade_attention(*tensors, plan_cascade(SharedPrefixLayout(*forest), CPU), SCALE, CumulativeKernel())
    expected = by_sequence(*wide, forest)
    grads = torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), wide)
    for one, other in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one, other) < 2e-2


def test_one_call_for_all_segments_and_one_for_each_depth_with_descendants():
    # Two prompts under one system prompt, each with two rollouts; and a group of its own.
    layout = SharedPrefixLayout([9, 4, 2, 3, 5, 1, 1, 6, 2], [None, 0, 1, 1, 0, 4, 4, None, 7])
    plan = plan_cascade(layout, CPU)
    assert plan.own == VarlenCall((9, 4, 2, 3, 5, 1, 1, 6, 2), (9, 4, 2, 3, 5, 1, 1, 6, 2), causal=True)
    assert [step.call for step in plan.ancestors] == [
        VarlenCall((16, 2), (9, 6), causal=False),  # all below a root are one run of queries
        VarlenCall((5, 2), (4, 5), causal=False),
    ]
    kernel = CumulativeKernel()
    cascade_attention(*packed_inputs(layout.num_tokens, (2, 2)), plan, SCALE, kernel)
    assert len(kernel.calls) == 3


def test_segments_without_tokens_take_no_call():
    layout = SharedPrefixLayout.from_groups([(4, [0, 0]), (3, [])])
    plan = plan_cascade(layout, CPU)
    assert plan.own.query_lens == (4, 3)
    assert plan.ancestors == ()


def test_cumulative_lengths_by_hand():
    cu_query, cu_key = VarlenCall((3, 1, 2), (2, 2, 5), causal=False).cumulative(CPU)
    assert cu_query.tolist() == [0, 3, 4, 6]
    assert cu_key.tolist() == [0, 2, 4, 9]


# On a GPU -----------------------------------------------------------------------------------------------------------


def on_gpu(forest, heads, dtype, backend, size=64):
    layout = SharedPrefixLayout(*forest)
    tensors = [
        tensor.detach().to("cuda", dtype).transpose(0, 1)[None].requires_grad_()
        for tensor in packed_inputs(layout.num_tokens, heads, size=size)
    ]
    out = get_backend(backend)(*tensors, layout, SCALE)
    weights = torch.linspace(-1, 1, out.numel(), device="cuda").reshape(out.shape).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (6, 1)], ids=str)
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_flash_attention_on_gpu(depth, heads, dtype):
    forest = random_forest(0, depth, roots=3, lengths=(1, 7, 64, 130))
    expected = on_gpu(forest, heads, torch.float32, "reference")
    rounding = [
        relative_error(one.float(), two)
        for one, two in zip(on_gpu(forest, heads, dtype, "reference"), expected, strict=True)
    ]
    actual = on_gpu(forest, heads, dtype, "cascade")
    for one, other, rounded in zip(actual, expected, rounding, strict=True):
        assert one.dtype == dtype
        assert relative_error(one.float(), other) < 2 * rounded + 5e-3


@pytest.mark.gpu
def test_flex_trains_on_gpu():
    forest = random_forest(0, 2, roots=2, lengths=(7, 64, 130))
    for one, other in zip(
        on_gpu(forest, (8, 2), torch.bfloat16, "flex"), on_gpu(forest, (8, 2), torch.float32, "reference"), strict=True
    ):
        assert relative_error(one.float(), other) < 2e-2


@pytest.mark.gpu
def test_auto_takes_flex_for_float32_on_gpu_and_cascade_refuses():
    forest = Forest([20, 4, 6], [None, 0, 0])
    with pytest.raises(RuntimeError, match=r"takes bfloat16 and float16.*use backend 'flex' or bfloat16"):
        on_gpu(forest, (4, 2), torch.float32, "cascade")
    for one, other in zip(
        on_gpu(forest, (4, 2), torch.float32, "auto"), on_gpu(forest, (4, 2), torch.float32, "reference"), strict=True
    ):
        assert relative_error(one, other) < 1e-2


@pytest.mark.gpu
def test_no_host_synchronisation_once_a_layout_is_planned():
    layout = SharedPrefixLayout(*random_forest(0, 3, lengths=(7, 64, 130)))
    tensors = [
        tensor.detach().to("cuda", torch.bfloat16).transpose(0, 1)[None].requires_grad_()
        for tensor in packed_inputs(layout.num_tokens, (8, 2), size=64)
    ]

    def step():
        get_backend("cascade")(*tensors, layout, SCALE).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
