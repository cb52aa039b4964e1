"""A decode batch whose rows share prompts: a step reads and writes tensors of constant shape and address.

Shapes: B rows, K key/value heads, S cached positions, D head size, T tokens of all prompts, C columns of a buffer.

If each row had a copy of the prompt's keys and values, reading them would dominate a step. Here prompts are stored
once, packed, and each row has a buffer for its own tokens; rows are sorted by prompt (`attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from pl_grouprl.attention.masks import MaskRule
from pl_grouprl.rollout.hf.attention import Columns, PromptLayer, Runs, StaticLayer
from pl_grouprl.rollout.hf.decode import DecodeBatch, DecodeRow, place_rows
from pl_grouprl.rollout.hf.kept import EncodedPrompt, KeptSequence, filled, gather_layer, is_empty, take_row
from pl_grouprl.rollout.hf.prefill import NextTokenLogits, why_not_shared
from pl_grouprl.rollout.hf.step_graph import CAPTURES, StepGraph, make_graph

MIN_SAVED_TOKENS = 256
"""Copied tokens that sharing must save, per prompt and layer: about the cost of the extra call for a prompt."""


def shares_prompts(rows: Sequence[DecodeRow], min_saved_tokens: float | None = None) -> bool:
    """Whether rows can share prompts, and that pays off: on a GPU always, because only such steps are captured."""
    if min_saved_tokens is None:
        min_saved_tokens = 0 if rows[0].prefix.logits_PV.device.type in CAPTURES else MIN_SAVED_TOKENS
    if any(why_not_shared(prefix.cache) is not None for prefix, _, _ in place_rows(rows)):
        return False
    prompts = [row.prefix.shared[row.place] for row in rows]
    distinct = set(prompts)
    # Prompts of continued sequences are stored apart already.
    copied = sum(prompt.length for prompt in distinct if not prompt.states)
    return sum(prompt.length for prompt in prompts) - copied >= min_saved_tokens * len(distinct)


class _StaticCache(Cache):
    """Masks are made from constants: no layer reads them."""

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0


def _states(cache: Cache) -> list[Tensor]:
    """States of linear attention and convolutions."""
    states = (getattr(layer, kind, {}) for layer in cache.layers for kind in ("conv_states", "recurrent_states"))
    return [state for kept in states for state in kept.values() if state is not None]


class StaticBatch(DecodeBatch):
    """Rows that share prompts, where `shares_prompts` accepts them."""

    def __init__(self, rows: Sequence[DecodeRow], *args: Any, **kwargs: Any) -> None:
        self._shared = [row.prefix.shared[row.place] for row in rows]
        groups: dict[EncodedPrompt, list[int]] = {}
        for number, prompt in enumerate(self._shared):
            groups.setdefault(prompt, []).append(number)
        super().__init__(rows, *args, groups=list(groups.values()), **kwargs)
        self._parts = place_rows([rows[number] for number in self.numbers])
        firsts, lengths = [rows[group[0]] for group in groups.values()], [prompt.length for prompt in groups]
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        self._prompts = Runs(self.group_sizes, starts, starts.diff(), max(lengths))
        self._columns: dict[MaskRule, Columns] = {}
        layers: list[Any] = []
        states: list[list[Any]] = []
        for index, example in enumerate(firsts[0].prefix.cache.layers):
            packed: tuple[Tensor, Tensor] | None = None
            shared: list[Any] = [None] * len(firsts)
            if type(example) is PromptLayer:  # not PromptWindow, a subclass: windows share no prompt
                pieces = [row.prefix.prompt_states(index, row.place) for row in firsts]
                packed = torch.cat([keys for keys, _ in pieces]), torch.cat([values for _, values in pieces])
                shared = list(zip(*(tensor.split(lengths) for tensor in packed), strict=True))
            states.append(shared)
            if isinstance(example, PromptLayer):
                layers.append(self._static_layer(index, example, packed))
            else:  # copies of the rows' states
                parts = [(prefix.cache.layers[index], self.int64(sources)) for prefix, sources, _ in self._parts]
                layer = gather_layer(index, parts, 0)
                # Gathered by prefix; this puts them in the order of the batch's rows.
                layer.reorder_cache(self.int64([row for *_, targets in self._parts for row in targets]).argsort())
                layers.append(layer)
        self.cache = _StaticCache(layers=layers)
        self.ended_rows_change = any(not isinstance(layer, StaticLayer) and not is_empty(layer) for layer in layers)
        del self._parts
        if self.keeps:
            for index, prompt in enumerate(groups):
                prompt.states = [layer[index] for layer in states]

    def _static_layer(self, index: int, first: PromptLayer, packed: tuple[Tensor, Tensor] | None) -> StaticLayer:
        """Buffers that begin with each row's tokens after its prompt, or with its last ones for a window."""
        if first.rule not in self._columns:
            window = first.rule.window or first.rule.chunk
            lengths = [self._lengths[number] for number in self.numbers]
            held = [
                length - self._shared[number].length if window is None else min(length, window - 1)
                for number, length in zip(self.numbers, lengths, strict=True)
            ]
            self._columns[first.rule] = Columns(lengths, held, self.num_steps, first.rule, self.device)
        columns = self._columns[first.rule]
        buffers = []
        for name in ("keys", "values"):
            states = getattr(first, name)
            buffer = states.new_zeros(len(self.numbers), columns.size, states.shape[1], states.shape[3])
            for prefix, sources, targets in self._parts:
                states = getattr(prefix.cache.layers[index], name)
                count = min(states.shape[2], columns.width)
                if count:  # more than rows have of their own is not read
                    rows = states[self.int64(sources), :, states.shape[2] - count :].transpose(1, 2)
                    buffer[self.int64(targets), columns.width - count : columns.width] = rows
            buffers.append(buffer)
        return StaticLayer(columns, (buffers[0], buffers[1]), None if packed is None else (*packed, self._prompts))

    def make_graph(self, model: Any) -> StepGraph | None:
        """See `DecodeBatch`."""
        if self.keeps and self.ended_rows_change:
            return None
        return make_graph(model, self.device, self.num_steps - 1, partial(_states, self.cache))

    def count_step(self) -> None:
        """See `DecodeBatch`."""
        for columns in self._columns.values():
            columns.count_step()

    def forward(self, logits: NextTokenLogits) -> Tensor:
        """See `DecodeBatch`."""
        for columns in self._columns.values():
            columns.point(self.length_B)
        try:
            return logits(self.token_B[:, None], self.cache, self.position_B[:, None], None)
        except Exception:  # in a capture; the step then runs without one
            for layer in self.cache.layers:
                if isinstance(layer, StaticLayer):
                    layer.unread = False
            raise

    def keep_rows(self, order_B: Tensor, targets: Tensor, sources: Tensor) -> None:
        """See `DecodeBatch`."""
        prompts = self._prompts
        self._prompts = Runs(self.group_sizes, prompts.cu_k, prompts.used_k, prompts.max_k)
        for columns in self._columns.values():
            columns.keep(order_B)
        layers: list[Any] = self.cache.layers
        for layer in layers:
            if not isinstance(layer, StaticLayer):
                layer.reorder_cache(order_B)
                continue
            layer.move_rows(targets, sources, len(order_B))
            if layer.prompts is not None:
                layer.prompts = *layer.prompts[:2], self._prompts

    def take(self, place: int, num_tokens: int) -> KeptSequence:
        """See `DecodeBatch`."""
        prompt = self._shared[self.numbers[place]]
        taken: list[Any] = []
        for layer in self.cache.layers:
            if not isinstance(layer, StaticLayer):
                taken.append(take_row(layer, place, num_tokens))
                continue
            window = layer.columns.rule.window or layer.columns.rule.chunk
            held = num_tokens - prompt.length if window is None else min(num_tokens, window - 1)
            end = layer.columns.end(place, num_tokens)
            own = [states[place : place + 1, :, end - held : end].clone() for states in (layer.keys, layer.values)]
            empty = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
            taken.append(filled(empty, own, None if window is None else num_tokens))
        return KeptSequence(num_tokens, taken, prompt)
