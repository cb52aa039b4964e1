"""Rows of caches: copied between caches, and kept so that the next call's prompts are encoded from where they ended.

Shapes: B rows, K key/value heads, S cached positions, H head size, T tokens of a prompt.

Encoding each turn's prompt from the start would make an episode of k turns cost O(k^2). Instead the cache row of a
sequence that leaves its decode batch is kept. The next call finds it by its tokens, and runs the model only on tokens
that are not cached: the last sampled one and those after it, such as a tool's result. A prompt that ends inside a kept
sequence, at a branch point, reuses the beginning of its cache.

Rows of layers with full attention and of windows are keys and values. States of convolutions and linear attention have
no positions. Layers may keep further tensors for each token, such as an indexer's keys; which of their dimensions
counts rows and which tokens is observed. Layers that keep anything else are not supported.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from pl_grouprl.rollout.engine import SampleRequest

_WINDOWS = {"DynamicSlidingWindowLayer", "LinearAttentionAndSlidingWindowAttentionLayer"}
_KEYS = _WINDOWS | {"LinearAttentionAndFullAttentionLayer"}
_STATES = {"LinearAttentionLayer", *(name for name in _KEYS if name.startswith("Linear"))}
"""transformers' layers that are copied as they are, by contents. Names, because not every release has all of them."""

_AXES: WeakKeyDictionary[type, dict[tuple[tuple[str, int], ...], dict[str, Axes]]] = WeakKeyDictionary()
"""What `token_axes` found, by class, and by names and numbers of dimensions of the tensors."""


@dataclass(eq=False)
class EncodedPrompt:
    """One encoding of a prompt, which sequences may share; compared by identity.

    Attributes:
        length: Number of its tokens.
        states: Its keys and values, [T, K, H] each, in each layer with full attention, None for other layers. Empty
            while only the cache that encoded the prompt has them.
    """

    length: int
    states: list[tuple[Tensor, Tensor] | None] = field(default_factory=list)


@dataclass(frozen=True)
class KeptSequence:
    """The cache of one sequence.

    Attributes:
        num_tokens: Tokens in the cache.
        layers: One row each, without padding. With a shared prompt, layers with full attention have only the tokens
            after it.
        prompt: The prompt that it shares with other sequences; None if it shares none.
        routed_experts: The experts of its tokens, on the CPU; None if they are not recorded.
    """

    num_tokens: int
    layers: list[Any]
    prompt: EncodedPrompt | None = None
    routed_experts: Tensor | None = None

    @cached_property
    def num_removable(self) -> int:
        """How many of its last tokens can be removed from all layers; at least one token stays."""
        removable = all(
            type(layer) is DynamicLayer or is_empty(layer) or token_axes(layer) is not None for layer in self.layers
        )
        return self.num_tokens - (1 if self.prompt is None else self.prompt.length) if removable else 0

    def cut(self, count: int) -> KeptSequence | None:
        """The cache of its first `count` tokens, as a view; None if the others cannot be removed."""
        removed = self.num_tokens - count
        if removed == 0 or removed > self.num_removable:
            return self if removed == 0 else None
        layers = [layer if is_empty(layer) else copy.copy(layer) for layer in self.layers]
        for layer in layers:
            layer.crop(-removed)
        experts = None if self.routed_experts is None else self.routed_experts[:count]
        return KeptSequence(count, layers, self.prompt, experts)

    def whole(self, index: int) -> Any:
        """A layer with the prompt in front."""
        states = None if self.prompt is None else self.prompt.states[index]
        return self.layers[index] if states is None else with_prompt(self.layers[index], 0, self.num_tokens, states)


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

    def claim(self, prompts: Sequence[SampleRequest]) -> list[KeptSequence | None]:
        """Find the kept cache of each prompt's beginning, and drop all others.

        A prompt that a kept sequence begins with (a branch of it) gets the cache of all its tokens but the last, if the
        layers can remove what follows. Any other gets the longest kept sequence that it extends.

        Args:
            prompts: The prompts; those with media continue nothing.

        Returns:
            A sequence per prompt, shorter than it because the last token has to run; None if there is none.
        """
        kept, self._sequences = self._sequences, {}
        ordered, keys = sorted(kept), [_key(prompt.token_ids) for prompt in prompts]
        # In sorted order, the prefixes of a key precede it, each a prefix of the next: `prefixes` is that stack.
        longest: dict[bytes, bytes] = {}
        prefixes: list[bytes] = []
        for key, is_kept in sorted([*((key, False) for key in keys), *((key, True) for key in kept)]):
            while prefixes and not key.startswith(prefixes[-1]):
                prefixes.pop()
            if is_kept:
                prefixes.append(key)
            elif prefixes:
                longest[key] = prefixes[-1]
        found: list[KeptSequence | None] = []
        for key, prompt in zip(keys, prompts, strict=True):
            place, begun = bisect_left(ordered, key), None
            if place < len(ordered) and ordered[place].startswith(key):  # sequences that begin with it come next
                begun = kept[ordered[place]].cut(len(prompt.token_ids) - 1)
            if begun is None and key in longest:
                begun = kept[longest[key]]
            found.append(None if prompt.media else begun)
        return found


def _key(token_ids: Sequence[int]) -> bytes:
    """Encode tokens so that bytes sort as the tokens do, and a prefix of tokens is a prefix of bytes."""
    return np.asarray(token_ids, dtype=">u4").tobytes()


# Copying rows.


def gather_rows(parts: Sequence[tuple[Tensor, Tensor]], width: int, capacity: int) -> Tensor:
    """Copy rows [., K, w, H] of every part into one buffer [B, K, capacity, H], each ending at `width`."""
    first = parts[0][0]
    buffer = first.new_empty(sum(len(rows) for _, rows in parts), first.shape[1], capacity, first.shape[3])
    start = 0
    for states, rows in parts:
        target = buffer[start : start + len(rows)]
        target[:, :, : width - states.shape[2]] = 0
        torch.index_select(states, 0, rows, out=target[:, :, width - states.shape[2] : width])
        start += len(rows)
    return buffer


def gather_layer(index: int, parts: Sequence[tuple[Any, Tensor]], width: int) -> Any:
    """A layer with copies of the rows of all parts, right-aligned and padded with zeros.

    Args:
        index: Number of the layer, for errors.
        parts: Layers of one kind, and the rows to take from each.
        width: Positions of the widest part.

    Raises:
        ValueError: If the layer caches anything but tensors of all tokens, the last keys and values, and states of
            fixed size, or keeps state outside the cache.
    """
    first, name = parts[0][0], type(parts[0][0]).__name__
    if is_empty(first):
        return first
    if name not in _KEYS | _STATES and (axes := token_axes(first)) is not None:
        return gather_rows_of_tokens(parts, axes, width)
    layer, has_contents = copy.copy(first), False
    if name in _KEYS and first.keys is not None:
        has_contents, most = True, max(part.keys.shape[2] for part, _ in parts)
        layer.keys = gather_rows([(part.keys, rows) for part, rows in parts], most, most)
        layer.values = gather_rows([(part.values, rows) for part, rows in parts], most, most)
        if name in _WINDOWS:
            layer.cumulative_length = width
    for kind in ("conv_states", "recurrent_states") if name in _STATES else ():
        gathered = {  # copied, because decoding writes into them
            number: None if state is None else torch.cat([getattr(part, kind)[number][rows] for part, rows in parts])
            for number, state in getattr(first, kind).items()
        }
        setattr(layer, kind, gathered)
        has_contents |= any(state is not None for state in gathered.values())
    if not has_contents:
        plain = next(cls.__name__ for cls in type(first).__mro__ if cls.__module__ != "pl_grouprl.rollout.hf.attention")
        known = plain in {"DynamicLayer"} | _KEYS | _STATES
        reason = (
            f"leaves its {plain} empty, so it keeps its state elsewhere" if known else f"caches its state as {plain}"
        )
        raise ValueError(f"layer {index} of the model {reason}, which HFRolloutEngine cannot copy; use another engine.")
    return layer


def take_row(layer: Any, row: int, num_tokens: int) -> Any:
    """A copy of one row's last tokens, or of its states."""
    if is_empty(layer):
        return layer
    taken, name = copy.copy(layer), type(layer).__name__
    if name not in _KEYS | _STATES and (axes := token_axes(layer)) is not None:
        for kind, (rows_axis, tokens_axis) in axes.items():
            tensor = getattr(layer, kind).narrow(rows_axis, row, 1)
            setattr(taken, kind, tensor.narrow(tokens_axis, tensor.shape[tokens_axis] - num_tokens, num_tokens).clone())
        return taken
    if name in _KEYS:
        taken.keys = layer.keys[row : row + 1, :, -num_tokens:].clone()
        taken.values = layer.values[row : row + 1, :, -num_tokens:].clone()
        if name in _WINDOWS:
            taken.cumulative_length = num_tokens
    for kind in ("conv_states", "recurrent_states") if name in _STATES else ():
        states: dict[int, Tensor | None] = getattr(layer, kind)
        copies = {number: None if state is None else state[row : row + 1].clone() for number, state in states.items()}
        setattr(taken, kind, copies)
    return taken


def with_prompt(layer: Any, row: int, num_tokens: int, states: tuple[Tensor, Tensor]) -> DynamicLayer:
    """A row of the tokens after a shared prompt, with the prompt in front: `num_tokens` in all."""
    own = num_tokens - len(states[0])
    whole = [
        torch.cat([prompt.transpose(0, 1)[None], suffix[row : row + 1, :, suffix.shape[2] - own :]], dim=2)
        for prompt, suffix in zip(states, (layer.keys, layer.values), strict=True)
    ]
    return filled(DynamicLayer(), whole)


def filled(layer: Any, states: Sequence[Tensor], num_tokens: int | None = None) -> Any:
    """Give an empty layer these keys and values, of `num_tokens` tokens if it keeps only the last."""
    layer.lazy_initialization(*states)
    layer.keys, layer.values = states
    if num_tokens is not None:
        layer.cumulative_length = num_tokens
    return layer


def is_empty(layer: Any) -> bool:
    """Whether a layer stores nothing: it reads another layer's cache, or needs none."""
    return type(layer).__name__ == "DummyLayer"  # by name, because not every release has the class


# Layers that keep further tensors for each token beside keys and values. Their names and shapes differ between models:
# a copy of the layer without data runs its own `reorder_cache` and `crop`. The layers keep transformers' class.


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
    usual = {"keys", "values", "device", "dtype"}
    return any(value is None and name not in usual for name, value in vars(layer).items())


def token_axes(layer: Any) -> dict[str, Axes] | None:
    """Dimensions of each tensor that a layer keeps; None unless each has an entry for every row and every token."""
    kept = {name: value for name, value in vars(layer).items() if isinstance(value, Tensor)}
    in_containers = any(isinstance(value, dict | list | tuple) for value in vars(layer).values())
    if not kept or in_containers or getattr(layer, "is_sliding", False):
        return None
    known, shape = _AXES.setdefault(type(layer), {}), tuple((name, tensor.dim()) for name, tensor in kept.items())
    axes = known.get(shape)
    if axes is None:
        unused = 1 + max(max(tensor.shape, default=0) for tensor in kept.values())  # a size that no dimension has
        indices = torch.zeros(unused, dtype=torch.int64)
        found = [_changed(layer, kept, "reorder_cache", indices), _changed(layer, kept, "crop", -1)]
        if None in found:
            return None
        axes = {name: Axes(*(dims[name] for dims in found if dims is not None)) for name in kept}
    if any(kept[name].shape[axes[name].tokens] != layer.get_seq_length() for name in kept):
        return None
    known[shape] = axes
    return axes


def _changed(layer: Any, kept: dict[str, Tensor], operation: str, argument: Any) -> dict[str, int] | None:
    """The dimension of each tensor whose size an operation of the layer changes; None if that is not one of each."""
    probe = copy.copy(layer)
    for name, tensor in kept.items():
        setattr(probe, name, torch.empty_like(tensor, device="meta"))
    try:
        getattr(probe, operation)(argument)
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


def gather_rows_of_tokens(parts: Sequence[tuple[Any, Tensor]], axes: dict[str, Axes], width: int) -> Any:
    """`gather_layer` for a layer with further tensors."""
    layer = copy.copy(parts[0][0])
    for name, (rows_axis, tokens_axis) in axes.items():
        pieces = []
        for part, rows in parts:
            piece = getattr(part, name).index_select(rows_axis, rows)
            missing = [*piece.shape]
            missing[tokens_axis] = width - piece.shape[tokens_axis]
            pieces.append(
                torch.cat([piece.new_zeros(missing), piece], dim=tokens_axis) if missing[tokens_axis] else piece
            )
        setattr(layer, name, pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=rows_axis))
    return layer
