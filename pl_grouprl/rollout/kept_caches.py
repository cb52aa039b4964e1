"""Keeps the caches of sampled sequences, so that a prompt that continues one is encoded from where it ended.

Shapes: B sequences that are encoded together, S positions.

In an episode of k turns, encoding each turn's prompt from the start would cost the square of k. Here a sequence that
leaves its decode batch leaves its part of the cache; the next call finds it by its tokens, and runs the model only on
the tokens that the cache lacks: the last sampled one and those that follow it, such as a tool's result.

Sequences are encoded together, aligned on the right, and without padding between their cached and their new tokens,
which would break windows and states: each runs as many tokens as the one with most new ones, so the others run some of
their cached tokens once more. Layers that cannot forget positions get sequences with the same number of new tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from pl_grouprl.rollout.kv_cache import gather_cache
from pl_grouprl.rollout.preallocated_cache import GrowingLayer
from pl_grouprl.rollout.prefill import MAX_PADDING, NextTokenLogits, Prefix, left_padding_mask, plan_batches
from pl_grouprl.rollout.shared_prompt import ContinuedPromptsLayer
from pl_grouprl.types import Prompt

MAX_REPEATED = 16
"""Cached tokens per sequence that may run again to share a forward pass: about the cost of a pass."""


@dataclass(frozen=True)
class KeptSequence:
    """The cache of one sequence.

    Attributes:
        num_tokens: Tokens in the cache.
        cache: One row, without padding.
    """

    num_tokens: int
    cache: Cache

    @property
    def can_forget(self) -> bool:
        """Whether its last tokens can be removed from all layers."""
        return all(type(layer) is DynamicLayer or _is_empty(layer) for layer in self.cache.layers)

    def first(self, count: int) -> Cache:
        """The cache of the first `count` tokens, a view; all of them unless it `can_forget`."""
        if count == self.num_tokens:
            return self.cache
        layers: list[Any] = self.cache.layers
        return Cache(layers=[layer if _is_empty(layer) else _cropped(layer, count) for layer in layers])


class KeptCaches:
    """Caches of the sequences of one call, for the next one to continue."""

    def __init__(self) -> None:
        self._sequences: dict[bytes, KeptSequence] = {}

    def add(self, token_ids: Sequence[int], cache: Cache) -> None:
        """Keep the cache of these tokens."""
        self._sequences[_key(token_ids)] = KeptSequence(len(token_ids), cache)

    def claim(self, prompts: Sequence[Prompt]) -> list[KeptSequence | None]:
        """Hand out the longest sequence that each prompt continues, and forget all others.

        Args:
            prompts: Those with media continue nothing.

        Returns:
            Sequences shorter than their prompts, because the last token has to run; None where there is none.
        """
        kept, self._sequences = self._sequences, {}
        keys = [_key(prompt.token_ids) for prompt in prompts]
        found = _longest_prefixes((key for key, prompt in zip(keys, prompts, strict=True) if not prompt.media), kept)
        return [kept.get(found.get(key, b"")) for key in keys]


def _key(token_ids: Sequence[int]) -> bytes:
    """Bytes that sort as the tokens do, and begin with those of every prefix."""
    return np.asarray(token_ids, dtype=">u4").tobytes()


def _longest_prefixes(keys: Iterable[bytes], kept: Iterable[bytes]) -> dict[bytes, bytes]:
    """The longest kept key that each key begins with, and is longer than.

    In sorted order, the kept keys that a key begins with come before it, each the beginning of the next one.
    """
    found, beginnings = {}, []
    for key, is_kept in sorted([*((key, False) for key in keys), *((key, True) for key in kept)]):
        while beginnings and not key.startswith(beginnings[-1]):
            beginnings.pop()
        if is_kept:
            beginnings.append(key)
        elif beginnings:
            found[key] = beginnings[-1]
    return found


def take_row(cache: Cache, row: int, num_tokens: int) -> Cache:
    """Copy one sequence of a decode batch, without padding.

    Args:
        cache: From `kv_cache.gather_cache`.
        row: Row of the sequence.
        num_tokens: Its tokens in the cache.
    """
    layers: list[Any] = cache.layers
    return Cache(layers=[_take(layer, row, num_tokens) for layer in layers])


def _take(layer: Any, row: int, num_tokens: int) -> Any:
    if _is_empty(layer):
        return layer
    if isinstance(layer, ContinuedPromptsLayer):
        return _dynamic_layer(*layer.whole_row(row))
    if isinstance(layer, GrowingLayer):
        return _dynamic_layer(
            *(states[row : row + 1, :, -num_tokens:].clone() for states in (layer.keys, layer.values))
        )
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


def _is_empty(layer: Any) -> bool:
    return type(layer).__name__ == "DummyLayer"  # a name, because not every release has it


def _cropped(layer: DynamicLayer, count: int) -> DynamicLayer:
    return _dynamic_layer(*(states[:, :, :count] for states in (layer.keys, layer.values)))  # type: ignore[index]


def _dynamic_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer


def plan_continuing(
    lengths: Sequence[int], kept: Sequence[KeptSequence], max_tokens: int, *, padding: bool = True
) -> list[range]:
    """Split prompts that continue kept sequences into batches.

    Args:
        lengths: Tokens of each prompt, sorted by the number of new ones, then by length.
        kept: The sequence that each continues.
        max_tokens: Most tokens of a batch that run; a prompt with more gets a separate batch.
        padding: Whether prompts of different lengths may share a forward pass.

    Returns:
        The consecutive indices of each batch.
    """
    new = [length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True)]

    def fits(first: int, last: int) -> bool:
        if (last + 1 - first) * new[last] > max_tokens or (not padding and lengths[first] != lengths[last]):
            return False
        if new[first] == new[last]:
            return True
        repeated = new[last] - new[first]
        few = repeated <= max(MAX_REPEATED, MAX_PADDING * new[first])
        return padding and few and kept[first].can_forget and min(lengths[first : last + 1]) >= new[last]

    return plan_batches(len(lengths), fits)


def continue_sequences(logits: NextTokenLogits, prompts: Sequence[Prompt], kept: Sequence[KeptSequence]) -> Prefix:
    """Encode prompts from where kept sequences end, in one forward pass.

    Args:
        logits: The model.
        prompts: Prompts without media; a batch of `plan_continuing`.
        kept: The sequence that each continues.
    """
    lengths, device = [len(prompt.token_ids) for prompt in prompts], logits.device
    new = max(length - sequence.num_tokens for length, sequence in zip(lengths, kept, strict=True))
    cached = [length - new for length in lengths]
    width, row = max(cached), torch.zeros(1, dtype=torch.int64, device=device)
    parts = [(sequence.first(count), row) for sequence, count in zip(kept, cached, strict=True)]
    cache = gather_cache(parts, width, width + new)
    input_ids = torch.tensor([list(prompt.token_ids[-new:]) for prompt in prompts], device=device)
    position_ids = torch.tensor(cached, device=device).unsqueeze(-1) + torch.arange(new, device=device)
    mask = left_padding_mask(lengths, width + new, device)
    return Prefix(cache, logits(input_ids, cache, position_ids, mask), lengths, lengths)
