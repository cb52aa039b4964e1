"""Moves many small tensors to a device in one asynchronous copy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

_Name = TypeVar("_Name")


def move_together(tensors: Mapping[_Name, Tensor], device: torch.device | str) -> dict[_Name, Tensor]:
    """Move CPU tensors to a device as one block of bytes.

    For CUDA the block is in pinned memory, so the copy is asynchronous; copies from pageable memory would synchronize
    for each tensor.

    Args:
        tensors: Tensors by name, of any dtypes and shapes.
        device: Target device; for the CPU the tensors are returned unchanged.

    Returns:
        The tensors by name, in the same order. Those moved together share a storage.
    """
    device = torch.device(device)
    if device.type == "cpu" or not tensors:
        return dict(tensors)
    block = _joined(tensors)
    if device.type == "cuda":
        block = block.pin_memory()
    return _separated(block.to(device, non_blocking=True), tensors)


def _joined(tensors: Mapping[_Name, Tensor]) -> Tensor:
    """Concatenate into one block of bytes, widest dtypes first to keep each tensor aligned."""
    return torch.cat([_bytes(tensors[name]) for name in _widest_first(tensors)])


def _bytes(tensor: Tensor) -> Tensor:
    """All elements as bytes."""
    # An expanded tensor of one element is contiguous, but its stride may be 0, which `view` refuses.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _separated(block: Tensor, tensors: Mapping[_Name, Tensor]) -> dict[_Name, Tensor]:
    """Split a block from `_joined` into views of these tensors."""
    order = _widest_first(tensors)
    pieces = block.split([tensors[name].nbytes for name in order])
    moved = {
        name: piece.view(tensors[name].dtype).view(tensors[name].shape)
        for name, piece in zip(order, pieces, strict=True)
    }
    return {name: moved[name] for name in tensors}


def _widest_first(tensors: Mapping[_Name, Tensor]) -> list[_Name]:
    return sorted(tensors, key=lambda name: -tensors[name].element_size())
