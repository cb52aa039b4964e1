"""What the ranks of a run exchange besides gradients."""

from __future__ import annotations

import hashlib
import io
from typing import Any

import torch


def num_ranks() -> int:
    """Number of processes that train together; 1 without a process group."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if initialized else 1


def gather_plain(value: Any, device: torch.device | str = "cpu", group: Any = None) -> list[Any]:
    """Collect a value from every rank, in rank order. All ranks must call it.

    Args:
        value: Numbers, strings, tensors, and lists and dictionaries of them. What arrives is loaded with
            `weights_only=True`: nothing that a rank sends is executed.
        device: Where the communication happens; the rank's own GPU under NCCL.
        group: The process group whose ranks take part; None is all.
    """
    if num_ranks() == 1:
        return [value]
    from torchmetrics.utilities.distributed import gather_all_tensors

    stream = io.BytesIO()
    torch.save(value, stream)
    sent = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(device)
    return [
        torch.load(io.BytesIO(received.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
        for received in gather_all_tensors(sent, group=group)
    ]


def raise_on_all_ranks(failure: Exception | None, device: torch.device | str = "cpu") -> None:
    """Raise what failed on this rank, and on the others say which rank it was. All ranks must call it.

    Args:
        failure: What this rank caught; None if it succeeded.
        device: As for `gather_plain`.

    Raises:
        RuntimeError: On ranks that succeeded, if another one failed.
    """
    own = "" if failure is None else f"{type(failure).__name__}: {failure}"
    reasons = gather_plain(own, device)
    if failure is not None:
        raise failure
    for rank, reason in enumerate(reasons):
        if reason:
            raise RuntimeError(f"rank {rank} failed with {reason}")


def derive_seed(*parts: int | str) -> int:
    """Mix numbers and names into one seed, in [0, 2^63). The same parts give the same seed in every process."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
