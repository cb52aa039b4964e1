"""The CUDA kernel through what PyTorch puts in place of FlashAttention when "FA3" is activated.

The wrapper is PyTorch's own; beneath it the kernels are in closed form, and it is registered for CPU.
"""

import pytest
import torch
from helpers import flash_attention
from helpers.forests import random_forest, relative_error

from pl_grouprl.attention.backends import cascade
from pl_grouprl.attention.backends.choice import get_backend
from pl_grouprl.attention.backends.interface import AttentionRule
from pl_grouprl.attention.backends.kernels import CUDAKernel
from pl_grouprl.packing import SharedPrefixLayout

fa3 = pytest.importorskip("torch.nn.attention._fa3")


def forward(q, k, v, *rest):
    cu_q, cu_k, max_q, max_k = rest[4], rest[5], rest[9], rest[10]
    scale, causal, left, right = rest[20:24]
    out, lse, *_ = flash_attention._forward(
        q, k, v, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    return out, lse, None, None


def backward(grad, q, k, v, out, lse, dq, dk, dv, cu_q, cu_k, _, __, max_q, max_k, scale, causal, left, right, *rest):
    found = flash_attention._backward(
        grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, 0.0, causal, None, None, scale=scale,
        window_size_left=left, window_size_right=right,
    )  # fmt: skip
    for place, part in zip((dq, dk, dv), found, strict=True):
        place.copy_(part)


@pytest.fixture
def activated(monkeypatch):
    monkeypatch.setattr(cascade, "CPUKernel", CUDAKernel)
    monkeypatch.setattr(fa3, "_FA3_CUDA_FWD", forward)
    monkeypatch.setattr(fa3, "_FA3_CUDA_BWD", backward)
    monkeypatch.setattr(fa3, "_fa3_common_support_error", lambda *args: None)  # no CUDA device
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward", fa3._fa3_flash_attention_forward_impl_default, "CPU")
    library.impl("_flash_attention_backward", fa3._fa3_flash_attention_backward_impl, "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("limit", [{}, {"window": 4}, {"chunk": 3}], ids=str)
def test_outputs_and_gradients(activated, limit):
    forest = random_forest(0, 2, roots=2)
    layout, rule = SharedPrefixLayout(*forest), AttentionRule(0.3, **limit)
    torch.manual_seed(0)
    tensors = [torch.randn(1, h, layout.num_tokens, 8).bfloat16().requires_grad_() for h in (4, 2, 2)]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = []
    for backend, inputs in (("cascade", tensors), ("reference", wide)):
        out = get_backend(backend)(*inputs, layout, rule)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one, other) < 2e-2
