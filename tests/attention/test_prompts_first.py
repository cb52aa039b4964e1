"""Rows with all prompts before all rollouts: the same results as in depth-first order, on slices instead of gathers.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

from collections import Counter

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from helpers.forests import visible_by_definition
from helpers.tiny_models import random_groups, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from pl_grouprl.attention import shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.cascade import cascade_attention, plan_cascade
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule, dense_mask
from pl_grouprl.attention.backends.kernels import CPUKernel, CUDAKernel, EagerKernel
from pl_grouprl.models.score import score
from pl_grouprl.packing import SharedPrefixLayout, draw_forest, pack
from pl_grouprl.packing.batch import lay_out_forest

CPU, SCALE = torch.device("cpu"), 0.25
GROUPS = [(5, [3, 0, 4]), (2, [6]), (7, [1, 2])]
DEPTH_FIRST = SharedPrefixLayout.from_groups(GROUPS)
PROMPTS_FIRST = SharedPrefixLayout([5, 2, 7, 3, 0, 4, 6, 1, 2], [None, None, None, 0, 0, 0, 1, 2, 2])
ORDER = PROMPTS_FIRST.depth_first_places
"""For each token of the row with prompts first, its index in the row in depth-first order."""

RULES = [{}, {"window": 4}, {"chunk": 3}]


def test_the_layout_is_the_depth_first_one_but_for_the_order():
    assert (DEPTH_FIRST.depth_first, PROMPTS_FIRST.depth_first) == (True, False)
    assert ORDER.tolist() == [*range(5), 12, 13, *range(20, 27), *range(5, 12), *range(14, 20), *range(27, 30)]
    assert torch.equal(DEPTH_FIRST.depth_first_places, torch.arange(30))
    for name in ("position_ids", "multiplicity"):
        assert torch.equal(getattr(PROMPTS_FIRST, name), getattr(DEPTH_FIRST, name)[ORDER])
    for name in ("repeated_lengths", "token_ratio", "attention_pairs", "num_groups"):
        assert getattr(PROMPTS_FIRST, name) == getattr(DEPTH_FIRST, name)
    assert draw_forest(PROMPTS_FIRST) == draw_forest(DEPTH_FIRST)


@pytest.mark.parametrize("limit", RULES, ids=str)
def test_each_token_sees_the_same(limit):
    rule = AttentionRule(SCALE, **limit)
    mask, expected = dense_mask(PROMPTS_FIRST, rule, CPU), dense_mask(DEPTH_FIRST, rule, CPU)
    assert torch.equal(mask, expected[ORDER[:, None], ORDER])
    lengths, parents = zip(*[(segment.length, segment.parent) for segment in PROMPTS_FIRST.segments], strict=True)
    forest = type("Forest", (), {"lengths": lengths, "parents": parents})
    assert limit or torch.equal(mask, visible_by_definition(forest))


def tensors_of(order, heads=(4, 2), layout=DEPTH_FIRST):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], layout.num_tokens, 8), (heads[1], layout.num_tokens, 8), (heads[1], layout.num_tokens, 8)]
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64)[:, order] for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


class _Gathers(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("aten::index"):
            self.names[func.name().removeprefix("aten::").removesuffix("_")] += 1
        return func(*args, **(kwargs or {}))


class _ByProblem:
    """A kernel that runs each problem of a call by itself on copies, so its bits do not depend on the others."""

    def problems(self, call):
        row = torch.arange(30)
        queries, keys = row[call.queries].split(call.query_lens), row[call.keys].split(call.key_lens)
        for own_queries, own_keys in zip(queries, keys, strict=True):
            seen = torch.ones(len(own_queries), len(own_keys), dtype=torch.bool)
            if call.causal:
                seen = seen.tril(len(own_keys) - len(own_queries))
            if call.window is not None:
                seen = seen.triu(len(own_keys) - len(own_queries) - call.window + 1)
            yield own_queries, own_keys, seen

    def scores(self, query, key, seen):
        return (torch.einsum("qhd,khd->hqk", query, key) * SCALE).masked_fill(~seen, -torch.inf)

    def forward(self, query, key, value, call):
        for queries, keys, seen in self.problems(call):
            key_P, value_P = (tensor[keys].repeat_interleave(2, dim=1) for tensor in (key, value))
            scores = self.scores(query[queries], key_P, seen)
            yield queries, torch.einsum("hqk,khd->qhd", scores.softmax(-1), value_P), scores.logsumexp(-1)

    def backward(self, grad, query, key, value, out, lse, call):
        for queries, keys, seen in self.problems(call):
            key_P, value_P = (tensor[keys].repeat_interleave(2, dim=1) for tensor in (key, value))
            weights = (self.scores(query[queries], key_P, seen) - lse[:, queries, None]).exp()
            delta = (grad[queries] * out[queries]).sum(-1).t()[..., None]
            slopes = (torch.einsum("qhd,khd->hqk", grad[queries], value_P) - delta) * weights * SCALE
            by_key = torch.einsum("hqk,qhd->khd", slopes, query[queries])
            by_value = torch.einsum("hqk,qhd->khd", weights, grad[queries])
            by_keys = [tensor.unflatten(1, (2, 2)).sum(2) for tensor in (by_key, by_value)]
            yield queries, keys, torch.einsum("hqk,khd->qhd", slopes, key_P), *by_keys


def on_both(limit, kernel):
    """The expected results and those found, both with prompts first; operators that gather; the second plan."""
    results, gathers = [], []
    for layout, order in ((DEPTH_FIRST, torch.arange(30)), (PROMPTS_FIRST, ORDER)):
        plan = plan_cascade(layout, AttentionRule(SCALE, **limit), CPU)
        tensors = [tensor.detach().transpose(0, 1).contiguous().requires_grad_() for tensor in tensors_of(order)]
        upstream = torch.linspace(-1, 1, 30 * 32, dtype=torch.float64).reshape(30, 4, 8)[order]
        with flash_attention_on_cpu(), _Gathers() as counted:
            out = cascade_attention(*tensors, plan, kernel)
            results.append([out, *torch.autograd.grad(out, tensors, upstream)])
        gathers.append(counted.names)
    return [tensor[ORDER] for tensor in results[0]], results[1], gathers, plan


@pytest.fixture
def as_on_cuda(monkeypatch):
    """Short runs share a call; the run below the first prompt would be a call of its own."""
    monkeypatch.setitem(cascade.LONG_RUN, "cpu", 7)
    monkeypatch.setitem(cascade.CHAIN, "cpu", 0)


@pytest.mark.parametrize("limit", RULES, ids=str)
def test_the_cascade_bitwise(limit, as_on_cuda):
    expected, found, _, _ = on_both(limit, _ByProblem())
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernel", [CPUKernel(SCALE), EagerKernel(SCALE), CUDAKernel(SCALE)])
@pytest.mark.parametrize("limit", RULES, ids=str)
def test_each_kernel_and_slices_instead_of_gathers(limit, kernel, as_on_cuda):
    expected, found, gathers, plan = on_both(limit, kernel)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    if not limit:
        (call,) = plan.others
        assert (call.queries, call.keys) == (slice(14, 30), slice(0, 14))
        if isinstance(kernel, CUDAKernel):
            assert gathers == [Counter(index_select=11, index_copy=2, index_add=3), Counter()]


@pytest.mark.parametrize("backend", ["reference", "cascade", "prefix_grouper"])
def test_each_backend(backend):
    if backend == "prefix_grouper":
        pytest.importorskip("prefix_grouper")
    outputs = []
    for layout, order in ((DEPTH_FIRST, torch.arange(30)), (PROMPTS_FIRST, ORDER)):
        tensors = [tensor[None] for tensor in tensors_of(order)]
        outputs.append(get_backend(backend)(*tensors, layout, AttentionRule(SCALE))[0])
    torch.testing.assert_close(outputs[1], outputs[0][ORDER], atol=1e-12, rtol=0)


@pytest.fixture
def prompts_first(monkeypatch):
    """Pack as for CUDA."""

    def lay_out(*args, **options):
        return lay_out_forest(*args, **options | {"prompts_first": True})

    monkeypatch.setattr("pl_grouprl.packing.batch.lay_out_forest", lay_out)


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_a_model_scores_and_trains_the_same(family, prompts_first, request):
    model, groups = tiny_model(family, dtype=torch.float64), random_groups(0, GROUPS)
    results = []
    for batch in (pack(groups), None):
        if batch is None:
            request.getfixturevalue("monkeypatch").undo()
            batch = pack(groups)
        with shared_prefix(model):
            logprobs_N = score(model, batch).logprobs_N
            gradients = torch.autograd.grad(logprobs_N.square().sum(), list(model.parameters()), allow_unused=True)
        results.append([logprobs_N, *(grad for grad in gradients if grad is not None)])
        assert batch.layout.depth_first == (len(results) == 2)
    torch.testing.assert_close(results[0], results[1], atol=1e-12, rtol=1e-10)


def test_deeper_forests_and_one_group_keep_their_order(prompts_first):
    groups = random_groups(0, [(4, [3, 3]), (2, [5, 1])])
    first = groups[0].rollouts[0]
    branched = [type(groups[0])(groups[0].prompt_ids, [first, type(first)([*first.token_ids, 1]), first]), groups[1]]
    for batch in (pack(branched, min_saved_tokens=1), pack(groups[:1]), pack(groups, "repeated")):
        assert batch.layout.depth_first or batch.sharing == "repeated"
    assert pack(groups).layout.segments[1].parent is None
