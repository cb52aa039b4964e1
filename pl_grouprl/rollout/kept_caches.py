"""Keeps the caches of sampled sequences, so that encoding a prompt that extends one starts where it ended.

Encoding each turn's prompt from the start would make an episode of k turns cost O(k^2). Here the
cache row of a sequence that leaves its decode batch is kept. The next call finds it by its tokens, and runs the model
only on tokens that are not cached: the last sampled one and those after it, such as a tool's result. A prompt that ends
inside a kept sequence, at a branch point, reuses the beginning of its cache.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from pl_grouprl.rollout.kv_cache import shares_prompts
from pl_grouprl.rollout.preallocated_cache import GrowingLayer
from pl_grouprl.rollout.prompt_rows import EncodedPrompt
from pl_grouprl.rollout.shared_prompt import ContinuedPromptsLayer, ContinuedRow, dynamic_layer
from pl_grouprl.rollout.token_layers import take_row_of_tokens, token_axes, without_last_tokens
from pl_grouprl.types import Prompt


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
