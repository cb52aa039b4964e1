"""One rank's part of a sharded tensor."""

from __future__ import annotations

from torch import Tensor


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard under ZeRO-3 and FSDP2, detached; the whole tensor if it is not sharded."""
    shard: Tensor = getattr(tensor, "ds_tensor", tensor)  # of ZeRO-3
    local: Tensor = shard.to_local() if hasattr(shard, "to_local") else shard  # a DTensor, of FSDP2
    return local.detach()
