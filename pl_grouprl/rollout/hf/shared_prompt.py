"""Prompts encoded once and read by all their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

# A cache layer on a preallocated buffer: appending does not copy, and rows can leave.
#
# Shapes: B rows of a decode batch, K key/value heads, S cached positions, H head size.
#
# transformers' dynamic layer concatenates in every step, which copies the whole cache once per token. This layer writes
# new entries into a buffer with spare capacity and returns a view.


class GrowingLayer(DynamicLayer):
    """A dynamic cache layer on a preallocated buffer. `keys` and `values` are views of its filled part.

    Args:
        keys: Buffer of the keys, shape [B, K, capacity, H]; its first `length` positions are filled.
        values: Buffer of the values; the head size may differ.
        length: Number of filled positions.
        limit: Most positions that will be needed; the buffer never grows beyond.
    """

    MIN_GROWTH = 128
    keys: Tensor
    values: Tensor

    def __init__(self, keys: Tensor, values: Tensor, length: int, limit: int) -> None:
        super().__init__()
        self.dtype, self.device = keys.dtype, keys.device
        self.limit = limit
        self.is_initialized = True
        self._show(keys, values, len(keys), length)

    @classmethod
    def capacity(cls, length: int, limit: int) -> int:
        """Positions to allocate when `length` are filled: 1.5 times as many, so copying stays linear in total."""
        return max(length, min(limit, length + max(cls.MIN_GROWTH, length // 2)))

    def _show(self, keys: Tensor, values: Tensor, rows: int, length: int) -> None:
        self._buffers = keys, values
        self.keys, self.values = keys[:rows, :, :length], values[:rows, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new entries and return everything cached.

        Args:
            key_states: New keys, shape [B, K, new positions, H].
            value_states: New values.
            args: Ignored; some models pass more.
            kwargs: Ignored.

        Returns:
            Keys and values, views of shape [B, K, S, H].
        """
        rows, length = self.keys.shape[0], self.keys.shape[2]
        total = length + key_states.shape[2]
        keys, values = self._buffers
        if total > keys.shape[2]:
            capacity = self.capacity(total, self.limit)
            keys, values = (_resized(filled, capacity) for filled in (self.keys, self.values))
        keys[:rows, :, length:total] = key_states
        values[:rows, :, length:total] = value_states
        self._show(keys, values, rows, total)
        return self.keys, self.values

    def move_rows(self, targets: Tensor, sources: Tensor, rows: int) -> None:
        """Copy rows `sources` over `targets`, then keep the first `rows`."""
        length = self.keys.shape[2]
        for filled in (self.keys, self.values):
            filled[targets] = filled[sources]
        self._show(*self._buffers, rows, length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in that order; a row may be kept several times."""
        length = self.keys.shape[2]
        self._show(self.keys[indices], self.values[indices], len(indices), length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, with copies adjacent."""
        self.batch_select_indices(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))


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


def _resized(filled: Tensor, capacity: int) -> Tensor:
    buffer = filled.new_empty(*filled.shape[:2], capacity, filled.shape[3])
    buffer[:, :, : filled.shape[2]] = filled
    return buffer


# Which prompt each row of a batch continues, and whether sharing prompts pays off.
#
# Shapes: B rows of a batch, P prompts of it.

MIN_SAVED_TOKENS = 256
"""Copied tokens that sharing must save, per prompt and layer: about the cost of the extra call for a prompt."""


@dataclass(frozen=True, eq=False)
class EncodedPrompt:
    """One encoding of a prompt, which sequences may share; compared by identity.

    Attributes:
        length: Number of its tokens.
    """

    length: int


class PromptRows:
    """Which prompt each row of a batch continues; shared by all layers of its cache.

    Args:
        prompts: Index of each row's prompt.
        device: Device of the cache.
        suffix_lengths: Cached tokens of each row after its prompt; None if no row has any.

    Attributes:
        counts: Number of rows of each prompt.
        starts: Start of each prompt's rows in `order`, and their total number, int32 [P + 1].
        order: Rows sorted by prompt, int64 [B]; None if already sorted.
        inverse: Index of each row in `order`; None if already sorted.
        offsets: Column at which the tokens after each row's prompt start; all rows end in the same column.
    """

    def __init__(
        self, prompts: Sequence[int], device: torch.device, suffix_lengths: Sequence[int] | None = None
    ) -> None:
        self._prompts, self._device = list(prompts), device
        self._mask: Tensor | None = None
        self.counts = [0] * (max(prompts) + 1)
        suffix_lengths = [0] * len(self._prompts) if suffix_lengths is None else suffix_lengths
        self.suffix_width = max(suffix_lengths)
        self.offsets = [self.suffix_width - length for length in suffix_lengths]
        self._arrange()

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows at `order`, in that order."""
        self._prompts = [self._prompts[row] for row in order]
        self.offsets = [self.offsets[row] for row in order]
        self._arrange()

    def prompt_of(self, row: int) -> int:
        """Index of a row's prompt."""
        return self._prompts[row]

    def mask(self, new: int, width: int, dtype: torch.dtype) -> Tensor | None:
        """Additive mask for the last `new` of `width` columns after the prompts; shape [B or 1, 1, new, width].

        None if each row has one new token, which attends to all columns.
        """
        if new == 1 and not any(self.offsets):
            return None
        if self._mask is None or self._mask.shape[-2:] != (new, width):
            columns = torch.arange(width, device=self._device)
            seen = columns <= columns[width - new :, None]
            if any(self.offsets):
                seen = seen & (columns >= torch.tensor(self.offsets, device=self._device)[:, None, None, None])
            blocked = torch.full((), -torch.inf, dtype=dtype, device=self._device)
            self._mask = torch.where(seen, blocked.new_zeros(()), blocked)
            self._mask = self._mask.view(-1, 1, new, width)
        return self._mask

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
        self._mask = None


@dataclass(frozen=True)
class SharedPrompts:
    """The prompts of a batch.

    Attributes:
        places: For each prompt, the part and row where its cache is, and its length.
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

    @cached_property
    def starts_on_device(self) -> Tensor:
        """`starts` as an int32 tensor."""
        return _starts(self.lengths, self.rows.starts.device)


def find_shared_prompts(
    parts: Sequence[tuple[Sequence[EncodedPrompt], Sequence[int], Sequence[int]]],
    device: torch.device,
    min_saved_tokens: float = MIN_SAVED_TOKENS,
) -> SharedPrompts | None:
    """List the prompts of a batch, or return None if sharing would not pay off.

    Args:
        parts: For each group of sequences encoded together: their prompts, their lengths (prompt included), and the
            index of the sequence that each row continues.
        device: Device of the cache.
        min_saved_tokens: Copied tokens that sharing must save, per prompt.
    """
    sequences = [
        (prompts[row], lengths[row], part, row) for part, (prompts, lengths, rows) in enumerate(parts) for row in rows
    ]
    distinct: dict[EncodedPrompt, tuple[int, int, int]] = {}
    for prompt, _, part, row in sequences:
        distinct.setdefault(prompt, (part, row, prompt.length))
    # A continued sequence already stores its prompt apart from its other tokens.
    stored = {prompt for prompt, length, *_ in sequences if length > prompt.length}
    copied = sum(prompt.length for prompt in distinct if prompt not in stored)
    saved = sum(prompt.length for prompt, *_ in sequences) - copied
    if saved < min_saved_tokens * len(distinct):
        return None
    number = {prompt: index for index, prompt in enumerate(distinct)}
    suffix_lengths = [length - prompt.length for prompt, length, *_ in sequences]
    rows = PromptRows([number[prompt] for prompt, *_ in sequences], device, suffix_lengths)
    return SharedPrompts(list(distinct.values()), rows)


def _starts(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)


# Cached prompts, stored once and read once per step for any number of rollouts.
#
# Shapes: B rows of a decode batch, P prompts of it, T tokens of all its prompts, K key/value heads, H head size.
#
# If each rollout had a copy of the prompt's keys and values, reading them would dominate a step. Here prompts are
# stored
# once, and each row has a buffer for its suffix, the tokens after the prompt. Encoding the prompts shows which layers
# allow this (`prompt_attention`): those that attend to all keys, through transformers' attention interface. The others
# get copies (`kv_cache`).


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


class ContinuedRow(DynamicLayer):
    """One row of a `ContinuedPromptsLayer`: `keys` and `values` are its suffix's, shape [1, K, S, H].

    Args:
        prompt: Keys and values of the prompt, shape [T, K, H].
        suffix: Keys and values after it.
    """

    def __init__(self, prompt: tuple[Tensor, Tensor], suffix: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self.prompt, (self.keys, self.values) = prompt, suffix
        self.dtype, self.device, self.is_initialized = suffix[0].dtype, suffix[0].device, True

    def first(self, count: int) -> ContinuedRow:
        """The row without its last tokens: the prompt, and `count` tokens after it."""
        return ContinuedRow(self.prompt, (self.keys[:, :, :count], self.values[:, :, :count]))  # type: ignore[index]

    def clone(self) -> ContinuedRow:
        """A row with a copied suffix and the same prompt."""
        return ContinuedRow(self.prompt, (self.keys.clone(), self.values.clone()))  # type: ignore[union-attr]

    def whole(self) -> DynamicLayer:
        """Prompt and suffix concatenated."""
        suffix: tuple[Any, Any] = self.keys, self.values
        states = (
            torch.cat([prompt.transpose(0, 1)[None], suffix_states], dim=2)
            for prompt, suffix_states in zip(self.prompt, suffix, strict=True)
        )
        return dynamic_layer(*states)


class ContinuedPromptsLayer(GrowingLayer):
    """A cache layer of rows that continue prompts: `keys` and `values` are the suffixes'.

    Args:
        held: The layer of each part, rows right-aligned, and the row of each sequence.
        prompts: The prompts.
        width: Position that all rows start at.
        limit: Most positions that will be needed, including those before `width`.

    Attributes:
        prompt_keys: Keys of each prompt, shape [T, K, H].
        prompt_values: Their values.
        packed: Keys and values of all prompts, concatenated, on devices that read them in one call; else None.
        prompts: Their lengths and rows.
    """

    def __init__(self, held: Sequence[tuple[Any, Tensor]], prompts: SharedPrompts, width: int, limit: int) -> None:
        suffix_width = prompts.rows.suffix_width
        self.prompts, self._width, self._unread = prompts, width - suffix_width, False
        states = [_prompt_states(held[part][0], row, length) for part, row, length in prompts.places]
        self.prompt_keys, self.prompt_values = [keys for keys, _ in states], [values for _, values in states]
        self.packed: tuple[Tensor, Tensor] | None = None
        if self.prompt_keys[0].is_cuda:
            self.packed = torch.cat(self.prompt_keys), torch.cat(self.prompt_values)
            self.prompt_keys, self.prompt_values = (list(all_.split(prompts.lengths)) for all_ in self.packed)
        capacity = self.capacity(suffix_width, limit - self._width)
        keys, values = (
            gather_rows(
                [(_suffix_states(layer, name, suffix_width), rows) for layer, rows in held], suffix_width, capacity
            )
            for name in ("keys", "values")
        )
        super().__init__(keys, values, length=suffix_width, limit=limit - self._width)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new entries and return everything after the prompts.

        Raises:
            RuntimeError: If the previous entries were not read together with the prompts.
        """
        if self._unread:
            raise RuntimeError(
                "a layer of the model read cached keys differently from when it encoded the prompts, and missed the "
                "prompts; sample from this model with another rollout engine."
            )
        keys, values = super().update(key_states, value_states)
        self._unread = True
        tag_keys(keys, self)
        return keys, values

    def was_read(self) -> None:
        """Record that attention also read the prompts."""
        self._unread = False

    def row(self, row: int) -> ContinuedRow:
        """One row, without padding; a view."""
        prompt, offset = self.prompts.rows.prompt_of(row), self.prompts.rows.offsets[row]
        suffix = (self.keys[row : row + 1, :, offset:], self.values[row : row + 1, :, offset:])
        return ContinuedRow((self.prompt_keys[prompt], self.prompt_values[prompt]), suffix)

    def get_seq_length(self) -> int:
        """Positions so far, including the prompts'."""
        return self._width + self.keys.shape[2]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Not supported: `kv_cache.drop_rows` removes rows from all layers together."""
        raise NotImplementedError("rows that continue shared prompts cannot be selected layer by layer.")


def can_share(layers: Sequence[Any]) -> bool:
    """Whether rows from these layers, one of each part, can continue shared prompts."""
    known = any(isinstance(layer, ContinuedRow | ContinuedPromptsLayer) for layer in layers)
    return all(
        layer.can_be_shared if isinstance(layer, PromptLayer) else known and isinstance(layer, DynamicLayer)
        for layer in layers
    )


def whole_rows(held: Sequence[tuple[Any, Tensor]]) -> list[tuple[Any, Tensor]]:
    """The same rows, with a copy of the prompt in front of each that shares it."""
    whole: list[tuple[Any, Tensor]] = []
    for layer, rows in held:
        if isinstance(layer, ContinuedPromptsLayer):
            whole += [(layer.row(row).whole(), torch.zeros_like(rows[:1])) for row in rows.tolist()]
        else:
            whole.append((layer.whole() if isinstance(layer, ContinuedRow) else layer, rows))
    return whole


def dynamic_layer(keys: Tensor, values: Tensor) -> DynamicLayer:
    """A layer with these keys and values."""
    layer = DynamicLayer()
    layer.keys, layer.values = keys, values
    layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
    return layer


def _prompt_states(layer: Any, row: int, length: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a row's prompt, [T, K, H]; a copy unless it is shared already."""
    if isinstance(layer, ContinuedPromptsLayer):
        layer = layer.row(row)
    if isinstance(layer, ContinuedRow):
        return layer.prompt
    keys, values = (
        states[row, :, states.shape[2] - length :].transpose(0, 1).contiguous() for states in (layer.keys, layer.values)
    )
    return keys, values


def _suffix_states(layer: Any, name: str, width: int) -> Tensor:
    """The last `width` keys or values of the suffixes; none if a layer holds only prompts."""
    states: Tensor = getattr(layer, name)
    shared = isinstance(layer, ContinuedRow | ContinuedPromptsLayer)
    return states[:, :, max(states.shape[2] - width, 0) :] if shared else states[:, :, :0]
