"""Caches of decode batches, and of sampled sequences that later prompts extend."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from pl_grouprl.rollout.hf.shared_prompt import (
    ContinuedPromptsLayer,
    ContinuedRow,
    EncodedPrompt,
    GrowingLayer,
    PromptLayer,
    SharedPrompts,
    can_share,
    dynamic_layer,
    gather_rows,
    whole_rows,
)
from pl_grouprl.types import Prompt

# Rows of cache layers that keep further tensors for each token, such as an indexer's keys, beside keys and values.
#
# Their names and shapes differ between models. Which dimension counts rows and which tokens is observed: a copy of the
# layer without data runs its own `reorder_cache` and `crop`. The layers keep transformers' class.

_AXES: WeakKeyDictionary[type, dict[tuple[tuple[str, int], ...], dict[str, Axes]]] = WeakKeyDictionary()
"""What was found, by class, and by names and numbers of dimensions of the tensors."""

_ALWAYS_EMPTY = {"keys", "values", "device", "dtype"}


class Axes(NamedTuple):
    """Dimensions of a tensor that a layer keeps for each token.

    Attributes:
        rows: The dimension of rows.
        tokens: The dimension of cached tokens.
    """

    rows: int
    tokens: int


def keeps_more(layer: Any) -> bool:
    """Whether an empty layer has room for more than keys, values and states."""
    return any(value is None and name not in _ALWAYS_EMPTY for name, value in vars(layer).items())


def token_axes(layer: Any) -> dict[str, Axes] | None:
    """Dimensions of each tensor that a layer keeps; None unless each has an entry for every row and every token."""
    kept = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    in_containers = any(isinstance(value, dict | list | tuple) for value in vars(layer).values())
    if not kept or in_containers or layer.is_sliding:
        return None
    known, shape = _AXES.setdefault(type(layer), {}), tuple((name, tensor.dim()) for name, tensor in kept.items())
    axes = known.get(shape) or _find_axes(layer, kept)
    if axes is None or any(kept[name].shape[axes[name].tokens] != layer.get_seq_length() for name in kept):
        return None
    known[shape] = axes
    return axes


def gather_rows_of_tokens(parts: Sequence[tuple[Any, Tensor]], axes: dict[str, Axes], width: int) -> Any:
    """A layer with copies of the rows of all parts, right-aligned and padded with zeros.

    Args:
        parts: Layers of one kind, and the rows to take from each.
        axes: From `token_axes`.
        width: Tokens of the longest.
    """
    layer = copy.copy(parts[0][0])
    for name, (rows_axis, tokens_axis) in axes.items():
        pieces = [
            _padded(getattr(part, name).index_select(rows_axis, rows), tokens_axis, width) for part, rows in parts
        ]
        setattr(layer, name, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=rows_axis))
    return layer


def take_row_of_tokens(layer: Any, axes: dict[str, Axes], row: int, num_tokens: int) -> Any:
    """A layer with a copy of one row's last tokens."""
    taken = copy.copy(layer)
    for name, (rows_axis, tokens_axis) in axes.items():
        tensor = getattr(layer, name).narrow(rows_axis, row, 1)
        setattr(taken, name, tensor.narrow(tokens_axis, tensor.shape[tokens_axis] - num_tokens, num_tokens).clone())
    return taken


def without_last_tokens(layer: Any, count: int) -> Any:
    """The layer without its last tokens, as a view."""
    shorter = copy.copy(layer)
    shorter.crop(-count)
    return shorter


def _find_axes(layer: Any, kept: dict[str, Tensor]) -> dict[str, Axes] | None:
    unused = 1 + max(max(tensor.shape, default=0) for tensor in kept.values())  # a size that no dimension has
    rows = _changed(layer, kept, lambda probe: probe.reorder_cache(torch.zeros(unused, dtype=torch.int64)))
    tokens = _changed(layer, kept, lambda probe: probe.crop(-1))
    return None if rows is None or tokens is None else {name: Axes(rows[name], tokens[name]) for name in kept}


def _changed(layer: Any, kept: dict[str, Tensor], run: Callable[[Any], None]) -> dict[str, int] | None:
    """The dimension of each tensor whose size an operation of the layer changes; None if that is not one of each."""
    probe = copy.copy(layer)
    for name, tensor in kept.items():
        setattr(probe, name, torch.empty_like(tensor, device="meta"))
    try:
        run(probe)
    except Exception:  # the layer lacks the operation, or refuses it
        return None
    found = {}
    for name, tensor in kept.items():
        after = getattr(probe, name)
        dims = [dim for dim, size in enumerate(after.shape) if size != tensor.shape[dim]]
        if after.dim() != tensor.dim() or len(dims) != 1:
            return None
        found[name] = dims[0]
    return found


def _padded(tensor: Tensor, axis: int, width: int) -> Tensor:
    missing = width - tensor.shape[axis]
    if missing == 0:
        return tensor
    return torch.cat([tensor.new_zeros([*tensor.shape[:axis], missing, *tensor.shape[axis + 1 :]]), tensor], dim=axis)


# The cache of a decode batch: prefilled prompts, shared or copied, with spare capacity and removable rows.
#
# Shapes: B rows of a decode batch, K key/value heads, S cached positions, H head size.
#
# Layers with full attention share the prompts if that pays off (`shared_prompt`), and grow without copying
# (`preallocated_cache`). The last row replaces a row that leaves, so dropping k rows copies at most k rows.
#
# Other layers keep transformers' class and are copied row by row: sliding windows and chunks, which keep only the last
# positions; the states of convolutions and linear attention, which have no positions; and layers that keep more for
# each
# token, such as an indexer's keys (`token_layers`). Layers that keep anything else are refused.

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


# Keeps the caches of sampled sequences, so that encoding a prompt that extends one starts where it ended.
#
# Encoding each turn's prompt from the start would make an episode of k turns cost O(k^2). Here the
# cache row of a sequence that leaves its decode batch is kept. The next call finds it by its tokens, and runs the model
# only on tokens that are not cached: the last sampled one and those after it, such as a tool's result. A prompt that
# ends
# inside a kept sequence, at a branch point, reuses the beginning of its cache.


@dataclass(frozen=True)
class KeptSequence:
    """The cache of one sequence.

    Attributes:
        num_tokens: Tokens in the cache.
        cache: One row, without padding.
        prompt: The prompt that it shares with other sequences, in layers that can share; None if it shares none.
    """

    num_tokens: int
    cache: Cache
    prompt: EncodedPrompt | None = None

    @cached_property
    def num_removable(self) -> int:
        """How many of its last tokens can be removed from all layers; at least one token stays."""
        return self.num_tokens - max(self._num_shared, 1) if all(map(_is_removable, self.cache.layers)) else 0

    @property
    def _num_shared(self) -> int:
        return 0 if self.prompt is None else self.prompt.length

    def first(self, count: int) -> Cache:
        """The cache of the first `count` tokens, as a view; the others must be removable."""
        layers: list[Any] = self.cache.layers
        return self.cache if count == self.num_tokens else Cache(layers=[self._first(layer, count) for layer in layers])

    def cut(self, count: int) -> KeptSequence | None:
        """The cache of its first tokens; None if the others cannot be removed."""
        removed = self.num_tokens - count
        if removed > self.num_removable:
            return None
        return self if removed == 0 else KeptSequence(count, self.first(count), self.prompt)

    def _first(self, layer: Any, count: int) -> Any:
        if isinstance(layer, ContinuedRow):
            return layer.first(count - self._num_shared)
        return layer if _is_empty(layer) else without_last_tokens(layer, self.num_tokens - count)


class KeptCaches:
    """Caches of the sequences of one call, for the next call to continue."""

    def __init__(self) -> None:
        self._sequences: dict[bytes, KeptSequence] = {}

    def add(self, token_ids: Sequence[int], sequence: KeptSequence) -> None:
        """Keep the cache of these tokens."""
        self._sequences[_key(token_ids)] = sequence

    def clear(self) -> None:
        """Drop all."""
        self._sequences = {}

    def claim(self, prompts: Sequence[Prompt]) -> list[KeptSequence | None]:
        """Find the kept cache of each prompt's beginning, and drop all others.

        A prompt that a kept sequence begins with (a branch of it) gets the cache of all its tokens but the last, if the
        layers can remove what follows. Any other gets the longest kept sequence that it extends.

        Args:
            prompts: The prompts; those with media continue nothing.

        Returns:
            A sequence per prompt, shorter than it because the last token has to run; None if there is none.
        """
        kept, self._sequences = self._sequences, {}
        keys = [_key(prompt.token_ids) for prompt in prompts]
        found, ordered = _longest_prefixes(keys, kept), sorted(kept)

        def of(key: bytes, length: int) -> KeptSequence | None:
            place = bisect_left(ordered, key)  # sequences that begin with the key are the next ones
            if place < len(ordered) and ordered[place].startswith(key):
                begun = kept[ordered[place]].cut(length - 1)
                if begun is not None:
                    return begun
            return kept[found[key]] if key in found else None

        return [
            None if prompt.media else of(key, len(prompt.token_ids)) for key, prompt in zip(keys, prompts, strict=True)
        ]


def _key(token_ids: Sequence[int]) -> bytes:
    """Encode tokens so that bytes sort as the tokens do, and a prefix of tokens is a prefix of bytes."""
    return np.asarray(token_ids, dtype=">u4").tobytes()


def _longest_prefixes(keys: Iterable[bytes], kept: Iterable[bytes]) -> dict[bytes, bytes]:
    """The longest kept key that is a proper prefix of each key.

    In sorted order, a key's prefixes precede it, each a prefix of the next; `prefixes` is that stack.
    """
    found: dict[bytes, bytes] = {}
    prefixes: list[bytes] = []
    for key, is_kept in sorted([*((key, False) for key in keys), *((key, True) for key in kept)]):
        while prefixes and not key.startswith(prefixes[-1]):
            prefixes.pop()
        if is_kept:
            prefixes.append(key)
        elif prefixes:
            found[key] = prefixes[-1]
    return found


def take_row(cache: Cache, row: int, num_tokens: int, prompt: EncodedPrompt) -> KeptSequence:
    """Copy the cache of one sequence of a decode batch, without padding; a shared prompt is not copied.

    Args:
        cache: From `kv_cache.gather_cache`.
        row: Row of the sequence.
        num_tokens: Number of its tokens in the cache.
        prompt: Its prompt, if layers share it.
    """
    layers: list[Any] = cache.layers
    taken = Cache(layers=[_take(layer, row, num_tokens) for layer in layers])
    return KeptSequence(num_tokens, taken, prompt if shares_prompts(cache) else None)


def _take(layer: Any, row: int, num_tokens: int) -> Any:
    if _is_empty(layer):
        return layer
    if isinstance(layer, ContinuedPromptsLayer):
        return layer.row(row).clone()
    if isinstance(layer, GrowingLayer):
        unpadded = slice(row, row + 1), slice(None), slice(-num_tokens, None)
        return dynamic_layer(layer.keys[unpadded].clone(), layer.values[unpadded].clone())
    if (axes := token_axes(layer)) is not None:
        return take_row_of_tokens(layer, axes, row, num_tokens)
    taken = copy.copy(layer)
    if getattr(layer, "keys", None) is not None:
        for name in ("keys", "values"):
            setattr(taken, name, getattr(layer, name)[row : row + 1, :, -num_tokens:].clone())
    if hasattr(layer, "cumulative_length"):
        taken.cumulative_length = num_tokens
    for name in ("conv_states", "recurrent_states"):
        states: dict[int, Tensor | None] = getattr(layer, name, {})
        copies = {number: None if state is None else state[row : row + 1].clone() for number, state in states.items()}
        if copies:
            setattr(taken, name, copies)
    return taken


def _is_removable(layer: Any) -> bool:
    return type(layer) in (DynamicLayer, ContinuedRow) or _is_empty(layer) or token_axes(layer) is not None


def _is_empty(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"  # by name, because not every release has the class
