"""Which tensors PyTorch's fused attention kernels support."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CUDA_HEAD_SIZE = 256
"""Of FlashAttention."""

CUDA_HEAD_MULTIPLE = 8
"""FlashAttention's head sizes are multiples of this."""


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel supports these tensors, [..., D] each, with heads padded to one size if they differ."""
    if query.is_cuda:
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and max(key.shape[-1], value.shape[-1]) <= MAX_CUDA_HEAD_SIZE
    return query.device.type == "cpu"


def head_multiple(query: Tensor) -> int:
    """Head sizes must be a multiple of this for the device's kernel."""
    return CUDA_HEAD_MULTIPLE if query.is_cuda else 1
