"""A decode batch in which every row has a copy of its whole cache, for models that cannot share prompts, or need not.

Shapes: B rows, K key/value heads, S cached positions, H head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pl_grouprl.rollout.hf.attention import PromptLayer, PromptWindow
from pl_grouprl.rollout.hf.decode import DecodeBatch, DecodeRow
from pl_grouprl.rollout.hf.kept import KeptSequence, filled, gather_layer, gather_rows, take_row
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, left_padding_mask


class GrowingLayer(DynamicLayer):
    """A dynamic cache layer on a preallocated buffer. `keys` and `values` are views of its filled part.

    transformers' dynamic layer concatenates in every step, which copies the whole cache once per token.

    Args:
        keys: Buffer of the keys, shape [B, K, capacity, H]; its first `length` positions are filled.
        values: Buffer of the values; the head size may differ.
        length: Number of filled positions.
        limit: Maximum number of positions that will be needed; the buffer never grows beyond it.
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
        """Append new entries and return everything cached, as views of shape [B, K, S, H]."""
        rows, length = self.keys.shape[0], self.keys.shape[2]
        total = length + key_states.shape[2]
        if total > self._buffers[0].shape[2]:
            capacity = self.capacity(total, self.limit)
            grown = []
            for filled_part in (self.keys, self.values):
                buffer = filled_part.new_empty(*filled_part.shape[:2], capacity, filled_part.shape[3])
                buffer[:, :, :length] = filled_part
                grown.append(buffer)
            self._buffers = grown[0], grown[1]
        keys, values = self._buffers
        keys[:rows, :, length:total] = key_states
        values[:rows, :, length:total] = value_states
        self._show(keys, values, rows, total)
        return self.keys, self.values

    def move_rows(self, targets: Tensor, sources: Tensor, rows: int) -> None:
        """Copy rows `sources` over `targets`, then keep the first `rows`."""
        length = self.keys.shape[2]
        for states in (self.keys, self.values):
            states[targets] = states[sources]
        self._show(*self._buffers, rows, length)


class CopiedBatch(DecodeBatch):
    """Rows with caches of their own, right-aligned and padded on the left to one length.

    Layers with full attention grow without copying. Others keep transformers' class.

    Raises:
        ValueError: If a layer's cache cannot be copied; see `kept.gather_layer`.
    """

    def __init__(self, rows: Sequence[DecodeRow], *args: Any, **kwargs: Any) -> None:
        super().__init__(rows, *args, **kwargs)
        self._width = max(row.prefix.width for row in rows)  # of rows that are not in this batch, too
        self._mask_BS = left_padding_mask([row.length for row in rows], self._width, self.device)
        limit = self._width + self.num_steps
        groups = [(prefix, [row.place for row in own]) for prefix, own in groupby(rows, lambda row: row.prefix)]
        layers: list[Any] = []
        for index, first in enumerate(groups[0][0].cache.layers):
            parts = [part for prefix, places in groups for part in prefix.whole_rows(index, places)]
            if type(first) in (DynamicLayer, PromptLayer, PromptWindow) and first.is_initialized:
                is_window = type(first) is PromptWindow
                width = max(part.keys.shape[2] for part, _ in parts) if is_window else self._width
                capacity = width if is_window else GrowingLayer.capacity(width, limit)
                keys = gather_rows([(part.keys, own) for part, own in parts], width, capacity)
                values = gather_rows([(part.values, own) for part, own in parts], width, capacity)
                if is_window:
                    layers.append(filled(DynamicSlidingWindowLayer(first.sliding_window), (keys, values), self._width))
                else:
                    layers.append(GrowingLayer(keys, values, width, limit))
            else:
                layers.append(gather_layer(index, parts, self._width))
        self.cache = Cache(layers=layers)

    def forward(self, logits: NextTokenLogits) -> Tensor:
        """See `DecodeBatch`."""
        if self._mask_BS is not None:
            self._mask_BS = torch.nn.functional.pad(self._mask_BS, (0, 1), value=1)
        return logits(self.token_B[:, None], self.cache, self.position_B[:, None], self._mask_BS)

    def keep_rows(self, order_B: Tensor, targets: Tensor, sources: Tensor) -> None:
        """See `DecodeBatch`."""
        if self._mask_BS is not None:
            self._mask_BS = self._mask_BS[order_B]
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if isinstance(layer, GrowingLayer):
                layer.move_rows(targets, sources, len(order_B))
            else:
                layer.reorder_cache(order_B)

    def take(self, place: int, num_tokens: int) -> KeptSequence:
        """See `DecodeBatch`."""
        taken: list[Any] = []
        for layer in self.cache.layers:
            if isinstance(layer, GrowingLayer):
                row = [states[place : place + 1, :, -num_tokens:].clone() for states in (layer.keys, layer.values)]
                taken.append(filled(DynamicLayer(), row))
            else:
                taken.append(take_row(layer, place, num_tokens))
        return KeptSequence(num_tokens, taken)
