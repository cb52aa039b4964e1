"""The primitives on CPU: PyTorch's flash attention for CPU, one dense batch at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import Index, VarlenCall
from pl_grouprl.attention.backends.kernels.runs import Block, dense_blocks, largest_piece


class CPUKernel:
    """PyTorch's flash attention for CPU; float32, float64 and bfloat16, one head size for queries, keys and values."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See `VarlenKernel.forward`."""
        for block in dense_blocks(call, query.device, plain_causal=True):
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.queries.take(query), block.keys.take(key), block.keys.take(value),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=scale,
            )  # fmt: skip
            yield block.queries.tokens, block.queries.flat(out), block.queries.flat_lse(lse)

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
    ) -> Iterator[tuple[Index, Index, Tensor, Tensor, Tensor]]:
        """See `VarlenKernel.backward`."""
        for block in dense_blocks(call, query.device, plain_causal=True):
            queries, keys = block.queries, block.keys
            for_query, for_key, for_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                queries.take(grad, blank=True), queries.take(query), keys.take(key), keys.take(value),
                queries.take(out), queries.take_lse(lse),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=scale,
            )  # fmt: skip
            yield queries.tokens, keys.tokens, queries.flat(for_query), keys.flat(for_key), keys.flat(for_value)


def _mask(block: Block, call: VarlenCall, dtype: torch.dtype) -> Tensor | None:
    """Additive mask of a block's scores, shape [R or 1, 1, N, M]: minus infinity where a key is hidden.

    All unpadded runs share one mask, because the last query of each is aligned with its last key.
    """
    if block.last_keys is None:
        return None
    if block.queries.count > 1:
        return call.memo(("mask", id(block), dtype), lambda: _additive_mask(block.hidden(), dtype))
    device = block.last_keys.device
    corner = call.memo(("mask", dtype), lambda: _additive_mask(largest_piece(call, device).hidden(), dtype))
    return corner[..., -block.queries.length :, -block.keys.length :]


def _additive_mask(hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert hidden is not None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
