"""Checks whether weights are finite, with the same answer on every rank."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from pl_grouprl.utilities.distributed import gather_plain, local_shard
from pl_grouprl.utilities.dtypes import widest_dtype


@torch.no_grad()
def nonfinite_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> list[str]:
    """Name the parameters that contain NaN or inf on any rank. Collective, with the same result on all.

    Each rank scans its weights or shards once; only names are gathered.

    Args:
        named_parameters: A module's `named_parameters()`; under FSDP and ZeRO-3, in their state between steps.
            Integers and tensors on the meta device count as finite.
        device: Device for communication; the rank's GPU under NCCL.
    """
    broken = nonfinite_tensors((name, local_shard(parameter)) for name, parameter in named_parameters)
    return list(dict.fromkeys(name for names in gather_plain(broken, device) for name in names))


@torch.no_grad()
def nonfinite_tensors(named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Name the tensors that contain NaN or inf on this rank; see `nonfinite_parameters`."""
    largest = {name: _largest(tensor) for name, tensor in named_tensors if _can_be_nonfinite(tensor)}
    if not largest:
        return []
    first = next(iter(largest.values())).device
    finite = torch.stack([value.to(first, widest_dtype(first)) for value in largest.values()]).isfinite().tolist()
    return [name for name, is_finite in zip(largest, finite, strict=True) if not is_finite]


def _can_be_nonfinite(tensor: Tensor) -> bool:
    return bool(tensor.numel()) and (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta


def _largest(tensor: Tensor) -> Tensor:
    """The largest magnitude; propagates NaN and inf, cannot overflow, and copies only float8."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    lowest, highest = torch.aminmax(tensor.float() if tensor.itemsize == 1 else tensor)
    return torch.maximum(-lowest, highest)
