"""Cached prompts, stored once and read once per step for any number of rollouts.

Shapes: B rows of a decode batch, P prompts of it, T tokens of all its prompts, K key/value heads, H head size.

With a copy of the prompt's keys and values per rollout, reading them would dominate a step. Here prompts are stored
once, concatenated, and each row has a buffer for its own tokens. Encoding the prompts shows which layers allow this
(`prompt_attention`): those that attend to all keys, through transformers' attention interface. The others get copies
(`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from pl_grouprl.rollout.preallocated_cache import GrowingLayer

MIN_SAVED_TOKENS = 256
"""Minimum of copied tokens that sharing must save per prompt and layer, about the cost of a prompt's extra call."""


class PromptLayer(DynamicLayer):
    """The cache of prompts while they are encoded. Its keys refer to it, so attention can report how it read them."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: list[bool] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, as `DynamicLayer` does."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        tag_keys(keys, self)
        return keys, values

    def was_read(self, plainly: bool) -> None:
        """Record that an attention layer read these keys and values, and whether plainly (with just a causal mask)."""
        self._readers.append(plainly)

    @property
    def can_be_shared(self) -> bool:
        """Whether all its readers would get the same result from prompt and continuation separately."""
        return bool(self._readers) and all(self._readers)


def tag_keys(keys: Tensor, layer: Any) -> None:
    """Mark keys with their cache layer; tensors computed from them lose the mark.

    Uses a weak reference: the layer references its keys, and a cycle would keep both until garbage collection.
    """
    keys.cache_layer = ref(layer)  # type: ignore[attr-defined]


def layer_of_keys(keys: Tensor) -> Any:
    """The cache layer of exactly these keys, or None."""
    layer = getattr(keys, "cache_layer", None)
    return None if layer is None else layer()


class PromptRows:
    """Which prompt each row of a decode batch continues; shared by all layers of its cache.

    Args:
        prompts: Index of each row's prompt, ascending.
        device: Device of the cache.

    Attributes:
        counts: Number of rows of each prompt.
        starts: Start of each prompt's rows in `order`, and their total number, int32 [P + 1].
        order: Rows sorted by prompt, int64 [B]; None if already sorted.
        inverse: Index of each row in `order`; None likewise.
    """

    def __init__(self, prompts: Sequence[int], device: torch.device) -> None:
        self._prompts, self._device = list(prompts), device
        self.counts = [0] * (max(prompts) + 1)
        self._arrange()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows at `order`, in that order."""
        self._prompts = [self._prompts[row] for row in order]
        self._arrange()

    def prompt_of(self, row: int) -> int:
        """Index of a row's prompt."""
        return self._prompts[row]

    def _arrange(self) -> None:
        self.counts = [0] * len(self.counts)
        for prompt in self._prompts:
            self.counts[prompt] += 1
        self.starts = _starts(self.counts, self._device)
        order = sorted(range(len(self._prompts)), key=self._prompts.__getitem__)
        self.order: Tensor | None = None
        self.inverse: Tensor | None = None
        if order != list(range(len(order))):
            self.order = torch.tensor(order, device=self._device)
            self.inverse = self.order.argsort()


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of a decode batch.

    Attributes:
        places: For each prompt, its part, its row there, and its length.
        rows: The prompt that each row continues.
    """

    places: list[tuple[int, int, int]]
    rows: PromptRows

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [length for _, _, length in self.places]

    @cached_property
    def starts(self) -> list[int]:
        """Start of each prompt among the tokens of all, and their total number; P + 1 entries."""
        return [0, *accumulate(self.lengths)]

    def span(self, row: int) -> tuple[int, int]:
        """Where the tokens of a row's prompt start and stop among those of all."""
        prompt = self.rows.prompt_of(row)
        return self.starts[prompt], self.starts[prompt + 1]

    @cached_property
    def starts_on_device(self) -> Tensor:
        """The same as a tensor, int32."""
        return _starts(self.lengths, self.rows.starts.device)


def find_shared_prompts(
    parts: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device,
    min_saved_tokens: float = MIN_SAVED_TOKENS,
) -> SharedPrompts | None:
    """List the prompts of a decode batch, or return None if sharing would not pay off.

    Args:
        parts: For prompts encoded together, their lengths, and the prompt of each sequence, ascending.
        device: Device of the cache.
        min_saved_tokens: Minimum of copied tokens that sharing must save, per prompt.
    """
    places = [(part, row, lengths[row]) for part, (lengths, rows) in enumerate(parts) for row in rows]
    distinct = sorted(set(places))
    saved = sum(length for _, _, length in places) - sum(length for _, _, length in distinct)
    if saved < min_saved_tokens * len(distinct):
        return None
    number = {place: index for index, place in enumerate(distinct)}
    return SharedPrompts(distinct, PromptRows([number[place] for place in places], device))


class ContinuedPromptsLayer(GrowingLayer):
    """A cache layer of rows that continue prompts: `keys` and `values` are those of the continuations.

    Args:
        layers: The `PromptLayer` of each part, prompts right-aligned.
        prompts: The prompts.
        width: Position that all rows start at.
        limit: Most positions that will be needed, including those before `width`.

    Attributes:
        prompt_keys: Keys of all prompts, concatenated, shape [T, K, H].
        prompt_values: Their values.
        prompts: Their lengths and rows.
    """

    def __init__(self, layers: Sequence[Any], prompts: SharedPrompts, width: int, limit: int) -> None:
        self.prompts, self._width, self._unread = prompts, width, False
        self.prompt_keys = _packed([layer.keys for layer in layers], prompts)
        self.prompt_values = _packed([layer.values for layer in layers], prompts)
        rows, capacity = sum(prompts.rows.counts), self.capacity(0, limit - width)
        keys, values = (
            states.new_empty(rows, states.shape[1], capacity, states.shape[2])
            for states in (self.prompt_keys, self.prompt_values)
        )
        super().__init__(keys, values, length=0, limit=limit - width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new entries and return everything after the prompts.

        Raises:
            RuntimeError: If the previous entries were not read together with the prompts.
        """
        if self._unread:
            raise RuntimeError(
                "a layer of the model read cached keys differently than when it encoded the prompts, and missed the "
                "prompts; sample from this model with another rollout engine."
            )
        keys, values = super().update(key_states, value_states)
        self._unread = True
        tag_keys(keys, self)
        return keys, values

    def was_read(self) -> None:
        """Record that attention also read the prompts."""
        self._unread = False

    def whole_row(self, row: int) -> tuple[Tensor, Tensor]:
        """Copy the keys and values of a row, with those of its prompt, shape [1, K, S, H]."""
        start, stop = self.prompts.span(row)
        keys, values = (
            torch.cat([shared[start:stop].transpose(0, 1), own[row]], dim=1).unsqueeze(0)
            for shared, own in ((self.prompt_keys, self.keys), (self.prompt_values, self.values))
        )
        return keys, values

    def get_seq_length(self) -> int:
        """Positions so far, including the prompts'."""
        return self._width + self.keys.shape[2]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported: `kv_cache.drop_rows` removes rows from all layers together."""
        raise NotImplementedError("rows that continue shared prompts cannot be selected layer by layer.")


def _packed(states: Sequence[Tensor], prompts: SharedPrompts) -> Tensor:
    """Extract prompts from right-aligned batches [., K, width, H], concatenated: [T, K, H]."""
    total, (_, heads, _, size) = sum(prompts.lengths), states[0].shape
    packed = states[0].new_empty(total, heads, size)
    for (part, row, length), (start, stop) in zip(prompts.places, pairwise(prompts.starts), strict=True):
        packed[start:stop] = states[part][row, :, states[part].shape[2] - length :].transpose(0, 1)
    return packed


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
