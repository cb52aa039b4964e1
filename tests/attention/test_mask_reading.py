"""Reading transformers' masks: each composition, against the dense mask that transformers creates from it.

Legend: T packed tokens.
"""

import pytest
import torch
from helpers.tiny_models import tiny_model
from helpers.versions import at_least
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from pl_grouprl.attention.backends.interface import AttentionRule, dense_mask
from pl_grouprl.attention.call import LayoutCall
from pl_grouprl.attention.function import register
from pl_grouprl.attention.masks import (
    MaskRule,
    forest_of_marker,
    from_marker,
    mask_function,
    read_mask_function,
    set_packed_row,
    to_marker,
)
from pl_grouprl.packing import SharedPrefixLayout

BLOCKS = (-1, 0, 0, 0, -1, 1, 1, -1, -1, 2, 3, 3)
TOKENS = len(BLOCKS)
CPU = torch.device("cpu")
LAYOUT = SharedPrefixLayout([TOKENS], [None])
ROW = torch.zeros(1, TOKENS, 8), torch.ones(1, TOKENS, dtype=torch.long), None, torch.arange(TOKENS)[None]
"""What transformers makes a mask of: embeddings, attention mask, cache and positions."""


def blockwise(blocks=BLOCKS):
    return masking_utils.blockwise_overlay(torch.tensor([blocks]))


def no_padding(rows=1):
    return torch.zeros(rows, dtype=torch.long)


# Compositions -------------------------------------------------------------------------------------------------------

causal = masking_utils.causal_mask_function
window = masking_utils.sliding_window_overlay(4)
chunk = masking_utils.chunked_overlay(4, no_padding())
both, either = masking_utils.and_masks, masking_utils.or_masks

READ = {
    "causal": (causal, MaskRule()),
    "window": (masking_utils.sliding_window_causal_mask_function(4), MaskRule(window=4)),
    "window, the other way around": (both(causal, window), MaskRule(window=4)),
    "chunk": (masking_utils.chunked_causal_mask_function(4, no_padding()), MaskRule(chunk=4)),
    "window and chunk": (both(window, both(chunk, causal)), MaskRule(window=4, chunk=4)),
    "two windows": (both(masking_utils.sliding_window_overlay(6), both(window, causal)), MaskRule(window=4)),
    "blocks": (either(causal, blockwise()), MaskRule(blocks=BLOCKS, window_bounds_blocks=False)),
    "a window around blocks": (both(either(causal, blockwise()), window), MaskRule(window=4, blocks=BLOCKS)),
    "blocks and a window": (
        either(both(window, causal), blockwise()),
        MaskRule(window=4, blocks=BLOCKS, window_bounds_blocks=False),
    ),
    "blocks and a chunk": (
        either(both(chunk, causal), blockwise()),
        MaskRule(chunk=4, blocks=BLOCKS, window_bounds_blocks=False),
    ),
}


def expand(function):
    """The dense mask [T, T] of a composition, by calling it."""
    places = torch.arange(TOKENS)
    return function(0, 0, places[:, None], places[None, :]).expand(TOKENS, TOKENS)


def to_rule(found):
    return AttentionRule(1.0, found.window, found.chunk, None, None, found.blocks, found.window_bounds_blocks)


@pytest.mark.parametrize("name", READ)
def test_compositions(name):
    function, expected = READ[name]
    assert read_mask_function(function) == expected
    assert torch.equal(dense_mask(LAYOUT, to_rule(expected), CPU), expand(function))


def own(batch, head, query, key):
    return key <= query


UNKNOWN = {
    "a lambda": (lambda batch, head, query, key: key <= query, "<lambda>"),
    "a custom function": (own, "own"),
    "a custom function in an and": (both(causal, own), "own"),
    "a custom function in an or": (either(causal, own), "own"),
    "both ways": (masking_utils.bidirectional_mask_function, "bidirectional_mask_function"),
    "a window both ways": (masking_utils.sliding_window_bidirectional_mask_function(4), "sliding_window_bidirectional"),
    "packed sequences": (
        both(causal, masking_utils.packed_sequence_mask_function(torch.zeros(1, 4))),
        "packed_sequence_mask_function",
    ),
    "padding": (both(causal, masking_utils.padding_mask_function(torch.ones(1, 4))), "padding_mask_function"),
    "offsets": (masking_utils.add_offsets_to_mask_function(causal, 1, 0), "add_offsets_to_mask_function"),
    "a chunk after padding": (masking_utils.chunked_causal_mask_function(4, torch.tensor([3])), "chunked_overlay"),
    "blocks of two rows": (
        either(causal, masking_utils.blockwise_overlay(torch.tensor([[0, 1], [1, 0]]))),
        "blockwise_overlay",
    ),
    "a window alone": (window, "sliding_window_overlay"),
    "windows without causality": (both(window, window), "sliding_window_overlay"),
    "a window or causality": (either(causal, window), "or_masks"),
    "blocks alone": (blockwise(), "blockwise_overlay"),
    "blocks twice": (either(causal, blockwise(), blockwise()), "or_masks"),
    "blocks and blocks": (either(either(causal, blockwise()), blockwise()), "or_masks"),
    "blocks within causality": (both(causal, blockwise()), "blockwise_overlay"),
    "a chunk around blocks": (both(either(causal, blockwise()), chunk), "and_masks|or_masks"),
    "a window around blocks and one": (both(either(both(window, causal), blockwise()), window), "and_masks|or_masks"),
    "an object": (type("Own", (), {"__call__": own})(), "Own"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_compositions_are_refused(name):
    function, part = UNKNOWN[name]
    with pytest.raises(NotImplementedError, match=part):
        read_mask_function(function)


# As transformers makes them -----------------------------------------------------------------------------------------


def config_of(implementation, size=4):
    config = tiny_model("gemma3_text", sliding_window=size).config
    config.attention_chunk_size = size
    config._attn_implementation = implementation
    return config


def create(name, implementation, size=4, **extra):
    maker = getattr(masking_utils, f"create_{name}_mask")
    return maker(config_of(implementation, size), *ROW, **extra)


def create_packed(make):
    """A mask created in a packed call."""
    set_packed_row(LayoutCall(LAYOUT))
    try:
        return make(register("auto", "sdpa"))
    finally:
        set_packed_row(None)


def same_as_transformers(make):
    """The marker's rule gives the dense masks that transformers makes for `sdpa` and for `eager`."""
    found = from_marker(create_packed(make))
    mask = dense_mask(LAYOUT, to_rule(found), CPU)
    boolean, added = make("sdpa"), make("eager")
    boolean = torch.ones(TOKENS, TOKENS).tril().bool() if boolean is None else boolean[0, 0]
    assert torch.equal(mask, boolean)
    assert torch.equal(mask, added[0, 0] == 0)
    return found


@pytest.mark.parametrize("size", [1, 4, TOKENS - 1, TOKENS, 40])
@pytest.mark.parametrize("name", ["causal", "sliding_window_causal", "chunked_causal"])
@pytest.mark.parametrize("blocks", [None, BLOCKS], ids=["", "blocks"])
def test_dense_masks_of_transformers(name, size, blocks):
    if name == "chunked_causal" and blocks is not None and not at_least("transformers", "5.20"):
        pytest.skip("needs transformers 5.20, in which chunks can have blocks")
    extra = {} if blocks is None else {"block_sequence_ids": torch.tensor([blocks])}
    found = same_as_transformers(lambda implementation: create(name, implementation, size, **extra))
    assert found == MaskRule(
        window=size if name == "sliding_window_causal" else None,
        chunk=size if name == "chunked_causal" else None,
        blocks=blocks,
        window_bounds_blocks=blocks is None,
    )


@pytest.mark.parametrize("size", [1, 4, 40])
def test_gemma_3_bounds_its_images_by_the_window(size):
    def make(implementation, kind):
        return create_masks_for_vision_model(config_of(implementation, size), *ROW, torch.tensor([BLOCKS]))[kind]

    full = same_as_transformers(lambda implementation: make(implementation, "full_attention"))
    assert full == MaskRule(blocks=BLOCKS, window_bounds_blocks=False)
    near = same_as_transformers(lambda implementation: make(implementation, "sliding_attention"))
    assert near == MaskRule(window=size, blocks=BLOCKS)


@pytest.mark.parametrize(
    ("make", "part"),
    [
        (
            lambda name: masking_utils.create_bidirectional_mask(config_of(name), *ROW[:2]),
            "bidirectional_mask_function",
        ),
        (lambda name: create("causal", name, or_mask_function=own), "own"),
        (lambda name: create("causal", name, and_mask_function=own), "own"),
    ],
)
def test_other_masks_are_refused_in_a_packed_call(make, part):
    with pytest.raises(NotImplementedError, match=part):
        create_packed(make)


@pytest.mark.parametrize("wrapped", ["eager", "sdpa"])
def test_outside_a_packed_call_masks_are_unchanged(wrapped):
    name = register("auto", wrapped)
    for kind in ("causal", "sliding_window_causal", "chunked_causal"):
        one, other = create(kind, name), create(kind, wrapped)
        assert (one is None and other is None) or torch.equal(one, other)
        assert from_marker(one) is None


def test_an_implementation_without_masks_gets_none():
    assert mask_function(None)(mask_function=causal) is None


# Markers ------------------------------------------------------------------------------------------------------------

RULES = [
    MaskRule(),
    MaskRule(window=1),
    MaskRule(window=4096),
    MaskRule(chunk=8192),
    MaskRule(window=3, chunk=5),
    MaskRule(blocks=BLOCKS),
    MaskRule(window=512, blocks=BLOCKS, window_bounds_blocks=False),
]


LAYOUTS = [
    LAYOUT,
    SharedPrefixLayout([4, 2, 0, 3, 3], [None, 0, 1, 0, None]),
    SharedPrefixLayout([3, 1, 1, 1, 1, 1, 1, 1, 2], [None, *range(8)]),  # as many rows as tokens, without blocks
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_marker_carries_its_rule_and_the_forest(rule, layout):
    assert layout.num_tokens == TOKENS
    marker = to_marker(rule, layout)
    assert marker.device == CPU
    assert marker.shape[2] != TOKENS
    lengths = tuple(segment.length for segment in layout.segments)
    parents = tuple(segment.parent for segment in layout.segments)
    for copy in (marker, marker.clone(), marker.detach(), marker.contiguous(), marker.detach().clone()):
        assert from_marker(copy) == rule
        assert forest_of_marker(copy) == (lengths, parents)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_marker_survives_checkpointing(use_reentrant):
    """Reentrant checkpointing detaches what it saved before it runs the layer again."""
    seen = []

    def layer(hidden, mask):
        seen.append(from_marker(mask))
        return hidden.sin()  # saves its input, so that the backward pass runs it again

    hidden = torch.ones(3, requires_grad=True)
    checkpoint(layer, hidden, to_marker(RULES[-1], LAYOUT), use_reentrant=use_reentrant).sum().backward()
    assert seen == [RULES[-1]] * 2


@pytest.mark.parametrize(
    "mask",
    [
        None,
        "mask",
        torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool),
        torch.zeros(1, 1, TOKENS, TOKENS),
        torch.ones(1, TOKENS, dtype=torch.long),
        torch.ones(1, 1, TOKENS + 1, 2, dtype=torch.long),
        torch.ones(1, 1, 5, 5, dtype=torch.long).tril(),
        torch.ones(1, 1, 2, 2, dtype=torch.long).tril(),
        torch.ones(1, 1, 0, 2, dtype=torch.long),
        to_marker(MaskRule(), LAYOUT).to(torch.int32),
        to_marker(MaskRule(), LAYOUT).float(),
        to_marker(MaskRule(), LAYOUT)[0],
    ],
    ids=lambda mask: str(getattr(mask, "shape", mask)),
)
def test_other_masks_are_not_markers(mask):
    assert from_marker(mask) is None


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_marker_is_not_a_valid_mask(layout):
    """A layer that is recomputed after the context exits must fail, not compute something wrong."""
    states = torch.zeros(1, 2, TOKENS, 8)
    for rule in RULES:
        mask = to_marker(rule, layout).float()
        with pytest.raises(RuntimeError):
            torch.nn.functional.scaled_dot_product_attention(states, states, states, attn_mask=mask)
