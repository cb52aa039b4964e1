"""Cached prompts that are kept once and read once per step, however many rollouts continue them.

Shapes: B rows of a decode batch, P prompts of it, T tokens of all its prompts, K key/value heads, H head size.

A copy of the prompt's keys and values for every rollout is what a step would spend its time on: reading them. Here
they stay as they are, one prompt after another, and a row has a buffer of its own for what follows. Which layers allow
it is seen when the prompts are encoded (`prompt_attention`): layers that attend to all keys, through transformers'
attention interface. The others get copies (`kv_cache`).
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
"""Copies of tokens that sharing must save per prompt and layer. A call of its own for a prompt costs about as much."""


class PromptLayer(DynamicLayer):
    """The cache of prompts while they are encoded. Its keys know it, so that attention can say how it read them."""

    def __init__(self) -> None:
        super().__init__()
        self._readers: list[bool] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, as `DynamicLayer` does."""
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        tag_keys(keys, self)
        return keys, values

    def was_read(self, plainly: bool) -> None:
        """Take down that an attention layer has read these keys and values, with nothing but a causal mask or not."""
        self._readers.append(plainly)

    @property
    def can_be_shared(self) -> bool:
        """Whether all that read it would find the same in two parts, the prompt and what follows it."""
        return bool(self._readers) and all(self._readers)


def tag_keys(keys: Tensor, layer: Any) -> None:
    """Let keys say which cache layer they are from, until somebody computes something else from them.

    By a weak reference: the layer holds its keys, and a circle would keep both until Python's garbage collection.
    """
    keys.cache_layer = ref(layer)  # type: ignore[attr-defined]


def layer_of_keys(keys: Tensor) -> Any:
    """The cache layer that these very keys are from, or None."""
    layer = getattr(keys, "cache_layer", None)
    return None if layer is None else layer()


class PromptRows:
    """Which prompt each row of a decode batch continues; shared by all layers of its cache.

    Args:
        prompts: Index of each row's prompt, ascending.
        device: Of the cache.

    Attributes:
        counts: How many rows each prompt has.
        starts: Where the rows of each prompt begin in `order`, and their number, int32 [P + 1].
        order: Rows sorted by prompt, int64 [B]; None where they are sorted.
        inverse: For each row its place in `order`; None likewise.
    """

    def __init__(self, prompts: Sequence[int], device: torch.device) -> None:
        self._prompts, self._device = list(prompts), device
        self.counts = [0] * (max(prompts) + 1)
        self._arrange()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows at `order`, in that order."""
        self._prompts = [self._prompts[row] for row in order]
        self._arrange()

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
        places: Of each prompt the part that it is in, its row there, and its length.
        rows: Which of them each row continues.
    """

    places: list[tuple[int, int, int]]
    rows: PromptRows

    @cached_property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [length for _, _, length in self.places]

    @cached_property
    def starts(self) -> list[int]:
        """Where each prompt begins among the tokens of all, and their number; P + 1 entries."""
        return [0, *accumulate(self.lengths)]

    @cached_property
    def starts_on_device(self) -> Tensor:
        """The same as a tensor, int32."""
        return _starts(self.lengths, self.rows.starts.device)


def find_shared_prompts(
    parts: Sequence[tuple[Sequence[int], Sequence[int]]],
    device: torch.device,
    min_saved_tokens: float = MIN_SAVED_TOKENS,
) -> SharedPrompts | None:
    """List the prompts of a decode batch, or return None if copies of them are as good.

    Args:
        parts: Of prompts that were encoded together their lengths, and for each sequence which of them it continues,
            ascending.
        device: Of the cache.
        min_saved_tokens: Copies of tokens that sharing must save, per prompt.
    """
    places = [(part, row, lengths[row]) for part, (lengths, rows) in enumerate(parts) for row in rows]
    distinct = sorted(set(places))
    saved = sum(length for _, _, length in places) - sum(length for _, _, length in distinct)
    if saved < min_saved_tokens * len(distinct):
        return None
    number = {place: index for index, place in enumerate(distinct)}
    return SharedPrompts(distinct, PromptRows([number[place] for place in places], device))


class ContinuedPromptsLayer(GrowingLayer):
    """A cache layer of rows that continue prompts: `keys` and `values` hold what follows them.

    Args:
        layers: Of each part the `PromptLayer` that its prompts are in, right-aligned.
        prompts: Which prompts there are.
        width: Position that all rows begin at.
        limit: Positions that will ever be needed, those before `width` counted.

    Attributes:
        prompt_keys: Keys of all prompts, one behind another, shape [T, K, H].
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
        """Append new entries and return what follows the prompts.

        Raises:
            RuntimeError: If what was appended last has not been read together with the prompts.
        """
        if self._unread:
            raise RuntimeError(
                "a layer of the model has read cached keys in another way than when it encoded the prompts, without "
                "them; sample from this model with another rollout engine."
            )
        keys, values = super().update(key_states, value_states)
        self._unread = True
        tag_keys(keys, self)
        return keys, values

    def was_read(self) -> None:
        """Take down that attention has read the prompts, too."""
        self._unread = False

    def get_seq_length(self) -> int:
        """Positions so far, those of the prompts counted."""
        return self._width + self.keys.shape[2]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not for these layers: rows leave by `kv_cache.drop_rows`, which tells all of them at once."""
        raise NotImplementedError("rows that continue shared prompts are not selected layer by layer.")


def _packed(states: Sequence[Tensor], prompts: SharedPrompts) -> Tensor:
    """Prompts out of right-aligned batches [., K, width, H], one behind another: [T, K, H]."""
    total, (_, heads, _, size) = sum(prompts.lengths), states[0].shape
    packed = states[0].new_empty(total, heads, size)
    for (part, row, length), (start, stop) in zip(prompts.places, pairwise(prompts.starts), strict=True):
        packed[start:stop] = states[part][row, :, states[part].shape[2] - length :].transpose(0, 1)
    return packed


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
