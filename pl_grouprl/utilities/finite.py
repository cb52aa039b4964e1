"""Whether weights are finite, with the same answer on every rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from pl_grouprl.utilities.distributed import gather_plain


@torch.no_grad()
def nonfinite_parameters(
    named_parameters: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> list[str]:
    """Name the parameters that have NaN or inf on some rank. All ranks must call it, and get the same answer.

    Each rank reads its weights or shards once; only names are gathered.

    Args:
        named_parameters: As a module's `named_parameters()` gives them; under FSDP and ZeRO-3, as they are between
            steps. Integers and tensors on the meta device count as finite.
        device: Where the communication happens; the rank's own GPU under NCCL.
    """
    largest = {name: _largest(local) for name, parameter in named_parameters if _counts(local := _local(parameter))}
    if not largest:
        broken = []
    else:
        place = next(iter(largest.values())).device
        finite = torch.stack([value.to(place, torch.float64) for value in largest.values()]).isfinite().tolist()
        broken = [name for name, is_finite in zip(largest, finite, strict=True) if not is_finite]
    return list(dict.fromkeys(name for names in gather_plain(broken, device) for name in names))


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """The first names, and how many more there are, for an error."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def _local(parameter: Tensor) -> Tensor:
    """What this rank holds: the whole parameter, or its shard under ZeRO-3 and FSDP2."""
    shard: Tensor = getattr(parameter, "ds_tensor", parameter)
    local: Tensor = shard.to_local() if hasattr(shard, "to_local") else shard
    return local.detach()


def _counts(local: Tensor) -> bool:
    return bool(local.numel()) and (local.is_floating_point() or local.is_complex()) and not local.is_meta


def _largest(local: Tensor) -> Tensor:
    """The largest magnitude: NaN and inf pass through, finite values cannot overflow, only float8 is copied."""
    if local.is_complex():
        local = torch.view_as_real(local)
    lowest, highest = torch.aminmax(local.float() if local.itemsize == 1 else local)
    return torch.maximum(-lowest, highest)
