"""Many small tensors to a device in one copy that the host does not wait for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

_Name = TypeVar("_Name")


def move_together(tensors: Mapping[_Name, Tensor], device: torch.device | str) -> dict[_Name, Tensor]:
    """Move CPU tensors to a device as one block of bytes.

    To CUDA the block is in pinned memory, so that the copy is queued behind what the device is at, and the host goes on
    meanwhile: a copy for each tensor from ordinary memory would wait for the device each time.

    Args:
        tensors: By name, of any dtypes and shapes.
        device: Where they are put; on the CPU they are returned as they are.

    Returns:
        By the same names, in the same order. Those that went together share a storage.
    """
    device = torch.device(device)
    if device.type == "cpu" or not tensors:
        return dict(tensors)
    block = _joined(tensors)
    if device.type == "cuda":
        block = block.pin_memory()
    return _separated(block.to(device, non_blocking=True), tensors)


def _joined(tensors: Mapping[_Name, Tensor]) -> Tensor:
    """One block of bytes, the widest dtypes first, so that each tensor begins aligned."""
    return torch.cat([tensors[name].contiguous().flatten().view(torch.uint8) for name in _widest_first(tensors)])


def _separated(block: Tensor, tensors: Mapping[_Name, Tensor]) -> dict[_Name, Tensor]:
    """Views of a block that `_joined` made of these tensors."""
    order = _widest_first(tensors)
    pieces = block.split([tensors[name].nbytes for name in order])
    moved = {
        name: piece.view(tensors[name].dtype).view(tensors[name].shape)
        for name, piece in zip(order, pieces, strict=True)
    }
    return {name: moved[name] for name in tensors}


def _widest_first(tensors: Mapping[_Name, Tensor]) -> list[_Name]:
    return sorted(tensors, key=lambda name: -tensors[name].element_size())
