"""FlexAttention's block masks: which blocks are computed, rows of any length, and what a new layout compiles.

Legend: T packed tokens, S of them that are run.
"""

import itertools

import pytest
import torch
from helpers.forests import random_forest, relative_error
from torch._dynamo.testing import CompileCounter
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from pl_grouprl.attention.backends import choice as flex
from pl_grouprl.attention.backends.choice import block_mask, get_backend
from pl_grouprl.attention.backends.interface import AttentionRule, dense_mask
from pl_grouprl.packing import SharedPrefixLayout

CPU = torch.device("cpu")
LAYOUTS = {
    "a group": SharedPrefixLayout.from_groups([(300, [129, 1, 70])]),
    "groups": SharedPrefixLayout.from_groups([(127, [5, 128]), (130, [300, 6])]),
    "whole blocks": SharedPrefixLayout.from_groups([(256, [128, 128])]),
    "prefilled": SharedPrefixLayout.from_groups([(200, [129, 3])], num_prefilled=200),
    "less than a block": SharedPrefixLayout.from_groups([(5, [3])]),
}
RULES = {"full": {}, "window": {"window": 90}, "chunks": {"chunk": 64}}


def inputs(layout, heads=(4, 2, 2)):
    torch.manual_seed(0)
    tokens = (layout.num_queries, layout.num_tokens, layout.num_tokens)
    return [torch.randn(1, h, count, 16) for h, count in zip(heads, tokens, strict=True)]


@pytest.mark.parametrize(
    ("name", "rule", "pairs"), [*itertools.product(LAYOUTS, RULES, [1]), *((name, "full", 2**26) for name in LAYOUTS)]
)
def test_blocks_are_those_of_the_dense_mask(name, rule, pairs, monkeypatch):
    monkeypatch.setattr(flex, "_PAIRS", pairs)  # by blocks of rows
    layout, rule = LAYOUTS[name], AttentionRule(0.3, **RULES[rule])
    found, dense = block_mask(layout, rule, CPU), dense_mask(layout, rule, CPU)
    queries, keys = dense.shape
    assert found.seq_lengths == (queries, keys)
    assert torch.equal(found.mask_mod(None, None, torch.arange(queries)[:, None], torch.arange(keys)), dense)
    expected = create_block_mask(lambda b, h, q, k: dense[q, k], None, None, queries, keys, device="cpu")
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, others = (getattr(mask, f"{kind}_num_blocks") for mask in (found, expected))
        assert torch.equal(counts, others), kind
        order, other = (getattr(mask, f"{kind}_indices")[0, 0] for mask in (found, expected))
        for row, count in enumerate(counts.flatten()):
            assert torch.equal(order[row, :count], other[row, :count]), kind


@pytest.mark.parametrize(
    ("name", "rule", "with_sinks"),
    [
        *((name, "full", False) for name in LAYOUTS),
        *(("groups", rule, True) for rule in RULES),
        ("prefilled", "window", True),
        ("a group", "chunks", False),
    ],
)
def test_rows_of_any_length(name, rule, with_sinks):
    sinks_H = torch.tensor([0.0, 1.0, -1.0, 2.0]) if with_sinks else None
    layout, rule = LAYOUTS[name], AttentionRule(0.3, sinks_H=sinks_H, **RULES[rule])
    tensors = inputs(layout)
    actual, expected = (get_backend(backend)(*tensors, layout, rule) for backend in ("flex", "reference"))
    assert actual.shape == expected.shape
    assert relative_error(actual, expected) < 5e-6


def test_a_new_layout_compiles_nothing(monkeypatch):
    counter = CompileCounter()
    compiled = torch.compile(flex_attention, dynamic=True, backend=counter)
    monkeypatch.setattr(flex, "_flex_attention", lambda device_type: compiled)

    def run(seed):
        layout = SharedPrefixLayout(*random_forest(seed, 2, roots=2, lengths=(30, 71, 150)))
        assert layout.num_tokens > flex.BLOCK  # one block alone is a program of its own
        tensors = inputs(layout, heads=(32, 16, 16))  # not as many as blocks: equal sizes share a symbol
        actual, expected = (get_backend(name)(*tensors, layout, AttentionRule(0.3)) for name in ("flex", "reference"))
        assert relative_error(actual, expected) < 5e-6
        return layout.num_tokens

    lengths = {run(0)}
    assert counter.frame_count == 1
    lengths |= {run(seed) for seed in range(1, 4)}
    assert len(lengths) > 2
    assert counter.frame_count == 1
