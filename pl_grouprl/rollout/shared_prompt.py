"""Cached prompts, stored once and read once per step for any number of rollouts.

Shapes: B rows of a decode batch, P prompts of it, T tokens of all its prompts, K key/value heads, H head size.

If each rollout had a copy of the prompt's keys and values, reading them would dominate a step. Here prompts are stored
once, and each row has a buffer for its suffix, the tokens after the prompt. Encoding the prompts shows which layers
allow this (`prompt_attention`): those that attend to all keys, through transformers' attention interface. The others
get copies (`kv_cache`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from pl_grouprl.rollout.preallocated_cache import GrowingLayer, gather_rows
from pl_grouprl.rollout.prompt_rows import SharedPrompts


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
