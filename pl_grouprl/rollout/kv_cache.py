"""The key/value cache of a decode batch: rows copied from prefilled prompts, room ahead, rows that can leave.

Shapes: B rows of a decode batch, K key/value heads, S cached positions, H head size.

transformers' own dynamic layer concatenates at every step, which copies the whole cache once per token. Here a layer
keeps a buffer with room to spare, writes new entries into it and hands out a view, so a step costs what it adds.
A row that leaves is replaced by the last one: dropping k rows copies k rows at most, and is done whenever something
finishes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

Part = tuple[Cache, Tensor]
"""A prefilled cache, right-aligned, and the rows of it to take; a row may be taken several times."""


class GrowingLayer(DynamicLayer):
    """A dynamic cache layer over a preallocated buffer. `keys` and `values` are views of its filled part.

    Args:
        keys: Buffer of the keys, shape [B, K, capacity, H]; its first `length` positions are filled.
        values: Buffer of the values, the head size may differ.
        length: Number of positions that are filled.
        limit: Positions that will ever be needed; the buffer never grows beyond.
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
        """Positions to allocate when `length` are filled: half as many again, so that all copying stays linear."""
        return max(length, min(limit, length + max(cls.MIN_GROWTH, length // 2)))

    def _show(self, keys: Tensor, values: Tensor, rows: int, length: int) -> None:
        self._buffers = keys, values
        self.keys, self.values = keys[:rows, :, :length], values[:rows, :, :length]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new entries and return everything cached.

        Args:
            key_states: New keys, shape [B, K, new positions, H].
            value_states: New values.
            args: Ignored; what some models pass along.
            kwargs: Ignored, too.

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
        """Copy some rows over others, then keep the first `rows`."""
        length = self.keys.shape[2]
        for filled in (self.keys, self.values):
            filled[targets] = filled[sources]
        self._show(*self._buffers, rows, length)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows at `indices`, in that order; a row may be kept several times."""
        length = self.keys.shape[2]
        self._show(self.keys[indices], self.values[indices], len(indices), length)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row `repeats` times, copies of a row side by side."""
        self.batch_select_indices(torch.arange(len(self.keys), device=self.device).repeat_interleave(repeats))


def _resized(filled: Tensor, capacity: int) -> Tensor:
    buffer = filled.new_empty(*filled.shape[:2], capacity, filled.shape[3])
    buffer[:, :, : filled.shape[2]] = filled
    return buffer


def gather_cache(parts: Sequence[Part], width: int, limit: int) -> Cache:
    """Build the cache of a decode batch from prefilled prompts.

    Args:
        parts: Prefilled caches and the rows to take, in the order of the batch.
        width: Positions of the widest part; narrower ones are padded on the left with zeros, to be masked.
        limit: Positions that decoding will need at most.

    Raises:
        ValueError: If the model has layers whose state is not keys and values (state space, linear attention).
    """
    layers: list[Any] = []
    first: list[Any] = parts[0][0].layers
    for index, layer in enumerate(first):
        same: list[tuple[Any, Tensor]] = [(cache.layers[index], rows) for cache, rows in parts]
        if type(layer) is DynamicLayer:
            capacity = GrowingLayer.capacity(width, limit)
            keys = _gather([(part.keys, rows) for part, rows in same], width, capacity)
            values = _gather([(part.values, rows) for part, rows in same], width, capacity)
            layers.append(GrowingLayer(keys, values, width, limit))
        elif type(layer) is DynamicSlidingWindowLayer:
            layers.append(_gather_sliding(same, width))
        elif type(layer).__name__ == "DummyLayer":  # stores nothing: reads the cache of another layer, or needs none
            layers.append(layer)
        else:
            raise ValueError(
                f"layer {index} of the model caches its state as {type(layer).__name__}; HFRolloutEngine supports full "
                "and sliding-window attention only. Choose another rollout engine for this model."
            )
    return Cache(layers=layers)


def _gather(parts: Sequence[tuple[Tensor, Tensor]], width: int, capacity: int) -> Tensor:
    """Copy rows [., K, w, H] of every part into one buffer [B, K, capacity, H] so that each ends at `width`."""
    first = parts[0][0]
    buffer = first.new_empty(sum(len(rows) for _, rows in parts), first.shape[1], capacity, first.shape[3])
    start = 0
    for states, rows in parts:
        target = buffer[start : start + len(rows)]
        target[:, :, : width - states.shape[2]] = 0
        torch.index_select(states, 0, rows, out=target[:, :, width - states.shape[2] : width])
        start += len(rows)
    return buffer


def _gather_sliding(parts: Sequence[tuple[Any, Tensor]], width: int) -> DynamicSlidingWindowLayer:
    """Merge sliding-window layers, which hold the last positions only; they stay small and keep transformers' class."""
    layer = copy.copy(parts[0][0])
    kept = max(part.keys.shape[2] for part, _ in parts)
    layer.keys = _gather([(part.keys, rows) for part, rows in parts], kept, kept)
    layer.values = _gather([(part.values, rows) for part, rows in parts], kept, kept)
    layer.cumulative_length = width
    return layer


def drop_rows(cache: Cache, finished_B: Tensor) -> Tensor:
    """Take finished rows out of the cache by moving rows from the end into their places.

    Args:
        cache: Of `gather_cache`; changed in place.
        finished_B: True where a row leaves, bool, shape [B]; at least one row stays.

    Returns:
        For each row of the smaller batch the row that it was, int64.
    """
    remaining = int((~finished_B).sum())
    targets = finished_B[:remaining].nonzero().squeeze(-1)
    sources = (~finished_B[remaining:]).nonzero().squeeze(-1) + remaining
    order = torch.arange(remaining, device=finished_B.device)
    order[targets] = sources
    layers: list[Any] = cache.layers
    for layer in layers:
        if isinstance(layer, GrowingLayer):
            layer.move_rows(targets, sources, remaining)
        else:
            layer.batch_select_indices(order)
    return order
