"""The cascade with each kernel: its plan, and the calls it takes; and, on a GPU, FlashAttention itself.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from functools import partial

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from helpers.forests import Forest, random_forest, relative_error, sequences
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.cascade import cascade_attention, merge, plan_cascade
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.attention.backends.kernels import CPUKernel, CUDAKernel, EagerKernel, VarlenCall
from pl_grouprl.packing import SharedPrefixLayout

SCALE = 0.25
RULE = AttentionRule(SCALE)
CPU = torch.device("cpu")

KERNELS = {"cpu": CPUKernel(SCALE), "eager": EagerKernel(SCALE), "flash": CUDAKernel(SCALE)}


class Recorder:
    """A kernel that keeps the calls it was given."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, []

    def forward(self, query, key, value, call):
        self.calls.append(call)
        return self.kernel.forward(query, key, value, call)


@pytest.fixture(params=KERNELS)
def kernel(request):
    with flash_attention_on_cpu():
        yield KERNELS[request.param]


def packed_inputs(tokens, heads, dtype=torch.float64, size=8):
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, h, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]


def by_definition(query, key, value, forest, window=None, chunk=None, softcap=None, sinks_H=None):
    """Attention under a rule, from the tokens that each token sees in the sequences that hold it."""
    tokens, heads = len(query), query.shape[1] // key.shape[1]
    seen = torch.zeros(tokens, tokens, dtype=torch.bool)
    for sequence in sequences(forest):
        for place, token in enumerate(sequence):
            first = 0 if window is None else max(0, place + 1 - window)
            if chunk is not None:
                first = max(first, place // chunk * chunk)
            seen[token, sequence[first : place + 1]] = True
    key, value = (tensor.repeat_interleave(heads, dim=1) for tensor in (key, value))
    scores = torch.einsum("thd,uhd->htu", query, key) * SCALE
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks_H is None:
        return torch.einsum("htu,uhd->thd", scores.softmax(-1), value)
    with_sink = torch.cat([scores, sinks_H[:, None, None].expand(-1, tokens, 1)], dim=-1)
    return torch.einsum("htu,uhd->thd", with_sink.softmax(-1)[..., :-1], value)


def compare(out, expected, tensors, tolerance):
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    actual_grads = torch.autograd.grad(out, tensors, weights)
    expected_grads = torch.autograd.grad(expected, tensors, weights)
    for one, other in zip((out, *actual_grads), (expected, *expected_grads), strict=True):
        assert relative_error(one, other) < tolerance


LIMITS = [{}, {"window": 1}, {"window": 4}, {"window": 9}, {"chunk": 3}, {"chunk": 8}]


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("limit", LIMITS, ids=str)
def test_plans_windows_and_chunks_with_each_kernel(kernel, limit, depth):
    for seed, heads in enumerate([(4, 4), (4, 2), (3, 1)]):
        forest = random_forest(seed, depth, roots=1 + seed)
        tensors = packed_inputs(sum(forest.lengths), heads)
        plan = plan_cascade(SharedPrefixLayout(*forest), AttentionRule(SCALE, **limit), CPU)
        compare(cascade_attention(*tensors, plan, kernel), by_definition(*tensors, forest, **limit), tensors, 1e-11)
        sinks = torch.linspace(-1, 2, heads[0], dtype=torch.float64).requires_grad_()
        out = cascade_attention(*tensors, plan, kernel, sinks)
        compare(out, by_definition(*tensors, forest, **limit, sinks_H=sinks), (*tensors, sinks), 1e-11)


@pytest.mark.parametrize("window", [None, 4])
def test_soft_caps_in_the_cascade(window):
    forest = random_forest(1, 3)
    tensors = packed_inputs(sum(forest.lengths), (4, 2))
    plan = plan_cascade(SharedPrefixLayout(*forest), AttentionRule(SCALE, window=window, softcap=0.7), CPU)
    out = cascade_attention(*tensors, plan, EagerKernel(SCALE, softcap=0.7))
    compare(out, by_definition(*tensors, forest, window=window, softcap=0.7), tensors, 1e-11)


@pytest.mark.parametrize("window", [None, 5])
def test_bfloat16_with_each_kernel(kernel, window):
    forest = random_forest(0, 3)
    tensors = packed_inputs(sum(forest.lengths), (4, 2), torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    plan = plan_cascade(SharedPrefixLayout(*forest), AttentionRule(SCALE, window=window), CPU)
    out = cascade_attention(*tensors, plan, kernel)
    expected = by_definition(*wide, forest, window=window)
    grads = torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), wide)
    for one, other in zip((out, *grads[0]), (expected, *grads[1]), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one, other) < 2e-2


SAVED = {
    torch.ops.aten.bmm.default,
    torch.ops.aten._flash_attention_forward.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def save_attention(context, operator, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize(("limit", "depth"), [({}, 1), ({}, 3), ({"window": 4}, 3)], ids=str)
def test_what_selective_checkpointing_saves_stays_as_the_kernel_returned_it(kernel, limit, depth, monkeypatch):
    def merge_unseen(out, lse, *part):  # a Triton kernel writes without telling autograd, too
        merge(torch.from_numpy(out.detach().numpy()), torch.from_numpy(lse.detach().numpy()), *part)

    monkeypatch.setattr(cascade, "merge", merge_unseen)
    contexts = partial(create_selective_checkpoint_contexts, save_attention)
    for seed, heads in enumerate([(4, 4), (4, 2), (3, 1)]):
        forest = random_forest(seed, depth, roots=1 + seed, lengths=(5, 5, 40))
        tensors = packed_inputs(sum(forest.lengths), heads)
        plan = plan_cascade(SharedPrefixLayout(*forest), AttentionRule(SCALE, **limit), CPU)
        for sinks in ([], [torch.ones(heads[0], dtype=torch.float64, requires_grad=True)]):
            out = checkpoint(
                lambda query, key, value, *sinks, plan=plan: (
                    cascade_attention(query, key, value, plan, kernel, *sinks) * 1.0
                ),
                *tensors, *sinks, use_reentrant=False, context_fn=contexts,
            )  # fmt: skip
            expected = by_definition(*tensors, forest, **limit, sinks_H=next(iter(sinks), None))
            compare(out, expected, (*tensors, *sinks), 1e-11)


def calls_of(plan):
    return [plan.own], list(plan.others)


def test_one_call_for_all_chains_and_one_for_each_depth_with_descendants():
    # Two prompts under one system prompt, each with two rollouts; and a group of its own.
    layout = SharedPrefixLayout([9, 4, 2, 3, 5, 1, 1, 6, 2], [None, 0, 1, 1, 0, 4, 4, None, 7])
    plan = plan_cascade(layout, RULE, CPU)
    own, ancestors = calls_of(plan)
    # Prompts of 4 and 5 continue the chain of 9. The rollouts are too short to copy 13 and 14; 6 is a prompt alone.
    assert own == [VarlenCall((9, 4, 2, 3, 5, 1, 1, 6, 2), (9, 13, 2, 3, 14, 1, 1, 6, 2), causal=True)]
    assert ancestors == [VarlenCall((5, 2, 2), (13, 14, 6), causal=False)]
    kernel = Recorder(CPUKernel(SCALE))
    cascade_attention(*packed_inputs(layout.num_tokens, (2, 2)), plan, kernel)
    assert kernel.calls == own + ancestors


def test_long_runs_below_a_prefix_get_separate_calls_on_slices(kernel):
    # Prompts of 5, 30 and 9 tokens; below them 160, 4 and 128.
    forest = Forest([5, 100, 60, 30, 1, 3, 9, 128], [None, 0, 0, None, 3, 3, None, 6])
    plan = plan_cascade(SharedPrefixLayout(*forest), RULE, CPU)
    assert [(call.queries, call.keys) for call in plan.others] == [
        (slice(5, 165), slice(0, 5)),
        (slice(208, 336), slice(199, 208)),
        (slice(195, 199), slice(165, 195)),
    ]
    assert calls_of(plan)[1][0] == VarlenCall((160,), (5,), causal=False)
    tensors = packed_inputs(sum(forest.lengths), (4, 2))
    compare(cascade_attention(*tensors, plan, kernel), by_definition(*tensors, forest), tensors, 1e-12)


def test_chains_are_bounded(kernel):
    # One segment after another: the sixth would copy 200 keys for 40 tokens.
    forest = Forest([40] * 7, [None, 0, 1, 2, 3, 4, 5])
    plan = plan_cascade(SharedPrefixLayout(*forest), RULE, CPU)
    own, ancestors = calls_of(plan)
    assert own == [VarlenCall((40,) * 7, (40, 80, 120, 160, 200, 40, 80), causal=True)]
    assert ancestors == [VarlenCall((80,), (200,), causal=False)]
    assert plan.others[0].keys == slice(0, 200)
    tensors = packed_inputs(280, (4, 2))
    compare(cascade_attention(*tensors, plan, kernel), by_definition(*tensors, forest), tensors, 1e-12)


def test_all_children_of_a_piece_continue_its_chain_or_none(kernel):
    # Those of 9, 3 and 1 tokens are too short to copy 65 keys each; that of 245 would have more than 256.
    forest = Forest([5, 20, 40, 9, 3, 1, 3, 10, 24, 245], [None, 0, 1, 2, 2, 2, 1, 0, 7, 7])
    tensors = packed_inputs(sum(forest.lengths), (4, 2))
    plan = plan_cascade(SharedPrefixLayout(*forest), RULE, CPU)
    assert plan.own.key_lens == (5, 25, 65, 9, 3, 1, 28, 15, 24, 245)
    compare(cascade_attention(*tensors, plan, kernel), by_definition(*tensors, forest), tensors, 1e-12)


def test_prompts_with_rollouts_have_no_chains():
    layout = SharedPrefixLayout.from_groups([(40, [40] * 5), (3, [60, 90])])
    plan = plan_cascade(layout, RULE, CPU)
    assert plan.own.queries == plan.own.keys == slice(0, layout.num_tokens)
    assert plan.own.query_lens == plan.own.key_lens


def test_parts_of_a_token():
    layout = SharedPrefixLayout([9, 4, 2, 3], [None, 0, 1, 1])
    plan = plan_cascade(layout, RULE, CPU)
    # A leaf asks itself and the chain above it; a key of the root is in its own chain, in that of the middle, and asked
    # by the leaves.
    assert (plan.parts_of_query, plan.parts_of_key) == (2, 3)
    windowed = plan_cascade(layout, AttentionRule(SCALE, window=4), CPU)
    assert (windowed.parts_of_query, windowed.parts_of_key) == (1, 3)  # the middle's tail is taken by both leaves
    assert plan_cascade(SharedPrefixLayout([], []), RULE, CPU).parts_of_query == 0


def test_a_window_takes_one_call_with_the_reachable_prefix():
    layout = SharedPrefixLayout([9, 4, 2, 3, 5], [None, 0, 1, 1, None])
    own, ancestors = calls_of(plan_cascade(layout, AttentionRule(SCALE, window=4), CPU))
    assert own == [VarlenCall((9, 4, 2, 3, 5), (9, 7, 5, 6, 5), causal=True, window=4)]
    assert ancestors == []


def test_empty_segments_need_no_call():
    layout = SharedPrefixLayout.from_groups([(4, [0, 0]), (3, [])])
    own, ancestors = calls_of(plan_cascade(layout, RULE, CPU))
    assert [call.query_lens for call in own] == [(4, 3)]
    assert ancestors == []


# On a GPU -----------------------------------------------------------------------------------------------------------


def on_gpu(forest, heads, dtype, backend, size=64, rule=RULE):
    layout = SharedPrefixLayout(*forest)
    tensors = [
        tensor.detach().to("cuda", dtype).transpose(0, 1)[None].requires_grad_()
        for tensor in packed_inputs(layout.num_tokens, heads, size=size)
    ]
    out = get_backend(backend)(*tensors, layout, rule)
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
@pytest.mark.parametrize("limit", [{"window": 40}, {"window": 100}, {"chunk": 50}], ids=str)
def test_windows_and_chunks_on_gpu(limit):
    forest, rule = random_forest(0, 2, roots=2, lengths=(7, 64, 130)), AttentionRule(SCALE, **limit)
    expected = on_gpu(forest, (8, 2), torch.float32, "reference", rule=rule)
    for one, other in zip(on_gpu(forest, (8, 2), torch.bfloat16, "cascade", rule=rule), expected, strict=True):
        assert relative_error(one.float(), other) < 2e-2


@pytest.mark.gpu
def test_flex_trains_on_gpu():
    forest = random_forest(0, 2, roots=2, lengths=(7, 64, 130))
    found, expected = on_gpu(forest, (8, 2), torch.bfloat16, "flex"), on_gpu(forest, (8, 2), torch.float32, "reference")
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one.float(), other) < 2e-2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "cascade"])
def test_float32_on_gpu(backend):
    forest = random_forest(0, 2, roots=2, lengths=(7, 64, 130))
    found, expected = (on_gpu(forest, (4, 2), torch.float32, own) for own in (backend, "reference"))
    for one, other in zip(found, expected, strict=True):
        assert relative_error(one, other) < 1e-2


@pytest.mark.gpu
def test_no_host_synchronization_once_a_layout_is_planned():
    layout = SharedPrefixLayout(*random_forest(0, 3, lengths=(7, 64, 130)))
    tensors = [
        tensor.detach().to("cuda", torch.bfloat16).transpose(0, 1)[None].requires_grad_()
        for tensor in packed_inputs(layout.num_tokens, (8, 2), size=64)
    ]

    def step():
        get_backend("cascade")(*tensors, layout, RULE).sum().backward()

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
