"""The primitives on CPU: PyTorch's flash attention for CPU, one dense batch at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import VarlenCall
from pl_grouprl.attention.backends.kernels.runs import Block, Runs, dense_blocks, keys_are_disjoint, largest_piece


class CPUKernel:
    """PyTorch's flash attention for CPU; float32, float64 and bfloat16, one head size for queries, keys and values."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """See `VarlenKernel.forward`."""
        blocks = dense_blocks(call, query.device, plain_causal=True)
        found = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                block.queries.take(query), block.keys.take(key), block.keys.take(value),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=scale,
            )
            for block in blocks
        )  # fmt: skip
        if _is_one_run(call, blocks):
            out, lse = next(found)
            return out[0].transpose(0, 1), lse[0]
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        lse = query.new_empty(query.shape[1], query.shape[0], dtype=torch.promote_types(query.dtype, torch.float32))
        for block, (part, part_lse) in zip(blocks, found, strict=True):
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
        blocks = dense_blocks(call, query.device, plain_causal=True)
        found = (
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                block.queries.take(grad, blank=True), block.queries.take(query), block.keys.take(key),
                block.keys.take(value), block.queries.take(out), block.queries.take_lse(lse),
                0.0, block.plain_causal, attn_mask=_mask(block, call, query.dtype), scale=scale,
            )
            for block in blocks
        )  # fmt: skip
        if _is_one_run(call, blocks):
            for_query, for_key, for_value = (grad[0].transpose(0, 1) for grad in next(found))
            return for_query, for_key, for_value
        grad_query, grad_key, grad_value = (tensor.new_empty(tensor.shape) for tensor in (query, key, value))
        write = Runs.put
        if not keys_are_disjoint(call, plain_causal=True):  # add up a key's shares in float32
            wide = torch.promote_types(key.dtype, torch.float32)
            grad_key, grad_value = (tensor.new_zeros(tensor.shape, dtype=wide) for tensor in (key, value))
            write = Runs.add
        for block, (for_query, for_key, for_value) in zip(blocks, found, strict=True):
            block.queries.put(for_query, grad_query)
            write(block.keys, for_key, grad_key)
            write(block.keys, for_value, grad_value)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype)


def _is_one_run(call: VarlenCall, blocks: list[Block]) -> bool:
    """Whether all tokens of a call form one block, without reordering."""
    return len(call.query_lens) == len(blocks) == 1 and keys_are_disjoint(call, plain_causal=True)


def _mask(block: Block, call: VarlenCall, dtype: torch.dtype) -> Tensor | None:
    """Additive mask of a block's scores, shape [R, 1, N, M]: minus infinity where a key is hidden.

    All unpadded runs share one mask, because the last query of each is aligned with its last key.
    """
    if block.last_keys is None:
        return None
    if block.queries.tokens is not None:
        return call.memo(("mask", id(block), dtype), lambda: _additive_mask(block.hidden(), dtype))
    device = block.last_keys.device
    corner = call.memo(("mask", dtype), lambda: _additive_mask(largest_piece(call, device).hidden(), dtype))
    return corner[..., -block.queries.length :, -block.keys.length :]


def _additive_mask(hidden: Tensor | None, dtype: torch.dtype) -> Tensor:
    assert hidden is not None
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
