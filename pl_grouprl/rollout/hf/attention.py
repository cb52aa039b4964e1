"""Attention of rollouts to their prompts, which they share, and to their own tokens.

Legend: B rows of a decode batch, P runs of queries, N queries, H query heads, K key/value heads, R = H / K, D head
size, T keys of all runs, C columns of a row's buffer, S columns that are read.

All rows of a prompt query it in one run, which reads its keys and values once; the two parts of the softmax are merged
by their log-sum-exp, as in Cascade Inference (FlashInfer, 2024) and Hydragen (arXiv:2402.05099). A row's own tokens lie
in a buffer of its own, at addresses that do not change from step to step. Layers with a window or chunks share no
prompt: their buffers begin with copies of the prompt's last positions.

Which layers can do that is detected, not listed. While prompts are encoded, our attention function wraps the model's
and observes whether a layer uses the exact tensors from its cache, and just a mask that is causal, a window or chunks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import accumulate, pairwise
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer, DynamicSlidingWindowLayer
from transformers.masking_utils import and_masks, chunked_overlay

from pl_grouprl.attention.backends.cascade import merge, non_sink_share
from pl_grouprl.attention.backends.kernels import has_fused_kernel, head_multiple
from pl_grouprl.attention.function import attend_by_mask, register_over
from pl_grouprl.attention.masks import MaskRule, read_layer_options, read_mask_function
from pl_grouprl.attention.support import find_decoder
from pl_grouprl.rollout.hf.kept import keeps_more
from pl_grouprl.utilities import internals


class Runs:
    """Runs of queries, and the run of keys that each attends to.

    Args:
        rows: Number of rows of each run; a row has R queries per key head.
        cu_k: First key of each run, int32 [P + 1]; the last entry is not read.
        used_k: Number of keys of each run, at least 1; int32 [P].
        max_k: Maximum number of keys of a run.
        columns: Size of the buffer of each run's keys; None if the runs are packed one after the other.
    """

    def __init__(
        self, rows: Sequence[int], cu_k: Tensor, used_k: Tensor, max_k: int, columns: int | None = None
    ) -> None:
        self.rows = [0, *accumulate(rows)]
        self.cu_k, self.used_k, self.max_q, self.max_k, self.columns = cu_k, used_k, max(rows), max_k, columns
        self._cu_q = {1: torch.tensor(self.rows, dtype=torch.int32, device=cu_k.device)}
        self._spans: list[tuple[int, int]] | None = None
        self._read: tuple[slice, Tensor | None] | None = None

    def cu_q(self, per_row: int) -> Tensor:
        """First query of each run, and the number of queries, for some queries per row; int32 [P + 1]."""
        if per_row not in self._cu_q:
            self._cu_q[per_row] = self._cu_q[1] * per_row
        return self._cu_q[per_row]

    def changed(self) -> None:
        """Note that `cu_k` or `used_k` has changed."""
        self._spans = self._read = None

    def spans(self) -> list[tuple[int, int]]:
        """First and last key of each run, on the host; within its buffer, if it has one. For a CPU."""
        if self._spans is None:
            starts, counts, columns = self.cu_k.tolist(), self.used_k.tolist(), self.columns or 0
            self._spans = [
                (start - run * columns, start - run * columns + count)
                for run, (start, count) in enumerate(zip(starts, counts, strict=False))
            ]
        return self._spans

    def columns_and_mask(self, dtype: torch.dtype) -> tuple[slice, Tensor | None]:
        """Columns that some run reads, and an additive mask [P, 1, 1, S] where others read fewer. For a CPU."""
        if self._read is None:
            spans = self.spans()
            first, last = min(start for start, _ in spans), max(end for _, end in spans)
            mask = None
            if any(span != (first, last) for span in spans):
                columns = torch.arange(first, last)
                start_P1, end_P1 = torch.tensor(spans).unsqueeze(-1).unbind(1)
                hidden = (columns < start_P1) | (columns >= end_P1)
                mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
            self._read = slice(first, last), mask
        return self._read


def attend_runs(q_NKD: Tensor, keys_TKD: Tensor, values_TKD: Tensor, runs: Runs, scale: float) -> tuple[Tensor, Tensor]:
    """Attend to each run's keys, all of them.

    On CUDA this is one call of FlashAttention, which reads all lengths on the device; it has not run on a GPU yet. On a
    CPU, one call serves all runs with buffers, without the columns that no run reads, and each packed run gets a
    separate call.

    Args:
        q_NKD: Queries, run after run.
        keys_TKD: Keys of all runs.
        values_TKD: Their values.
        runs: Which queries read which keys.
        scale: Multiplies the scores.

    Returns:
        Output [N, K, D], and log-sum-exp of the scores [K, N]; undefined for a run without keys.
    """
    heads, size = q_NKD.shape[1:]
    per_row = len(q_NKD) // runs.rows[-1]
    if q_NKD.device.type != "cpu":
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_NKD, keys_TKD, values_TKD, runs.cu_q(per_row), runs.cu_k, runs.max_q * per_row, runs.max_k,
            0.0, False, False, scale=scale, seqused_k=runs.used_k,
        )  # fmt: skip
        return out, lse
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    if runs.columns is not None:
        columns, mask = runs.columns_and_mask(q_NKD.dtype)
        query = q_NKD.view(-1, per_row, heads, size).transpose(1, 2)
        keys, values = (
            states.view(-1, runs.columns, heads, size)[:, columns].transpose(1, 2) for states in (keys_TKD, values_TKD)
        )
        out, lse = flash(query, keys, values, attn_mask=mask, scale=scale)
        return out.transpose(1, 2).reshape(q_NKD.shape), lse.transpose(1, 2).reshape(-1, heads).t()
    query, keys, values = (states.transpose(0, 1)[None] for states in (q_NKD, keys_TKD, values_TKD))
    outs, lses = [], []
    for (first, last), (start, end) in zip(pairwise(runs.rows), runs.spans(), strict=True):
        if first < last:
            run = query.narrow(2, first * per_row, (last - first) * per_row)
            seen = keys.narrow(2, start, end - start), values.narrow(2, start, end - start)
            out, lse = flash(run, *seen, scale=scale)
            outs.append(out.transpose(1, 2))
            lses.append(lse.transpose(1, 2))
    out, lse = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs, dim=1), torch.cat(lses, dim=1))
    return out[0], lse[0].t()


# Cache layers that attention recognizes by the tensors that they return.


def tag(states: Tensor, layer: Any) -> None:
    """Mark keys or values with their cache layer; tensors computed from them lose the mark.

    Uses a weak reference: the layer references its keys, and a cycle would keep both until garbage collection.
    """
    states.cache_layer = ref(layer)  # type: ignore[attr-defined]


def layer_of(states: Tensor) -> Any:
    """The cache layer of exactly these keys or values, or None."""
    layer = getattr(states, "cache_layer", None)
    return None if layer is None else layer()


class PromptLayer(DynamicLayer):
    """The cache of prompts while they are encoded, which records how attention reads it."""

    rule = MaskRule()
    keys: Tensor
    values: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.readers: list[bool] = []

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, as transformers' layer does."""
        states = super().update(key_states, value_states, *args, **kwargs)
        for tensor in states:
            tag(tensor, self)
        return states

    @property
    def read_plainly(self) -> bool:
        """Whether the layer was read, each time with nothing but `rule`."""
        return bool(self.readers) and all(self.readers)


class PromptWindow(PromptLayer, DynamicSlidingWindowLayer):
    """`PromptLayer` for a layer with a sliding window, or with chunks if `chunked`."""

    def __init__(self, sliding_window: int, chunked: bool) -> None:
        DynamicSlidingWindowLayer.__init__(self, sliding_window)
        self.readers = []
        self.rule = MaskRule(chunk=sliding_window) if chunked else MaskRule(window=sliding_window)


def new_cache(model: Any) -> Cache:
    """An empty cache for the model's prompts."""
    config = model.config.get_text_config(decoder=True)
    kinds, cache = getattr(config, "layer_types", None), DynamicCache(config=model.config)
    chunked = [kind == "chunked_attention" for kind in kinds or ()]
    for index, layer in enumerate(cache.layers):
        if type(layer) is DynamicLayer:
            cache.layers[index] = PromptLayer()
        elif type(layer) is DynamicSlidingWindowLayer:
            by_default = getattr(config, "sliding_window", None) is None
            cache.layers[index] = PromptWindow(layer.sliding_window, chunked[index] if chunked else by_default)
    return cache


def keeps_more_than_keys(model: Any) -> bool:
    """Whether a layer's cache keeps more for each token than keys and values, such as an indexer's keys."""
    return any(keeps_more(layer) for layer in new_cache(model).layers)


class Columns:
    """Where rows write and read in the buffers of all layers with one rule.

    Rows are right-aligned: those of equal progress write the same column. A step writes all tensors in place.

    Args:
        lengths: Cached tokens of each row.
        held: How many of its last tokens are in the buffers.
        steps: Tokens that rows may add.
        rule: Which keys the layers read.
        device: Device of the buffers.

    Attributes:
        slot_B: Where each row writes its next token, counted over all buffers, int64.
        runs: What each row reads.
        seen: Cached tokens of the longest row before this step.
        written: Columns that may have been written.
    """

    def __init__(self, lengths: Sequence[int], held: Sequence[int], steps: int, rule: MaskRule, device: Any) -> None:
        self.width, self.rule, self.seen = max(held), rule, max(lengths) - 1
        self.size, self.written = self.width + steps, self.width
        lengths_B, held_B = torch.tensor(lengths, device=device), torch.tensor(held, device=device)
        self._shift_B, self._first_B = self.width - lengths_B, self.width - held_B
        self._arrange()

    def keep(self, order_B: Tensor) -> None:
        """Keep the rows at `order_B`, in that order."""
        self._shift_B, self._first_B = self._shift_B[order_B], self._first_B[order_B]
        self._arrange()

    def _arrange(self) -> None:
        rows, device = len(self._shift_B), self._shift_B.device
        self._base_B = torch.arange(rows, device=device) * self.size
        self.slot_B = torch.zeros_like(self._base_B)
        used_B, cu_k = (torch.zeros(rows + extra, dtype=torch.int32, device=device) for extra in (0, 1))
        most = min(self.size, self.rule.window or self.rule.chunk or self.size)
        self.runs = Runs([1] * rows, cu_k, used_B, most, self.size)

    def end(self, row: int, num_tokens: int) -> int:
        """The column after a row's first `num_tokens` tokens."""
        return num_tokens + int(self._shift_B[row])

    def count_step(self) -> None:
        """Count a step that is about to begin, on the host."""
        self.seen, self.written = self.seen + 1, self.written + 1

    def point(self, length_B: Tensor) -> None:
        """Point at where each row, of `length_B` cached tokens, writes its next one, and what it reads then."""
        column_B = length_B + self._shift_B
        used_B = column_B + 1 - self._first_B
        if self.rule.window is not None:
            used_B = used_B.clamp(max=self.rule.window)
        if self.rule.chunk is not None:
            used_B = length_B % self.rule.chunk + 1
        torch.add(self._base_B, column_B, out=self.slot_B)
        self.runs.used_k.copy_(used_B)
        self.runs.cu_k[:-1].copy_(self.slot_B + 1 - used_B)
        self.runs.changed()


class StaticLayer(CacheLayerMixin):
    """The cache layer of a decode batch: packed prompts, and a buffer of constant address for each row's own tokens.

    Args:
        columns: Where rows write and read.
        buffers: Keys and values, [B, C, K, D] each.
        prompts: Keys and values of all prompts, [T, K, D] each, and the runs of their rows; None for windows.

    Attributes:
        unread: Whether a step has written tokens that it has not read yet.
    """

    is_sliding = False
    keys: Tensor
    values: Tensor

    def __init__(
        self, columns: Columns, buffers: tuple[Tensor, Tensor], prompts: tuple[Tensor, Tensor, Runs] | None
    ) -> None:
        super().__init__()
        self.columns, self.prompts, self.unread = columns, prompts, False
        self.dtype, self.device, self.is_initialized = buffers[0].dtype, buffers[0].device, True
        self._show(*buffers)

    def _show(self, keys: Tensor, values: Tensor) -> None:
        self.buffers = keys, values
        self.flat = keys.flatten(0, 1), values.flatten(0, 1)
        self.keys, self.values = keys.transpose(1, 2), values.transpose(1, 2)
        tag(self.keys, self)
        tag(self.values, self)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Done."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write each row's new token, [B, K, 1, D], and return the buffers, which `attend` knows how to read.

        Raises:
            RuntimeError: If `attend` did not read the previous token.
        """
        if self.unread:
            raise RuntimeError("a layer reads keys differently from when it encoded the prompts; use another engine.")
        self.unread = True
        for flat, new in zip(self.flat, (key_states, value_states), strict=True):
            flat.index_copy_(0, self.columns.slot_B, new.squeeze(2))
        return self.keys, self.values

    def move_rows(self, targets: Tensor, sources: Tensor, rows: int) -> None:
        """Copy rows `sources` over `targets`, then keep the first `rows`."""
        if len(targets):
            for buffer in self.buffers:
                written = buffer[:, : self.columns.written]
                written.index_copy_(0, targets, written.index_select(0, sources))
        self._show(self.buffers[0][:rows], self.buffers[1][:rows])

    def get_seq_length(self) -> int:
        """Cached tokens of the longest row."""
        return self.columns.seen + int(self.unread)

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """One key, so that no mask is made: `attend` knows which keys a row sees."""
        return query_length, 0

    def attend(self, query_BH1D: Tensor, scale: float, sinks_H: Tensor | None = None) -> Tensor:
        """Attend from the newest token of each row to what it sees.

        Args:
            query_BH1D: Its queries.
            scale: Multiplies the scores.
            sinks_H: A score per head that takes part in the softmax and has no value (gpt-oss).

        Returns:
            Shape [B, 1, H, D].
        """
        self.unread = False
        rows, heads, _, size = query_BH1D.shape
        kv_heads = self.buffers[0].shape[2]
        per_key, grouped = heads // kv_heads, (rows, kv_heads, heads // kv_heads)
        q_NKD = query_BH1D.reshape(*grouped, size).transpose(1, 2).reshape(rows * per_key, kv_heads, size)
        out, lse = attend_runs(q_NKD, *self.flat, self.columns.runs, scale)
        if sinks_H is not None:
            out = out.to(lse.dtype)  # rounded once
        if self.prompts is not None:
            keys, values, runs = self.prompts
            merge(out, lse, *attend_runs(q_NKD, keys, values, runs, scale), slice(None))
        if sinks_H is not None:
            sinks_NK = sinks_H.view(kv_heads, per_key).t().repeat(rows, 1)
            out = out * non_sink_share(lse.t(), sinks_NK)[..., None]
        out_BHD = out.view(rows, per_key, kv_heads, size).transpose(1, 2).reshape(rows, 1, heads, size)
        return out_BHD.to(query_BH1D.dtype)


# In place of the model's attention functions.


@contextmanager
def sharing_prompts(model: Any) -> Iterator[None]:
    """Make a decoder's layers share prompts if they can. No effect on calls with other caches.

    If a layer keeps more for each token than keys and values (an indexer), all layers get copies instead.

    Args:
        model: A transformers decoder with a language-model head.
    """
    decoder = find_decoder(model)
    before = internals.attention_implementation(decoder.config)
    # Layers that select tokens may look at the name of the implementation, and would not know ours.
    if not internals.uses_attention_functions(decoder) or keeps_more_than_keys(model):
        yield
        return
    wrapped = before or "eager"
    name = register_over(wrapped, "rollouts", _attention_function(wrapped), _mask_function)
    internals.set_attention_implementation(decoder.config, name)
    try:
        yield
    finally:
        internals.set_attention_implementation(decoder.config, before)


def _mask_function(wrapped: Callable[..., Any] | None) -> Callable[..., Any]:
    """Wrap the implementation's mask function, tagging masks with their rule."""

    def make_mask(*args: Any, **kwargs: Any) -> Any:
        mask = None if wrapped is None else wrapped(*args, **kwargs)
        if isinstance(mask, Tensor):
            with suppress(NotImplementedError):  # has unknown parts
                mask.rule = read_mask_function(_unpadded(kwargs["mask_function"]))  # type: ignore[attr-defined]
        return mask

    return make_mask


def _unpadded(function: Any) -> Any:
    """A mask function for rows without padding: a cache counts the tokens of a chunk, not columns."""
    closed = {} if getattr(function, "__closure__", None) is None else inspect.getclosurevars(function).nonlocals
    if "left_padding" in closed:
        return chunked_overlay(closed["chunk_size"], torch.zeros_like(closed["left_padding"]))
    if function.__qualname__.startswith(and_masks.__name__):
        return and_masks(*map(_unpadded, closed["mask_functions"]))
    return function


def _attention_function(wrapped: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        layer = layer_of(key)
        if isinstance(layer, StaticLayer):
            options = read_layer_options(module, query, kwargs)
            return layer.attend(query, options.scale, options.sinks_H), None
        if isinstance(layer, PromptLayer):
            plainly = layer_of(value) is layer and _reads_plainly(module, query, key, value, attention_mask, kwargs)
            layer.readers.append(plainly)
        return attend_by_mask(module, wrapped, query, key, value, attention_mask, **kwargs)

    return attention


def _reads_plainly(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict[str, Any]
) -> bool:
    """Whether `StaticLayer.attend` would give a layer's result for the tokens after a cached prompt."""
    try:
        options = read_layer_options(module, query, kwargs)
    except (NotImplementedError, ValueError):
        return False
    rule = layer_of(key).rule
    same_rule = mask is None or getattr(mask, "rule", None) == rule
    same_window = options.window in (None, rule.window, rule.chunk)
    same_kind = query.dtype == key.dtype == value.dtype and query.shape[-1] == key.shape[-1] == value.shape[-1]
    if not (options.softcap is None and same_rule and same_window and same_kind):
        return False
    if torch.is_autocast_enabled(query.device.type) or query.shape[-1] % head_multiple(query):
        return False
    return has_fused_kernel(query, key, value)
