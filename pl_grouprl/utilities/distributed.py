"""Communication between ranks besides gradients, and the shard of a tensor that a rank holds."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import torch

T = TypeVar("T")

_FIRST_BYTES = 4096
"""What most values take that ranks tell each other; larger ones are gathered in two collectives."""


def num_ranks() -> int:
    """Number of processes that train together; 1 without a process group."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if initialized else 1


def own_rank() -> int:
    """This process's rank; 0 without a process group."""
    return torch.distributed.get_rank() if num_ranks() > 1 else 0


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard under ZeRO-3 and FSDP2, detached; the whole tensor where it is not sharded."""
    shard: torch.Tensor = getattr(tensor, "ds_tensor", tensor)  # ZeRO-3
    local: torch.Tensor = shard.to_local() if hasattr(shard, "to_local") else shard  # a DTensor (FSDP2)
    return local.detach()


def gather_plain(value: Any, device: torch.device | str = "cpu", group: Any = None) -> list[Any]:
    """Gather a value from every rank, in rank order. Collective.

    Args:
        value: Numbers, strings, tensors, and lists and dictionaries of them. Loaded with `weights_only=True`, so
            nothing that a rank sends is executed.
        device: Device for communication; the rank's GPU under NCCL.
        group: The process group; all ranks if None.
    """
    if num_ranks() == 1:
        return [value]
    stream = io.BytesIO()
    torch.save(value, stream)
    own, most = stream.getvalue(), _FIRST_BYTES

    def gather(part: bytes, length: int) -> list[bytes]:
        sent = torch.frombuffer(bytearray(part.ljust(length, b"\0")), dtype=torch.uint8).to(device)
        received = [torch.empty_like(sent) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(received, sent, group=group)
        return [each.cpu().numpy().tobytes() for each in received]

    # The number of bytes along with the first ones, and the others only if there are any.
    first = gather(len(own).to_bytes(8, "little") + own[:most], 8 + most)
    lengths = [int.from_bytes(received[:8], "little") for received in first]
    whole = [received[8:] for received in first]
    if max(lengths) > most:
        others = gather(own[most:], max(lengths) - most)
        whole = [start + rest for start, rest in zip(whole, others, strict=True)]
    return [
        torch.load(io.BytesIO(received[:length]), map_location="cpu", weights_only=True)
        for received, length in zip(whole, lengths, strict=True)
    ]


def reduce_over_ranks(
    values: torch.Tensor, device: torch.device | str = "cpu", op: Literal["sum", "max"] = "sum"
) -> torch.Tensor:
    """Sum a tensor over all ranks, or take its elementwise maximum. Collective.

    Args:
        values: A tensor of the same shape on every rank.
        device: Device for communication; the rank's GPU under NCCL.
        op: `sum` or `max`.

    Returns:
        The result, on the device of `values`.
    """
    if num_ranks() == 1:
        return values
    reduced = values.to(device).clone(memory_format=torch.contiguous_format)
    torch.distributed.all_reduce(reduced, getattr(torch.distributed.ReduceOp, op.upper()))
    return reduced.to(values.device)


def sum_over_ranks(values: Sequence[torch.Tensor], device: torch.device | str = "cpu") -> list[float]:
    """Sum scalars over all ranks, in one collective. Every rank passes the same quantities in the same order."""
    stacked = torch.stack([value.detach().to(device, torch.float32) for value in values])
    return reduce_over_ranks(stacked, device).tolist()


def raise_on_all_ranks(
    run: Callable[[], T],
    device: torch.device | str = "cpu",
    *,
    group: Any = None,
    shared: type[Exception] | None = None,
) -> T:
    """Run a function on every rank; if it raises on one, raise on all. Collective.

    Args:
        run: Returns or raises on each rank, independently of the others.
        device: As for `gather_plain`.
        group: As for `gather_plain`.
        shared: Exceptions of this type are raised as this type on the other ranks too, unless one raised something
            else, which takes precedence.

    Returns:
        The result of `run` on this rank.

    Raises:
        Exception: The error of `run` on this rank.
        RuntimeError: If it raised on another rank; names the first one.
    """
    error: Exception | None = None
    try:
        result = run()
    except Exception as raised:
        error = raised
    is_shared = shared is not None and isinstance(error, shared)
    failure = None if error is None else [is_shared, f"{type(error).__name__}: {error}"]
    failed = [(rank, *told) for rank, told in enumerate(gather_plain(failure, device, group)) if told is not None]
    failed.sort(key=lambda failure: failure[1])  # errors that are not shared first
    if error is not None and (not is_shared or failed[0][1]):
        raise error
    if failed:
        rank, as_shared, text = failed[0]
        kind = shared if as_shared and shared is not None else RuntimeError
        raise kind(f"rank {rank} failed with {text}") from error
    return result


def derive_seed(*parts: int | str) -> int:
    """Mix numbers and names into one seed, in [0, 2^63). The same parts give the same seed in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
