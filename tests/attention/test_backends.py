"""Every backend under every rule (windows, chunks, soft caps, sinks, images) against each sequence alone.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

import dataclasses

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from helpers.forests import (
    Forest,
    Rule,
    attention_by_sequence,
    random_blocks,
    random_forest,
    relative_error,
    visible_in_sequence,
)
from helpers.sweeps import sweep
from torch._subclasses.fake_tensor import FakeTensorMode

from pl_grouprl.attention.backends import cascade, choice
from pl_grouprl.attention.backends.choice import choose, get_backend
from pl_grouprl.attention.backends.interface import AttentionRule, dense_mask
from pl_grouprl.attention.backends.kernels import CUDAKernel
from pl_grouprl.packing import SharedPrefixLayout

SCALE = 0.3
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6}
HEADS = [(4, 4), (4, 2), (6, 1)]
LIMITS = [1, 2, 3, 5, 8, 13, 200]
"""Windows and chunks: within a segment, over several, longer than every sequence."""

CPU = torch.device("cpu")


def inputs(forest, heads=(4, 2), size=8, value_size=8, dtype=torch.float64, seed=0):
    """Query, key, value and one sink per head, with gradient."""
    generator, tokens = torch.Generator().manual_seed(seed), sum(forest.lengths)
    shapes = [(1, heads[0], tokens, size), (1, heads[1], tokens, size), (1, heads[1], tokens, value_size), heads[:1]]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for shape in shapes]


def to_package(rule, sinks=None):
    return AttentionRule(SCALE, rule.window, rule.chunk, rule.softcap, sinks, rule.blocks, rule.window_bounds_blocks)


def output_and_gradients(out, tensors):
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


def run(backend, forest, rule, tensors, sinks=True):
    """The backend's output, and the gradients of all that it was given."""
    *states, sinks_H = tensors
    given = to_package(rule, sinks_H if sinks else None)
    out = get_backend(backend)(*states, SharedPrefixLayout(*forest), given)
    return output_and_gradients(out, tensors if sinks else states)


def by_definition(forest, rule, tensors, sinks=True):
    *states, sinks_H = wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    out = attention_by_sequence(*states, forest, SCALE, rule, sinks_H if sinks else None)
    return output_and_gradients(out, wide if sinks else states)


def assert_same(actual, expected, dtype, tolerance):
    """Errors over the norm of what is expected, or over 1, where gradients of size 1 cancel (a window of 1)."""
    for name, one, other in zip(("output", "query", "key", "value", "sinks"), actual, expected, strict=False):
        assert one.shape == other.shape, name
        assert one.dtype == dtype, name
        assert (one - other).norm() < tolerance * other.norm().clamp(min=1), name


def assert_same_attention(backend, forest, rule, heads=(4, 2), dtype=torch.float64, sinks=True, **sizes):
    tensors = inputs(forest, heads, dtype=dtype, **sizes)
    actual = run(backend, forest, rule, tensors, sinks)
    assert_same(actual, by_definition(forest, rule, tensors, sinks), dtype, TOLERANCE[dtype])


def rules(forest, limit):
    """Every rule that a model could have, by name; `limit` is the window or chunk."""
    blocks = random_blocks(limit, forest)
    return {
        "full": Rule(),
        "window": Rule(window=limit),
        "chunk": Rule(chunk=limit),
        "soft cap": Rule(softcap=0.7),
        "window, soft cap": Rule(window=limit, softcap=0.7),
        "chunk, soft cap": Rule(chunk=limit, softcap=0.7),
        "blocks": Rule(blocks=blocks),
        "blocks, soft cap": Rule(blocks=blocks, softcap=0.7),
        "window and (causal or block)": Rule(window=limit, blocks=blocks),
        "(window and causal) or block": Rule(window=limit, blocks=blocks, window_bounds_blocks=False),
        "(chunk and causal) or block": Rule(chunk=limit, blocks=blocks, window_bounds_blocks=False),
    }


NAMES = list(rules(random_forest(0, 1), 1))
BY_CASCADE = [name for name in NAMES if not name.endswith(") or block")]


# Against each sequence on its own -----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", sweep([1, 2, 3], quick=[1, 3]))
@pytest.mark.parametrize("name", NAMES)
def test_the_mask_matches_each_sequence(name, depth):
    """What a token sees is what it sees in its sequence, and nothing outside of it."""
    for seed, limit in enumerate(LIMITS):
        forest = random_forest(seed, depth)
        layout, rule = SharedPrefixLayout(*forest), rules(forest, limit)[name]
        mask = dense_mask(layout, to_package(rule), CPU)
        seen = torch.zeros_like(mask)
        for leaf in layout.leaves:
            path = layout.path(leaf)
            inside = visible_in_sequence(path.tolist(), rule)
            seen[path[:, None], path] |= inside
            assert torch.equal(mask[path[:, None], path], inside)
        assert torch.equal(mask, seen)


@pytest.mark.parametrize(("dtype", "depth"), [(torch.float64, 1), (torch.float64, 3), (torch.float32, 2)])
@pytest.mark.parametrize(
    ("backend", "name"), [("cascade", name) for name in BY_CASCADE] + [("reference", name) for name in NAMES]
)
def test_random_forests(backend, name, dtype, depth):
    for seed, limit in enumerate(LIMITS):
        forest = random_forest(seed, depth, roots=1 + seed % 3)
        rule, heads = rules(forest, limit)[name], HEADS[seed % 3]
        assert_same_attention(backend, forest, rule, heads, dtype, sinks=bool(seed % 2))


@pytest.mark.parametrize("backend", ["cascade", "reference"])
@pytest.mark.parametrize(("size", "value_size"), [(12, 8), (8, 12), (5, 3)])
@pytest.mark.parametrize("name", ["full", "window", "chunk", "soft cap", "blocks"])
def test_values_of_another_size_than_keys(backend, name, size, value_size):
    """Latent attention: keys carry a rotary part that values lack."""
    forest = random_forest(2, 3)
    for sinks in (False, True):
        assert_same_attention(backend, forest, rules(forest, 4)[name], size=size, value_size=value_size, sinks=sinks)


@pytest.mark.parametrize(
    "limit",
    [
        {},
        *({"window": window} for window in (1, 63, 128, 129, 130, 260, 400)),
        *({"chunk": c} for c in (1, 64, 129, 300)),
    ],
    ids=str,
)
def test_lengths_around_the_buckets_of_the_cpu_kernel(limit):
    """Up to 128 tokens runs are padded to a power of two; longer ones are run one by one."""
    forest = Forest([129, 1, 127, 130, 3, 0, 64, 128, 65], [None, 0, 0, 2, 2, 0, None, 6, 6])
    assert_same_attention("cascade", forest, Rule(**limit), dtype=torch.float32, size=16, value_size=16)


@pytest.mark.parametrize("name", BY_CASCADE)
def test_bfloat16_is_about_as_exact_as_the_reference(name):
    """The reference takes softmax in float32, fused kernels round its weights: a factor, not an order."""
    for seed, limit in enumerate(LIMITS):
        forest = random_forest(seed, 1 + seed % 3)
        rule, tensors = rules(forest, limit)[name], inputs(forest, dtype=torch.bfloat16, size=16, value_size=16)
        expected = by_definition(forest, rule, tensors)
        exact = run("reference", forest, rule, tensors)
        actual = run("cascade", forest, rule, tensors)
        for one, other, truth in zip(actual, exact, expected, strict=True):
            assert one.dtype == torch.bfloat16
            assert relative_error(one, truth) < max(3 * relative_error(other, truth), 1e-2)


@pytest.mark.parametrize("name", ["window", "chunk", "blocks"])
def test_the_kernel_of_cuda(monkeypatch, name):
    """FlashAttention's operators, in closed form on CPU: the calls are right, and heads are padded for them."""
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    with flash_attention_on_cpu():
        for seed, limit in enumerate(LIMITS):
            forest = random_forest(seed, 1 + seed % 3)
            rule, heads = rules(forest, limit)[name], HEADS[seed % 3]
            assert_same_attention("cascade", forest, rule, heads, sinks=bool(seed % 2))
            assert_same_attention("cascade", forest, rule, heads, size=8, value_size=5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_prefix_grouper_on_groups(dtype):
    for seed in range(4):
        forest = random_forest(seed, seed % 2, 1 + seed)
        assert_same_attention("prefix_grouper", forest, Rule(), HEADS[seed % 3], dtype, sinks=False)


@pytest.mark.parametrize("backend", ["cascade", "reference", "prefix_grouper"])
@pytest.mark.parametrize(
    "groups",
    [[(1, [1])], [(1, [])], [(5, [0])], [(5, [0, 0, 0])], [(2, [1, 7, 4]), (9, []), (1, [2]), (3, [0, 1])]],
    ids=["two tokens", "one token", "an empty rollout", "empty rollouts", "many groups"],
)
def test_small_and_uneven_groups(backend, groups):
    layout = SharedPrefixLayout.from_groups(groups)
    forest = Forest([s.length for s in layout.segments], [s.parent for s in layout.segments])
    assert_same_attention(backend, forest, Rule(), sinks=False)


def test_a_deep_chain_and_an_empty_segment_with_children():
    assert_same_attention("cascade", Forest([3] * 12, [None, *range(11)]), Rule())
    assert_same_attention("cascade", Forest([4, 0, 2, 3, 1], [None, 0, 1, 1, 0]), Rule())


def test_scores_far_from_zero_do_not_overflow():
    forest = random_forest(0, 2)
    tensors = [tensor.detach() * 40 for tensor in inputs(forest, dtype=torch.float32)[:3]]
    actual = get_backend("cascade")(*tensors, SharedPrefixLayout(*forest), AttentionRule(1.0))
    expected = attention_by_sequence(*[tensor.double() for tensor in tensors], forest, 1.0)
    assert relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("backend", ["cascade", "reference"])
@pytest.mark.parametrize("trained", range(4))
def test_a_part_of_the_inputs_with_gradient(trained, backend):
    """The sinks too; their gradients come back all the same."""
    forest = random_forest(1, 2)
    tensors = [tensor if place == trained else tensor.detach() for place, tensor in enumerate(inputs(forest))]
    *states, sinks_H = tensors
    rule, layout = AttentionRule(SCALE, window=3, sinks_H=sinks_H), SharedPrefixLayout(*forest)
    out = get_backend(backend)(*states, layout, rule)
    (actual,) = torch.autograd.grad(out.square().sum(), tensors[trained])
    out = attention_by_sequence(*states, forest, SCALE, Rule(window=3), sinks_H)
    (expected,) = torch.autograd.grad(out.square().sum(), tensors[trained])
    assert relative_error(actual, expected) < 1e-12


@pytest.mark.parametrize("backend", ["cascade", "reference"])
def test_strided_inputs_and_gradients(backend):
    forest = random_forest(2, 2)
    layout, rule, own = SharedPrefixLayout(*forest), AttentionRule(SCALE), inputs(forest)[:3]
    rows = [tensor.detach().transpose(1, 2).contiguous().transpose(1, 2) for tensor in own]
    along_heads = [
        [t.detach().mT.contiguous().mT if n == place else t for n, t in enumerate(own)] for place in range(3)
    ]
    assert all(tensors[place].stride(-1) != 1 for place, tensors in enumerate(along_heads))
    for tensors in (rows, *along_heads):
        tensors = [tensor.detach().requires_grad_() for tensor in tensors]
        found, expected = (
            [out, *torch.autograd.grad(out.sum(), tensors)]  # the gradient of a sum has strides 0
            for out in (get_backend(backend)(*tensors, layout, rule), attention_by_sequence(*tensors, forest, SCALE))
        )
        assert_same(found, expected, torch.float64, 1e-12)


def test_a_second_derivative_is_refused():
    forest = random_forest(0, 1)
    tensors = inputs(forest)[:3]
    out = get_backend("cascade")(*tensors, SharedPrefixLayout(*forest), AttentionRule(SCALE))
    (first,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        first.sum().backward()


def test_a_sink_takes_part_in_the_softmax():
    """Two keys with scores 0 and a sink with score log 2: half of the softmax is the sink's."""
    zeros, values = torch.zeros(1, 1, 2, 4), torch.tensor([2.0, 6.0])[None, None, :, None].repeat(1, 1, 1, 4)
    layout, sink = SharedPrefixLayout([1, 1], [None, 0]), torch.tensor([2.0]).log()
    for backend in ("cascade", "reference"):
        out = get_backend(backend)(zeros, zeros, values, layout, AttentionRule(1.0, sinks_H=sink))
        torch.testing.assert_close(out[0, 1, 0], torch.full((4,), 2.0))  # (2 + 6) / 4
        torch.testing.assert_close(out[0, 0, 0], torch.full((4,), 2 / 3))


def test_extreme_sinks():
    forest = random_forest(0, 2)
    *states, _ = (tensor.detach() for tensor in inputs(forest, dtype=torch.float32))
    layout = SharedPrefixLayout(*forest)
    for sink in (-1e4, 1e4):
        sinks = torch.full((4,), sink)
        out = get_backend("cascade")(*states, layout, AttentionRule(SCALE, sinks_H=sinks))
        expected = attention_by_sequence(*states, forest, SCALE) if sink < 0 else torch.zeros_like(out)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_one_rollout_does_not_change_others_bitwise(name):
    layout = SharedPrefixLayout.from_groups([(20, [5, 140, 7]), (3, [4])])
    forest = Forest([s.length for s in layout.segments], [s.parent for s in layout.segments])
    rule, before = to_package(rules(forest, 13)[name]), inputs(forest, dtype=torch.float32)[:3]
    changed = layout.segments[2]
    after = [tensor.detach().clone() for tensor in before]
    for tensor in after:
        tensor[:, :, changed.start : changed.stop] += 1
    others = torch.ones(layout.num_tokens, dtype=torch.bool)
    others[changed.start : changed.stop] = False
    others_too = ["cascade"] * (name in BY_CASCADE) + ["prefix_grouper"] * (name == "full")
    for backend in ("reference", *others_too):
        one, other = (get_backend(backend)(*tensors, layout, rule) for tensors in (before, after))
        assert torch.equal(one[:, others], other[:, others])
        assert not torch.equal(one, other)


# FlexAttention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", sweep(NAMES, quick=["full", "window", "(chunk and causal) or block", "blocks, soft cap"])
)
def test_flex_scores_on_cpu(name):
    forest = random_forest(1, 3, roots=3, lengths=(3, 9, 17))
    rule, layout = rules(forest, 6)[name], SharedPrefixLayout(*forest)
    *states, sinks_H = (t.detach() for t in inputs(forest, dtype=torch.float32, size=16, value_size=16))
    for sinks in (None, sinks_H):
        actual = get_backend("flex")(*states, layout, to_package(rule, sinks))
        expected = attention_by_sequence(*states, forest, SCALE, rule, sinks)
        assert actual.shape == expected.shape
        assert relative_error(actual, expected) < 5e-6


@pytest.mark.parametrize("trained", range(4))
def test_flex_refuses_to_train_anything_on_cpu(trained):
    forest = random_forest(0, 1)
    tensors = [tensor if place == trained else tensor.detach() for place, tensor in enumerate(inputs(forest))]
    rule = AttentionRule(SCALE, sinks_H=tensors.pop())
    with pytest.raises(RuntimeError, match="no backward pass on CPU"):
        get_backend("flex")(*tensors, SharedPrefixLayout(*forest), rule)


# Refusals and choice ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "rule", "reason"),
    [
        ("cascade", Rule(window=2, blocks=(0, 0, 0, -1, -1), window_bounds_blocks=False), "an image that reaches"),
        ("cascade", Rule(chunk=2, blocks=(-1,) * 5), "chunks together"),
        ("cascade", Rule(chunk=2, window=2), "chunks together"),
        ("prefix_grouper", Rule(window=2, softcap=2.0), "window 2, soft cap 2"),
        ("prefix_grouper", Rule(chunk=4), "chunks of 4"),
        ("prefix_grouper", Rule(blocks=(-1,) * 5), "bidirectional blocks"),
    ],
    ids=str,
)
def test_rules_that_a_backend_refuses(backend, rule, reason):
    forest = Forest([3, 2], [None, 0])
    *states, sinks_H = inputs(forest)
    layout, backend = SharedPrefixLayout(*forest), get_backend(backend)
    with pytest.raises(RuntimeError, match=f"refuses: .*{reason}"):
        backend(*states, layout, to_package(rule))
    if backend.name == "prefix_grouper":
        with pytest.raises(RuntimeError, match=r"refuses: .*sinks"):
            backend(*states, layout, to_package(Rule(), sinks_H))


def test_a_block_across_segments_is_refused():
    layout = SharedPrefixLayout([3, 0, 2, 2], [None, 0, 1, 0])
    within = AttentionRule(SCALE, blocks=(-1, 4, -1, 5, 5, 6, -1))
    assert within.simplified(layout) == within
    # An image that follows another without a token between them is one with it where the prefix is repeated.
    beyond = [((-1, 4, 4, 4, 5, -1, -1), 3), ((-1, 4, 4, -1, -1, 4, -1), 5), ((-1, 4, 4, 5, -1, -1, -1), 3)]
    for blocks, token in beyond:
        with pytest.raises(NotImplementedError, match=f"token {token} "):
            dataclasses.replace(within, blocks=blocks).simplified(layout)
    with pytest.raises(NotImplementedError, match="others between them"):
        AttentionRule(SCALE, blocks=(0, -1, 0, -1)).simplified(SharedPrefixLayout([4], [None]))


@pytest.mark.parametrize("backend", ["auto", "cascade", "flex", "prefix_grouper", "reference"])
def test_a_row_that_does_not_match_the_layout_is_refused(backend):
    layout, rule = SharedPrefixLayout.from_groups([(3, [2])]), AttentionRule(SCALE)
    fits, longer = (inputs(Forest([tokens], [None]))[:3] for tokens in (5, 6))
    for tensors in (longer, [fits[0], *longer[1:]], [tensor.repeat(2, 1, 1, 1) for tensor in fits]):
        with pytest.raises(ValueError, match="prefix_layout"):
            get_backend(backend)(*tensors, layout, rule)


def test_what_prefix_grouper_cannot_run_and_unknown_backends():
    tensors = inputs(Forest([6], [None]), value_size=4)[:3]
    with pytest.raises(ValueError, match="depth 2"):
        get_backend("prefix_grouper")(*tensors, SharedPrefixLayout([2, 2, 2], [None, 0, 1]), AttentionRule(SCALE))
    with pytest.raises(RuntimeError, match="keys have head size 8 and values 4"):
        get_backend("prefix_grouper")(*tensors, SharedPrefixLayout([2, 4], [None, 0]), AttentionRule(SCALE))
    with pytest.raises(ValueError, match="backend is 'flash'"):
        get_backend("flash")


def test_limits_without_effect_are_dropped():
    layout = SharedPrefixLayout.from_groups([(5, [3, 2])])  # sequences of 8 and 7 tokens
    for limit, kept in ((7, 7), (8, None), (9, None)):
        assert AttentionRule(SCALE, window=limit).simplified(layout).window == kept
        assert AttentionRule(SCALE, chunk=limit).simplified(layout).chunk == kept
    assert AttentionRule(SCALE, blocks=(-1,) * 10).simplified(layout) == AttentionRule(SCALE)
    assert AttentionRule(SCALE, blocks=(0,) * 2 + (-1,) * 8).simplified(layout).blocks is not None


def test_kinds_in_words():
    assert AttentionRule(SCALE).kind == "full"
    rule = AttentionRule(SCALE, 512, 64, 50.0, torch.zeros(4), (-1,))
    assert rule.kind == "window 512, chunks of 64, soft cap 50, sinks, bidirectional blocks"


BLOCKS = (-1, -1, 0, 0, -1)
CHOSEN = {
    "full": (Rule(), "cascade", "cascade", "cascade"),
    "window": (Rule(window=2), "cascade", "cascade", "cascade"),
    "chunk": (Rule(chunk=2), "cascade", "cascade", "cascade"),
    "blocks": (Rule(blocks=BLOCKS), "cascade", "cascade", "cascade"),
    "soft cap": (Rule(softcap=1.0), "cascade", "flex", "cascade"),
    "window and blocks": (Rule(window=2, blocks=BLOCKS), "cascade", "cascade", "cascade"),
    "block beyond the window": (Rule(window=1, blocks=BLOCKS, window_bounds_blocks=False), "reference", "flex", "flex"),
    "chunk and blocks": (Rule(chunk=2, blocks=BLOCKS), "reference", "flex", "flex"),
}
"""The rule; what auto runs on CPU, on CUDA in bfloat16, on CUDA in float32."""


@pytest.mark.parametrize("name", CHOSEN)
def test_auto_chooses(name):
    rule, on_cpu, on_cuda, on_cuda_in_float32 = CHOSEN[name]
    forest = Forest([3, 2], [None, 0])
    for sinks in (None, inputs(forest)[3]):
        given = to_package(rule, sinks)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            assert choose(*inputs(forest, dtype=dtype)[:3], given).name == on_cpu
        for dtype, expected in ((torch.bfloat16, on_cuda), (torch.float32, on_cuda_in_float32)):
            assert choose(*on_a_gpu(dtype, 64), given).name == expected
    assert choose(*on_a_gpu(torch.bfloat16, 512), to_package(rule)).name == "flex"  # no fast kernel for such heads
    assert choose(*on_a_gpu(torch.float32, 8), to_package(rule)).name != "flex"  # no kernel of its own for these


def on_a_gpu(dtype, size):
    """Tensors without data that say they are on a GPU."""
    with FakeTensorMode():
        return [torch.empty(1, 2, 5, size, dtype=dtype, device="cuda") for _ in range(3)]


@pytest.mark.parametrize("name", NAMES)
def test_auto_runs_what_it_chooses(monkeypatch, name):
    forest = random_forest(1, 2)
    rule, tensors = rules(forest, 4)[name], inputs(forest)
    chosen = choose(*tensors[:3], to_package(rule))
    expected = run(chosen.name, forest, rule, tensors)
    ran = []
    recorder = dataclasses.replace(chosen, attend=lambda *args: ran.append(chosen.name) or chosen.attend(*args))
    monkeypatch.setitem(choice.BACKENDS, chosen.name, recorder)
    actual = run("auto", forest, rule, tensors)
    assert ran == [chosen.name]
    assert all(torch.equal(*pair) for pair in zip(actual, expected, strict=True))
