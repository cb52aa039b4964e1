"""The primitives on CPU: PyTorch's flash attention for CPU, one dense batch at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import VarlenCall
from pl_grouprl.attention.backends.kernels.runs import Block, dense_blocks


class CPUKernel:
    """PyTorch's flash attention for CPU; float32, float64 and bfloat16, one head size for queries, keys and values."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
        for block in dense_blocks(call, query.device, plain_causal=True):
            part, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.queries.take(query), block.keys.take(key), block.keys.take(value),
                0.0, block.plain_causal, attn_mask=_mask(block, query.dtype), scale=scale,
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
        grad_query = torch.empty_like(query)
        # A key may be in several blocks, or in none; its shares are added in float32.
        wide = torch.promote_types(key.dtype, torch.float32)
        grad_key, grad_value = torch.zeros_like(key, dtype=wide), torch.zeros_like(value, dtype=wide)
        for block in dense_blocks(call, query.device, plain_causal=True):
            for_query, for_key, for_value = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                block.queries.take(grad, blank=True), block.queries.take(query), block.keys.take(key),
                block.keys.take(value), block.queries.take(out), block.queries.take_lse(lse),
                0.0, block.plain_causal, attn_mask=_mask(block, query.dtype), scale=scale,
            )  # fmt: skip
            block.queries.put(for_query, grad_query)
            block.keys.add(for_key, grad_key)
            block.keys.add(for_value, grad_value)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _mask(block: Block, dtype: torch.dtype) -> Tensor | None:
    """What to add to the scores of a block, shape [R, 1, N, M]: minus infinity where a key is hidden."""
    hidden = block.hidden()
    if hidden is None:
        return None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
