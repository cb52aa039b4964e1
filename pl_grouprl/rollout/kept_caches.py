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

from pl_grouprl.rollout.kv_cache import gather_cache, needs_padding_mask, shares_prompts
from pl_grouprl.rollout.preallocated_cache import GrowingLayer
from pl_grouprl.rollout.prefill import MAX_PADDING, NextTokenLogits, Prefix, left_padding_mask, plan_batches
from pl_grouprl.rollout.prompt_rows import EncodedPrompt, find_shared_prompts
from pl_grouprl.rollout.shared_prompt import ContinuedPromptsLayer, ContinuedRow, dynamic_layer
from pl_grouprl.types import Prompt

MAX_REPEATED = 16
"""Cached tokens per sequence that may run again to share a forward pass: about the cost of a pass."""


@dataclass(frozen=True)
class KeptSequence:
    """The cache of one sequence.

    Attributes:
        num_tokens: Tokens in the cache.
        cache: One row, without padding.
        prompt: The prompt at its beginning that it shares with others, in the layers that can do so; None if it shares
            none.
    """

    num_tokens: int
    cache: Cache
    prompt: EncodedPrompt | None = None

    @property
    def num_removable(self) -> int:
        """How many of its last tokens can be removed from all layers; not all of them."""
        if all(type(layer) in (DynamicLayer, ContinuedRow) or _is_empty(layer) for layer in self.cache.layers):
            return self.num_tokens - max(self._num_shared, 1)
        return 0

    @property
    def _num_shared(self) -> int:
        return 0 if self.prompt is None else self.prompt.length

    def first(self, count: int) -> Cache:
        """The cache of the first `count` tokens, a view; others must be removable."""
        layers: list[Any] = self.cache.layers
        return self.cache if count == self.num_tokens else Cache(layers=[self._first(layer, count) for layer in layers])

    def _first(self, layer: Any, count: int) -> Any:
        if isinstance(layer, ContinuedRow):
            return layer.first(count - self._num_shared)
        return layer if _is_empty(layer) else dynamic_layer(layer.keys[:, :, :count], layer.values[:, :, :count])


class KeptCaches:
    """Caches of the sequences of one call, for the next one to continue."""

    def __init__(self) -> None:
        self._sequences: dict[bytes, KeptSequence] = {}

    def add(self, token_ids: Sequence[int], sequence: KeptSequence) -> None:
        """Keep the cache of these tokens."""
        self._sequences[_key(token_ids)] = sequence

    def clear(self) -> None:
        """Forget all."""
        self._sequences = {}

    def claim(self, prompts: Sequence[Prompt]) -> list[KeptSequence | None]:
        """Hand out the longest sequence that each prompt continues, and forget all others.

        Args:
            prompts: Those with media continue nothing.

        Returns:
            Sequences shorter than their prompts, because the last token has to run; None where there is none.
        """
        kept, self._sequences = self._sequences, {}
        keys = [_key(prompt.token_ids) for prompt in prompts]
        found = _longest_prefixes(keys, kept)
        return [
            None if prompt.media or key not in found else kept[found[key]]
            for key, prompt in zip(keys, prompts, strict=True)
        ]


def _key(token_ids: Sequence[int]) -> bytes:
    """Bytes that sort as the tokens do, and begin with those of every prefix."""
    return np.asarray(token_ids, dtype=">u4").tobytes()


def _longest_prefixes(keys: Iterable[bytes], kept: Iterable[bytes]) -> dict[bytes, bytes]:
    """The longest kept key that each key begins with, and is longer than.

    In sorted order, the kept keys that a key begins with come before it, each the beginning of the next one.
    """
    found: dict[bytes, bytes] = {}
    beginnings: list[bytes] = []
    for key, is_kept in sorted([*((key, False) for key in keys), *((key, True) for key in kept)]):
        while beginnings and not key.startswith(beginnings[-1]):
            beginnings.pop()
        if is_kept:
            beginnings.append(key)
        elif beginnings:
            found[key] = beginnings[-1]
    return found


def take_row(cache: Cache, row: int, num_tokens: int, prompt: EncodedPrompt) -> KeptSequence:
    """Copy one sequence of a decode batch, without padding; a shared prompt is not copied.

    Args:
        cache: From `kv_cache.gather_cache`.
        row: Row of the sequence.
        num_tokens: Its tokens in the cache.
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
        whole = slice(row, row + 1), slice(None), slice(-num_tokens, None)
        return dynamic_layer(layer.keys[whole].clone(), layer.values[whole].clone())
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
        few = new[last] - new[first] <= (max(MAX_REPEATED, MAX_PADDING * new[first]) if padding else 0)
        return few and all(new[last] - new[index] <= kept[index].num_removable for index in range(first, last))

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
    shared = [sequence.prompt or EncodedPrompt(count) for sequence, count in zip(kept, cached, strict=True)]
    prompts_of_rows = [([prompt], [count], [0]) for prompt, count in zip(shared, cached, strict=True)]
    cache = gather_cache(parts, width, width + new, find_shared_prompts(prompts_of_rows, device, 0))
    input_ids = torch.tensor([list(prompt.token_ids[-new:]) for prompt in prompts], device=device)
    position_ids = torch.tensor(cached, device=device).unsqueeze(-1) + torch.arange(new, device=device)
    mask = left_padding_mask(lengths, width + new, device) if needs_padding_mask(cache) else None
    if not shares_prompts(cache):
        shared = [EncodedPrompt(length) for length in lengths]
    return Prefix(cache, logits(input_ids, cache, position_ids, mask), lengths, lengths, shared)
