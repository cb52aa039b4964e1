"""Rows whose first tokens were run before: what the others see of them, against each sequence on its own.

Legend: T packed tokens, P of them prefilled, S = T - P that are run, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import pytest
import torch
from helpers.flash_attention import flash_attention_on_cpu
from helpers.forests import Forest, Rule, attention_by_sequence, random_forest
from helpers.tiny_models import tiny_model
from torch import nn

from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.attention.backends.kernels import CUDAKernel
from pl_grouprl.attention.call import Leaf, Prefilled, PrefixStates
from pl_grouprl.attention.masks import MaskRule, from_marker, to_marker
from pl_grouprl.attention.stateful import plan_runs
from pl_grouprl.packing import SharedPrefixLayout

SCALE = 0.3
LIMITS = [1, 2, 3, 5, 8, 13, 200]
RULES = {
    "full": {},
    "window": {"window": True},
    "chunk": {"chunk": True},
    "soft cap": {"softcap": 0.7},
    "window, soft cap": {"window": True, "softcap": 0.7},
    "chunk, soft cap": {"chunk": True, "softcap": 0.7},
}
HEADS = [(4, 4), (4, 2), (6, 1)]


def rule_of(name: str, limit: int) -> Rule:
    return Rule(**{key: limit if value is True else value for key, value in RULES[name].items()})


def tensors(forest: Forest, heads: tuple[int, int], value_size: int = 8) -> list[torch.Tensor]:
    """Query, key, value and one sink per head."""
    generator, tokens = torch.Generator().manual_seed(0), sum(forest.lengths)
    shapes = [(1, heads[0], tokens, 8), (1, heads[1], tokens, 8), (1, heads[1], tokens, value_size), heads[:1]]
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def with_gradients(out: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output of the tokens that are run, and the gradients of a loss on these."""
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).reshape(out.shape)
    return [out.detach(), *torch.autograd.grad(out, inputs, weights)]


def assert_same(backend: str, forest: Forest, rule: Rule, heads: tuple[int, int], sinks: bool, **sizes: int) -> None:
    prefix = forest.lengths[0]
    *states, sinks_H = inputs = tensors(forest, heads, **sizes)
    inputs = inputs if sinks else states
    expected = attention_by_sequence(*states, forest, SCALE, rule, sinks_H if sinks else None)
    ours = AttentionRule(SCALE, rule.window, rule.chunk, rule.softcap, sinks_H if sinks else None)
    layout = SharedPrefixLayout(*forest, num_prefilled=prefix)
    query, key, value = states
    found = get_backend(backend)(query[:, :, prefix:], key, value, layout, ours.simplified(layout))
    for one, other in zip(with_gradients(found, inputs), with_gradients(expected[:, prefix:], inputs), strict=True):
        assert (one - other).norm() < 1e-12 * other.norm().clamp(min=1)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["cascade", "reference"])
def test_random_forests(backend, name, depth):
    for seed, limit in enumerate(LIMITS):
        forest = random_forest(seed, depth, roots=1)
        assert_same(backend, forest, rule_of(name, limit), HEADS[seed % 3], sinks=bool(seed % 2))


@pytest.mark.parametrize("name", ["full", "window", "chunk"])
def test_the_kernel_of_cuda(monkeypatch, name):
    """FlashAttention's operators, in closed form on CPU."""
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    with flash_attention_on_cpu():
        for seed, limit in enumerate(LIMITS):
            forest = random_forest(seed, 1 + seed % 2, roots=1)
            assert_same("cascade", forest, rule_of(name, limit), HEADS[seed % 3], sinks=False, value_size=5)


@pytest.mark.parametrize("name", RULES)
def test_flex_scores(name):
    forest = random_forest(3, 2, roots=1)
    prefix, rule = forest.lengths[0], rule_of(name, 5)
    query, key, value, sinks = (tensor.detach() for tensor in tensors(forest, (4, 2)))
    ours = AttentionRule(SCALE, rule.window, rule.chunk, rule.softcap, sinks)
    layout = SharedPrefixLayout(*forest, num_prefilled=prefix)
    found = get_backend("flex")(query[:, :, prefix:], key, value, layout, ours)
    expected = attention_by_sequence(query, key, value, forest, SCALE, rule, sinks)
    torch.testing.assert_close(found, expected[:, prefix:])


@pytest.mark.parametrize(
    ("backend", "first", "error", "reason"),
    [("prefix_grouper", 2, RuntimeError, "refuses"), ("cascade", 0, ValueError, "of which 3 are run")],
)
def test_what_a_backend_refuses(backend, first, error, reason):
    """Prefilled tokens at all, and queries of the whole row."""
    query, key, value, _ = tensors(Forest([2, 3], [None, 0]), (4, 2))
    layout = SharedPrefixLayout([2, 3], [None, 0], num_prefilled=2)
    with pytest.raises(error, match=reason):
        get_backend(backend)(query[:, :, first:], key, value, layout, AttentionRule(SCALE))


def test_token_counts_of_a_layout():
    """A prompt of 3 tokens that was run before, and rollouts of 2 and 1: 3 tokens are run for sequences of 5 and 4."""
    layout = SharedPrefixLayout.from_groups([(3, [2, 1])], num_prefilled=3)
    assert (layout.num_tokens, layout.num_queries, layout.num_prefilled) == (6, 3, 3)
    assert layout.token_ratio == 3
    assert layout.attention_pairs == 4 + 5 + 4
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 4, 3]


@pytest.mark.parametrize(("lengths", "parents"), [([2, 3], [None, 0]), ([3, 1, 2], [None, 0, None])])
def test_only_the_tokens_of_the_only_root_can_be_prefilled(lengths, parents):
    with pytest.raises(ValueError, match="num_prefilled"):
        SharedPrefixLayout(lengths, parents, num_prefilled=3)


def test_images_after_the_prompt_are_refused_and_those_inside_are_dropped():
    layout = SharedPrefixLayout([4, 2, 1], [None, 0, 0], num_prefilled=4)
    assert AttentionRule(SCALE, blocks=(-1, -1, -1)).simplified(layout).blocks is None
    with pytest.raises(NotImplementedError, match="bidirectional attention"):
        AttentionRule(SCALE, blocks=(-1, 0, 0)).simplified(layout)


@pytest.mark.parametrize("lengths", [[4, 2, 1], [4, 1, 1, 1], [5, 1, 2, 1, 1]])
def test_a_marker_has_the_blocks_of_the_tokens_that_run(lengths):
    layout = SharedPrefixLayout(lengths, [None] + [0] * (len(lengths) - 1), num_prefilled=lengths[0])
    rule = MaskRule(window=3, blocks=(-1,) * layout.num_queries)
    assert from_marker(to_marker(rule, layout)) == rule


def test_states_continue_from_the_prompt():
    plan = plan_runs(SharedPrefixLayout([4, 2, 0, 3], [None, 0, 0, 0], num_prefilled=4), pad_roots=True, device="cpu")
    (batch,) = plan.batches
    assert batch.starts.tolist() == [0, 0]
    assert batch.tokens.tolist() == [2, 3, 4, 0, 1]
    assert plan.outputs.tolist() == [3, 4, 0, 1, 2]


def test_the_decoder_gets_the_states_of_the_prompt():
    decoder = find_decoder(tiny_model("llama"))
    tokens = torch.arange(1, 8)[None]
    whole, rest_of_it = SharedPrefixLayout([4, 3], [None, 0]), SharedPrefixLayout([4, 3], [None, 0], num_prefilled=4)
    with shared_prefix(decoder), torch.no_grad():
        recorder = PrefixStates(record=True)
        expected = decoder(input_ids=tokens, prefix_layout=whole).last_hidden_state
        prompt = decoder(
            input_ids=tokens[:, :4], prefix_layout=SharedPrefixLayout([4], [None]), prefix_states=recorder
        ).last_hidden_state
        states = PrefixStates([recorder.pop_all()], record=False)
        rest = decoder(input_ids=tokens[:, 4:], prefix_layout=rest_of_it, prefix_states=states).last_hidden_state
        torch.testing.assert_close(torch.cat([prompt, rest], dim=1), expected)
        for reason, ids, layout, given in (
            ("num_prefilled", tokens[:, 4:], rest_of_it, None),
            ("input of shape", tokens, rest_of_it, states),
            ("one prompt or one branch", tokens, whole, PrefixStates(record=True)),
            ("prefix_layout", tokens[:, 4:], rest_of_it, PrefixStates(record=False)),
        ):
            with pytest.raises(ValueError, match=reason):
                decoder(input_ids=ids, prefix_layout=layout, prefix_states=given)


def test_a_layer_that_runs_twice_in_a_call_is_refused():
    states, layer = PrefixStates(record=True), nn.Identity()
    states.keep(layer, ("key",), torch.zeros(1))
    with pytest.raises(NotImplementedError, match="Identity runs several times"):
        states.keep(layer, ("key",), torch.zeros(1))
    states.records = False
    states.keep(layer, ("key",), torch.ones(1))  # a recomputation
    assert states.pop_all()[layer]["key",].data == torch.zeros(1)


LAYER = nn.Identity()


def prefilled_of(*recorded):
    return Prefilled([{LAYER: {("key",): Leaf(tensor)}} for tensor in recorded], LAYER, ("key",))


def test_gradients_go_to_the_leaves_and_to_what_runs():
    first, second = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([3.0])
    own = torch.tensor([4.0, 5.0], requires_grad=True)
    prefilled = prefilled_of(first, second)
    for _ in range(2):
        joined = prefilled.join(own)
        assert joined.tolist() == [1, 2, 3, 4, 5]
        (joined * torch.tensor([1.0, 10, 100, 1000, 10_000])).sum().backward()
    assert prefilled.leaves()[0].gradient.tolist() == [2, 20]
    assert prefilled.leaves()[1].gradient is None  # nothing trained led to it
    assert first.grad is None
    assert own.grad.tolist() == [2000, 20_000]


def test_the_prefilled_tensors_may_be_all_that_is_trained():
    prefilled = prefilled_of(torch.ones(2, requires_grad=True))
    prefilled.join(torch.ones(1)).sum().backward()
    assert prefilled.leaves()[0].gradient.tolist() == [1, 1]
    assert not prefilled_of(torch.ones(2)).join(torch.ones(1)).requires_grad


@pytest.mark.parametrize("calls", [1, 500])
def test_the_graph_is_as_small_after_a_long_path(calls):
    prefilled = prefilled_of(*[torch.ones(1, requires_grad=True)] * calls)
    joined = prefilled.join(torch.ones(1, requires_grad=True))
    edges = [edge for edge, _ in joined.grad_fn.next_functions if edge is not None]
    assert len(edges) == 2  # what runs, and the anchor
    joined.sum().backward()
    assert all(leaf.gradient.item() == 1 for leaf in prefilled.leaves())
