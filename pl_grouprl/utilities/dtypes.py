"""Dtypes that a device has."""

from __future__ import annotations

import torch


def widest_dtype(device: torch.device) -> torch.dtype:
    """The widest floating dtype of a device: float64, or float32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64
