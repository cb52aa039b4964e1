"""What a device can do at best, where its maker says so."""

from __future__ import annotations

import torch

DENSE_BF16_TFLOPS = {"H200": 989.0, "H100 80GB HBM3": 989.0, "H100 SXM": 989.0, "A100": 312.0}
"""Tensor cores in bfloat16 without sparsity, by a part of the device's name as PyTorch gives it: NVIDIA's data sheets
of the H100 (SXM, 989), the H200 (SXM, 989) and the A100 (312). H100 cards for PCIe slots have other peaks."""


def peak_flops(dtype: str) -> float | None:
    """Operations per second that this machine's CUDA device can do at best in a dtype; None where nobody says."""
    if dtype != "bfloat16" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    return next((1e12 * peak for part, peak in DENSE_BF16_TFLOPS.items() if part in name), None)
