"""A cache layer on a preallocated buffer: appending does not copy, and rows can leave.

Shapes: B rows of a decode batch, K key/value heads, S cached positions, H head size.

transformers' dynamic layer concatenates in every step, which copies the whole cache once per token. This layer writes
new entries into a buffer with spare capacity and returns a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


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
