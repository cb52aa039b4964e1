"""The primitives on CUDA: FlashAttention, which natively supports variable lengths, causal runs and windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pl_grouprl.attention.backends.kernels.call import Index, VarlenCall, take


class CUDAKernel:
    """FlashAttention as shipped with PyTorch or replaced by `torch.nn.attention.activate_flash_attention_impl`.

    FlashAttention-3 ("FA3", on Hopper GPUs, from the package `flash_attn_interface`) registers itself for the same two
    operators; it raises on GPUs it does not support.

    Both versions take bfloat16 and float16, with one head size for queries, keys and values: a multiple of 8 up to 256.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, call: VarlenCall, scale: float
    ) -> Iterator[tuple[Index, Tensor, Tensor]]:
        """See `VarlenKernel.forward`."""
        query, key, value = take(query, call.queries), take(key, call.keys), take(value, call.keys)
        cu_query, cu_key = call.cumulative(query.device)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_query, cu_key, max(call.query_lens), max(call.key_lens),
            0.0, _plain_causal(call), False, scale=scale, **_window(call),
        )  # fmt: skip
        yield call.queries, out, lse

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
        grad, query, out = (take(tensor, call.queries) for tensor in (grad, query, out))
        key, value = take(key, call.keys), take(value, call.keys)
        lse = lse[:, call.queries] if isinstance(call.queries, slice) else lse.index_select(1, call.queries)
        cu_query, cu_key = call.cumulative(query.device)
        random_state, unused = call.memo(("random_state", query.device), lambda: _no_dropout(query.device))
        grads = torch.ops.aten._flash_attention_backward(
            grad, query, key, value, out, lse.contiguous(), cu_query, cu_key, max(call.query_lens), max(call.key_lens),
            0.0, _plain_causal(call), random_state, unused, scale=scale, **_window(call),
        )  # fmt: skip
        yield call.queries, call.keys, *grads


def _no_dropout(device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.zeros(2, dtype=torch.uint64, device=device), torch.empty(0, device=device)


def _plain_causal(call: VarlenCall) -> bool:
    return call.causal and call.effective_window is None


def _window(call: VarlenCall) -> dict[str, int]:
    """FlashAttention counts the keys to the left of a query's own, and aligns the last query with the last key."""
    window = call.effective_window
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
