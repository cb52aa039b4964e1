"""The two primitives that the cascade is made of: variable-length attention forward and backward, on CPU and CUDA.

Legend: Q query tokens of a call, M key tokens of a call, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

SHORT = 128
"""On CPU, causal sequences up to this many tokens are padded to a power of two and run as one batch per size."""


@dataclass(frozen=True)
class VarlenCall:
    """Many independent attention problems in one call: the i-th run of queries attends to the i-th run of keys.

    Attributes:
        query_lens: Queries of each problem, all positive; the queries of the call are these runs one after another.
        key_lens: Keys of each problem, likewise.
        causal: Whether each query sees only keys up to its own place (equal lengths); otherwise it sees all.
    """

    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    causal: bool
    _memo: dict[str, object] = field(default_factory=dict, compare=False, repr=False)

    def cumulative(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Offsets of the runs of queries and of keys on the device, shape [problems + 1] each, int32."""
        if "cumulative" not in self._memo:
            self._memo["cumulative"] = tuple(
                torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
                for lens in (self.query_lens, self.key_lens)
            )
        return self._memo["cumulative"]  # type: ignore[return-value]

    def blocks(self) -> list[_Block]:
        """The same problems as dense batches, for kernels that know no variable lengths."""
        if "blocks" not in self._memo:
            self._memo["blocks"] = _dense_blocks(self)
        return self._memo["blocks"]  # type: ignore[return-value]


class VarlenKernel(Protocol):
    """The two primitives. Both take packed tensors: query [Q, H, D], key and value [M, K, D]."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the output [Q, H, D] and the log-sum-exp of the scaled scores [H, Q] (float32 or wider)."""

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, given that of the output.

        `out` and `lse` may be those of a softmax over more keys than this call has: the result is then this call's
        share of the gradients.
        """


class CUDAKernel:
    """FlashAttention as PyTorch ships it; FlashAttention-3 where the user has activated it in `torch.nn.attention`."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        cu_query, cu_key = call.cumulative(query.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_query, cu_key, max(call.query_lens), max(call.key_lens),
            0.0, call.causal, False, scale=scale,
        )  # fmt: skip
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.backward`."""
        cu_query, cu_key = call.cumulative(query.device)
        random_state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of a dropout that is never on
        unused = torch.empty(0, device=query.device)
        return torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), cu_query, cu_key,
            max(call.query_lens), max(call.key_lens), 0.0, call.causal, random_state, unused, scale=scale,
        )  # fmt: skip


class CPUKernel:
    """PyTorch's flash attention for CPU, one dense batch at a time."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in call.blocks():
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.queries.take(query), block.keys.take(key), block.keys.take(value),
                0.0, call.causal, scale=scale,
            )  # fmt: skip
            block.queries.put(part, out)
            block.queries.put_lse(part_lse, lse)
        return out, lse

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        lse: Tensor,
        call: VarlenCall,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `VarlenKernel.backward`."""
        grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        for block in call.blocks():
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                block.queries.take(grad, blank=True), block.queries.take(query), block.keys.take(key),
                block.keys.take(value), block.queries.take(out), block.queries.take_lse(lse),
                0.0, call.causal, scale=scale,
            )  # fmt: skip
            for runs, part, target in zip((block.queries, block.keys, block.keys), parts, grads, strict=True):
                runs.put(part, target)
        return grads


@dataclass(frozen=True)
class _Runs:
    """Equally long runs of tokens of a packed tensor, as a dense batch.

    Attributes:
        index: One run as a slice, or the tokens of each run, shape [runs, length]; a short run repeats its last token.
        kept: Which of those are not repetitions, shape [runs, length]; None where all are.
    """

    index: slice | Tensor
    kept: Tensor | None = None

    def take(self, packed: Tensor, blank: bool = False) -> Tensor:
        """[tokens, H, D] -> [runs, H, length, D]; with `blank`, zeros in place of the repetitions."""
        if isinstance(self.index, slice):
            return packed[self.index].transpose(0, 1)[None]
        batch = packed[self.index]
        if blank and self.kept is not None:
            batch = batch * self.kept[..., None, None]
        return batch.transpose(1, 2)

    def put(self, batch: Tensor, packed: Tensor) -> None:
        """The inverse of `take`, into `packed`."""
        batch = batch.transpose(1, 2)
        if isinstance(self.index, slice):
            packed[self.index] = batch[0]
        elif self.kept is None:
            packed[self.index] = batch
        else:
            packed[self.index[self.kept]] = batch[self.kept]

    def take_lse(self, lse: Tensor) -> Tensor:
        """[H, tokens] -> [runs, H, length]."""
        if isinstance(self.index, slice):
            return lse[:, self.index][None].contiguous()
        return lse[:, self.index].transpose(0, 1).contiguous()

    def put_lse(self, batch: Tensor, lse: Tensor) -> None:
        """The inverse of `take_lse`, into `lse`."""
        self.put(batch[..., None], lse.t()[..., None])


@dataclass(frozen=True)
class _Block:
    queries: _Runs
    keys: _Runs


def _dense_blocks(call: VarlenCall) -> list[_Block]:
    query_starts = [0, *accumulate(call.query_lens)]
    key_starts = [0, *accumulate(call.key_lens)]
    blocks: list[_Block] = []
    batches: dict[int, list[tuple[int, int]]] = {}
    for number, (queries, keys) in enumerate(zip(call.query_lens, call.key_lens, strict=True)):
        if call.causal and queries <= SHORT:
            size = 1 << (queries - 1).bit_length()
            batches.setdefault(size, []).append((query_starts[number], queries))
        else:
            start, first = query_starts[number], key_starts[number]
            blocks.append(_Block(_Runs(slice(start, start + queries)), _Runs(slice(first, first + keys))))
    for size, runs in batches.items():
        padded = _padded_runs(runs, size)
        blocks.append(_Block(padded, padded))
    return blocks


def _padded_runs(runs: Sequence[tuple[int, int]], size: int) -> _Runs:
    starts = torch.tensor([start for start, _ in runs])[:, None]
    lengths = torch.tensor([length for _, length in runs])[:, None]
    offsets = torch.arange(size)[None, :]
    # A causal padded run: the repeated last token comes behind the real ones, which therefore never see it.
    index = starts + torch.minimum(offsets, lengths - 1)
    return _Runs(index, None if bool((lengths == size).all()) else offsets < lengths)
