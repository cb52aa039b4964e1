"""Every backend against attention over each sequence on its own: outputs and the gradients of query, key and value.

What goes beyond plain causal softmax (windows, soft caps, sinks and the like) is in test_rules.py.

Legend: T packed tokens, H query heads, K key/value heads, D head size.
"""

import pytest
import torch
from helpers.forests import Forest, attention_by_sequence, random_forest, relative_error

from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout

HEADS = [(4, 4), (4, 2), (6, 1)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2e-2}
SCALE = 0.3
RULE = AttentionRule(SCALE)


def inputs(tokens, heads=(4, 2), size=8, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(1, h, tokens, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]


def output_and_gradients(attend, tensors):
    out = attend(*tensors)
    weights = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, weights)]


def assert_same_attention(backend, forest, heads=(4, 2), dtype=torch.float32, size=8):
    tensors = inputs(sum(forest.lengths), heads, size, dtype)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    layout = SharedPrefixLayout(*forest)
    actual = output_and_gradients(lambda q, k, v: get_backend(backend)(q, k, v, layout, RULE), tensors)
    expected = output_and_gradients(lambda q, k, v: attention_by_sequence(q, k, v, forest, SCALE), wide)
    for name, one, other in zip(("output", "query", "key", "value"), actual, expected, strict=True):
        assert one.shape == other.shape, name
        assert one.dtype == dtype, name
        assert relative_error(one, other) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["cascade", "reference"])
def test_random_forests(backend, depth, dtype):
    for seed in range(3):
        assert_same_attention(backend, random_forest(seed, depth, roots=1 + seed), HEADS[seed], dtype)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("depth", [0, 1])
def test_prefix_grouper_on_groups(depth, dtype):
    for seed in range(4):
        assert_same_attention("prefix_grouper", random_forest(seed, depth, 1 + seed), HEADS[seed % 3], dtype)


@pytest.mark.parametrize("backend", ["cascade", "reference", "prefix_grouper"])
@pytest.mark.parametrize(
    "groups",
    [
        [(1, [1])],
        [(1, [])],
        [(5, [0])],
        [(5, [0, 0, 0])],
        [(3, [0, 2, 0])],
        [(4, [3])],
        [(2, [1, 7, 4]), (9, []), (1, [2]), (3, [0, 1])],
    ],
    ids=["two tokens", "one token", "an empty rollout", "empty rollouts", "some empty", "one rollout", "many groups"],
)
def test_small_and_uneven_groups(backend, groups):
    layout = SharedPrefixLayout.from_groups(groups)
    forest = Forest([s.length for s in layout.segments], [s.parent for s in layout.segments])
    assert_same_attention(backend, forest, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_lengths_around_the_buckets_of_the_cpu_kernel(heads, dtype):
    # Up to 128 tokens runs are padded to a power of two; longer ones are run one by one.
    lengths = [129, 1, 2, 127, 128, 129, 64, 65, 0, 3, 4]
    assert_same_attention("cascade", Forest(lengths, [None] + [0] * 10), heads, dtype, size=16)
    assert_same_attention("cascade", Forest([127, 130, 128, 5], [None, 0, 1, None]), heads, dtype, size=16)


def test_a_deep_chain_and_an_empty_segment_with_children():
    assert_same_attention("cascade", Forest([3] * 12, [None, *range(11)]), dtype=torch.float64)
    assert_same_attention("cascade", Forest([4, 0, 2, 3, 1], [None, 0, 1, 1, 0]), dtype=torch.float64)


def test_scores_far_from_zero_do_not_overflow():
    forest = random_forest(0, 2)
    tensors = [tensor.detach() * 40 for tensor in inputs(sum(forest.lengths))]
    layout = SharedPrefixLayout(*forest)
    actual = get_backend("cascade")(*tensors, layout, AttentionRule(1.0))
    expected = attention_by_sequence(*[tensor.double() for tensor in tensors], forest, 1.0)
    assert relative_error(actual, expected) < 1e-5


def test_a_part_of_the_inputs_with_gradient():
    forest = random_forest(1, 2)
    layout = SharedPrefixLayout(*forest)
    tensors = inputs(sum(forest.lengths), dtype=torch.float64)
    for number, only in enumerate(tensors):
        used = [tensor if tensor is only else tensor.detach() for tensor in tensors]
        (actual,) = torch.autograd.grad(get_backend("cascade")(*used, layout, RULE).square().sum(), only)
        (expected,) = torch.autograd.grad(attention_by_sequence(*used, forest, SCALE).square().sum(), only)
        assert relative_error(actual, expected) < 1e-12, number


def test_a_strided_gradient_and_strided_inputs():
    forest = random_forest(2, 2)
    layout = SharedPrefixLayout(*forest)
    tensors = [
        t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for t in inputs(layout.num_tokens)
    ]
    expanded = [
        torch.autograd.grad(attend(*tensors).sum(), tensors)  # the gradient of a sum has strides 0
        for attend in (
            lambda q, k, v: get_backend("cascade")(q, k, v, layout, RULE),
            lambda q, k, v: attention_by_sequence(q, k, v, forest, SCALE),
        )
    ]
    for actual, expected in zip(*expanded, strict=True):
        assert relative_error(actual, expected) < 5e-6


@pytest.mark.parametrize("backend", ["cascade", "reference"])
def test_tensors_that_are_strided_along_the_head(backend):
    forest = random_forest(2, 2)
    layout = SharedPrefixLayout(*forest)
    for number in range(3):
        tensors = [tensor.detach() for tensor in inputs(layout.num_tokens)]
        tensors[number] = tensors[number].mT.contiguous().mT
        assert tensors[number].stride(-1) != 1
        actual = get_backend(backend)(*tensors, layout, RULE)
        assert relative_error(actual, attention_by_sequence(*tensors, forest, SCALE)) < 5e-6, number


def test_a_second_derivative_is_refused():
    forest = random_forest(0, 1)
    tensors = inputs(sum(forest.lengths))
    out = get_backend("cascade")(*tensors, SharedPrefixLayout(*forest), RULE)
    (first,) = torch.autograd.grad(out.sum(), tensors[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"derivative for .* is not implemented"):
        first.sum().backward()


@pytest.mark.parametrize("backend", ["cascade", "reference", "prefix_grouper"])
def test_one_rollout_does_not_change_others_bitwise(backend):
    layout = SharedPrefixLayout.from_groups([(20, [5, 140, 7]), (3, [4])])
    before = inputs(layout.num_tokens)
    changed = layout.segments[2]
    after = [tensor.detach().clone() for tensor in before]
    for tensor in after:
        tensor[:, :, changed.start : changed.stop] += 1
    others = torch.ones(layout.num_tokens, dtype=torch.bool)
    others[changed.start : changed.stop] = False
    one, other = (get_backend(backend)(*tensors, layout, RULE) for tensors in (before, after))
    assert torch.equal(one[:, others], other[:, others])
    assert not torch.equal(one, other)


def test_prefix_grouper_refuses_a_tree():
    layout = SharedPrefixLayout([2, 2, 2], [None, 0, 1])
    with pytest.raises(ValueError, match="'prefix_grouper' runs forests of depth 1, this layout has depth 2"):
        get_backend("prefix_grouper")(*inputs(6), layout, RULE)


@pytest.mark.parametrize("backend", ["auto", "cascade", "flex", "prefix_grouper", "reference"])
def test_a_row_that_does_not_match_the_layout_is_refused(backend):
    layout = SharedPrefixLayout.from_groups([(3, [2])])
    with pytest.raises(ValueError, match=r"prefix_layout has 5 tokens.*shape \[1, 6\] and 6 keys; pass one packed row"):
        get_backend(backend)(*inputs(6), layout, RULE)
    with pytest.raises(ValueError, match=r"shape \[1, 5\] and 6 keys"):
        get_backend(backend)(inputs(5)[0], *inputs(6)[1:], layout, RULE)
    two_rows = [tensor.repeat(2, 1, 1, 1) for tensor in inputs(5)]
    with pytest.raises(ValueError, match=r"shape \[2, 5\]"):
        get_backend(backend)(*two_rows, layout, RULE)


def test_prefix_grouper_refuses_values_of_another_size_than_keys():
    layout = SharedPrefixLayout.from_groups([(3, [2])])
    query, key, _ = inputs(5)
    value = torch.randn(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match="keys have head size 8 and values 4; use backend 'auto'"):
        get_backend("prefix_grouper")(query, key, value, layout, RULE)


def test_an_unknown_backend():
    with pytest.raises(
        ValueError, match="backend is 'flash'; choose one of auto, cascade, flex, prefix_grouper, refer"
    ):
        get_backend("flash")


def test_flex_refuses_training_on_cpu_for_any_input_with_gradient():
    layout = SharedPrefixLayout.from_groups([(3, [2])])
    for number in range(3):
        tensors = [tensor.detach() for tensor in inputs(5)]
        tensors[number].requires_grad_()
        with pytest.raises(
            RuntimeError, match="'flex' refuses: FlexAttention has no backward pass on CPU; use backend"
        ):
            get_backend("flex")(*tensors, layout, RULE)


def test_flex_scores_on_cpu():
    forest = random_forest(1, 3, roots=3, lengths=(3, 9, 17))
    tensors = inputs(sum(forest.lengths), size=16)
    with torch.no_grad():
        actual = get_backend("flex")(*tensors, SharedPrefixLayout(*forest), RULE)
        expected = attention_by_sequence(*tensors, forest, SCALE)
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 5e-6
