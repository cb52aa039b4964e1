"""The cache of a decode batch: prefilled prompts, shared or copied, with spare capacity and removable rows.

Shapes: B rows of a decode batch, K key/value heads, S cached positions, H head size.

Layers with full attention share the prompts if that pays off (`shared_prompt`), and grow without copying
(`preallocated_cache`). The last row replaces a row that leaves, so dropping k rows copies at most k rows.

Other layers keep transformers' class and are copied row by row: sliding windows and chunks, which keep only the last
positions; the states of convolutions and linear attention, which have no positions; and layers that keep more for each
token, such as an indexer's keys (`token_layers`). Layers that keep anything else are refused.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from pl_grouprl.rollout.preallocated_cache import GrowingLayer, gather_rows
from pl_grouprl.rollout.prompt_rows import SharedPrompts
from pl_grouprl.rollout.shared_prompt import (
    ContinuedPromptsLayer,
    PromptLayer,
    can_share,
    whole_rows,
)
from pl_grouprl.rollout.token_layers import gather_rows_of_tokens, token_axes

Part = tuple[Cache, Tensor]
"""A prefilled, right-aligned cache, and the rows to take from it, possibly with repetition."""

_KEYS = {
    "DynamicSlidingWindowLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
_STATES = {
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
"""transformers' layers that are copied unchanged, by contents. Names, because not every release has all of them."""


def gather_cache(parts: Sequence[Part], width: int, limit: int, prompts: SharedPrompts | None = None) -> Cache:
    """Build the cache of a decode batch from prefilled prompts.

    Args:
        parts: Prefilled caches and the rows to take, in batch order.
        width: Positions of the widest part; narrower ones are padded on the left with zeros, to be masked.
        limit: Most positions that decoding will need.
        prompts: The prompts, for layers that can share them; None copies them for every row.

    Raises:
        ValueError: If a layer caches anything but tensors of all tokens, the last keys and values, and states of fixed
            size, or keeps state outside the cache.
    """
    first: list[Any] = parts[0][0].layers
    layers: list[Any] = []
    for index in range(len(first)):
        held = [(cache.layers[index], rows) for cache, rows in parts]
        if prompts is not None and can_share([layer for layer, _ in held]):
            layers.append(ContinuedPromptsLayer(held, prompts, width, limit))
        else:
            layers.append(_gather_layer(index, whole_rows(held), width, limit))
    return Cache(layers=layers)


def needs_padding_mask(cache: Cache) -> bool:
    """Whether the cache contains padding; shared prompts are stored without."""
    return not all(isinstance(layer, ContinuedPromptsLayer) for layer in cache.layers)


def shares_prompts(cache: Cache) -> bool:
    """Whether a layer shares prompts."""
    return any(isinstance(layer, ContinuedPromptsLayer) for layer in cache.layers)


def has_states(cache: Cache) -> bool:
    """Whether a layer accumulates a state, from which padding cannot be masked afterwards."""
    return any(type(layer).__name__ in _STATES for layer in cache.layers)


def _gather_layer(index: int, parts: Sequence[tuple[Any, Tensor]], width: int, limit: int) -> Any:
    first = parts[0][0]
    name = type(first).__name__
    if name == "DummyLayer":  # stores nothing: reads another layer's cache, or needs none
        return first
    if type(first) in (DynamicLayer, PromptLayer, GrowingLayer) and first.is_initialized:
        capacity = GrowingLayer.capacity(width, limit)
        keys = gather_rows([(part.keys, rows) for part, rows in parts], width, capacity)
        values = gather_rows([(part.values, rows) for part, rows in parts], width, capacity)
        return GrowingLayer(keys, values, width, limit)
    if name not in _KEYS | _STATES and (axes := token_axes(first)) is not None:
        return gather_rows_of_tokens(parts, axes, width)
    layer = copy.copy(first)
    if name in _KEYS and first.keys is not None:
        _gather_keys(layer, parts, width)
    if name in _STATES:
        _gather_states(layer, parts)
    if not _has_contents(layer):
        raise ValueError(
            f"layer {index} of the model {_unsupported_reason(first)}; HFRolloutEngine can only copy what a layer "
            "keeps for every token, the keys and values of a window, and states of fixed size. Choose another rollout "
            "engine for this model."
        )
    return layer


def _has_contents(layer: Any) -> bool:
    name = type(layer).__name__
    states = [*getattr(layer, "conv_states", {}).values(), *getattr(layer, "recurrent_states", {}).values()]
    has_keys = name in _KEYS and layer.keys is not None
    return has_keys or (name in _STATES and any(state is not None for state in states))


def _unsupported_reason(layer: Any) -> str:
    name = "DynamicLayer" if isinstance(layer, PromptLayer) else type(layer).__name__
    if name in {"DynamicLayer"} | _KEYS | _STATES:
        return f"leaves its {name} empty, so it keeps its state elsewhere"
    return f"caches its state as {name}"


def _gather_keys(layer: Any, parts: Sequence[tuple[Any, Tensor]], width: int) -> None:
    """Give a layer copies of the keys and values of all parts; a sliding window has only the last positions."""
    kept = max(part.keys.shape[2] for part, _ in parts)
    layer.keys = gather_rows([(part.keys, rows) for part, rows in parts], kept, kept)
    layer.values = gather_rows([(part.values, rows) for part, rows in parts], kept, kept)
    if hasattr(layer, "cumulative_length"):
        layer.cumulative_length = width


def _gather_states(layer: Any, parts: Sequence[tuple[Any, Tensor]]) -> None:
    """Give a layer copies of the states of all parts, because decoding writes into them."""
    for name in ("conv_states", "recurrent_states"):
        states: dict[int, Tensor | None] = getattr(layer, name)
        copies = {
            number: None if state is None else torch.cat([getattr(part, name)[number][rows] for part, rows in parts])
            for number, state in states.items()
        }
        setattr(layer, name, copies)


def drop_rows(cache: Cache, finished_B: Tensor) -> Tensor:
    """Remove finished rows from the cache by moving rows from the end into their places.

    Args:
        cache: From `gather_cache`; changed in place.
        finished_B: True where a row leaves, bool, shape [B]; at least one row stays.

    Returns:
        The old index of each remaining row, int64.
    """
    remaining = int((~finished_B).sum())
    targets = finished_B[:remaining].nonzero().squeeze(-1)
    sources = (~finished_B[remaining:]).nonzero().squeeze(-1) + remaining
    order = torch.arange(remaining, device=finished_B.device)
    order[targets] = sources
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, GrowingLayer):
            layer.move_rows(targets, sources, remaining)
        else:
            layer.reorder_cache(order)
    shared = next((layer.prompts.rows for layer in layers if isinstance(layer, ContinuedPromptsLayer)), None)
    if shared is not None:  # one object for all layers
        shared.keep(order.tolist())
    return order
