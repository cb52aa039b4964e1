"""Which tensors PyTorch's fused attention kernels serve."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_CUDA_HEAD_SIZE = 256
"""Of FlashAttention."""

CUDA_HEAD_MULTIPLE = 8
"""FlashAttention takes head sizes that are multiples of this."""


def has_fused_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether a fused kernel serves these tensors, [..., D] each, heads padded to one size where they differ."""
    if query.is_cuda:
        half = query.dtype in (torch.bfloat16, torch.float16)
        return half and max(key.shape[-1], value.shape[-1]) <= MAX_CUDA_HEAD_SIZE
    return query.device.type == "cpu"


def head_multiple(query: Tensor) -> int:
    """What a head size must be a multiple of for the kernel of this device."""
    return CUDA_HEAD_MULTIPLE if query.is_cuda else 1
