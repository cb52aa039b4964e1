"""Groups of adjacent ranks that share an engine.

With `tensor_parallel_size=1` each rank has its own engine and can sample at any time. With t > 1, ranks 0 to t-1 share
one engine, ranks t to 2t-1 the next, as in vLLM: each layer is split over t ranks, so they sample the same prompts at
the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pl_grouprl.utilities.distributed import gather_plain, num_ranks, own_rank


def engine_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """Arguments of vLLM's `EngineArgs` for the ranks.

    Raises:
        ValueError: If the number of ranks per engine is below 1, or does not divide the number of ranks.
    """
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1.")
    ranks = num_ranks()
    if ranks % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} splits an engine over {tensor_parallel_size} ranks of the "
            f"trainer, but it has {ranks}; train with a multiple of {tensor_parallel_size} (Trainer(devices=...)), or "
            "set tensor_parallel_size to a divisor of the number of ranks."
        )
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tensor_parallel_size}


def engine_environment(device: torch.device) -> dict[str, str]:
    """Environment variables of vLLM for this rank.

    Args:
        device: The trainer's device on this rank. vLLM uses the GPU with its index.
    """
    return {"RANK": str(own_rank()), "LOCAL_RANK": str(device.index or 0), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def engine_group(tensor_parallel_size: int) -> Any:
    """The process group, on CPUs, of the ranks that share this rank's engine; None if it has its own.

    It exists once the engine is built.
    """
    if tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def gather_from(group: Any, value: Any) -> list[Any]:
    """Gather a value from every rank of an engine, in rank order. Collective within the group.

    Args:
        group: From `engine_group`.
        value: Numbers, strings, tensors, and lists and dictionaries of them.
    """
    return [value] if group is None else gather_plain(value, group=group)


def share_requests(requests: Sequence[Any], group: Any) -> tuple[list[Any], slice]:
    """Combine the requests of all ranks of an engine. Collective within the group.

    Args:
        requests: This rank's requests, as `gather_from` takes them. May be empty.
        group: From `engine_group`.

    Returns:
        The requests of all ranks of the engine, in rank order, which every rank samples; and the slice of this rank's.
    """
    shares = gather_from(group, list(requests))
    start = sum(map(len, shares[: _rank_in(group)]))
    return [request for share in shares for request in share], slice(start, start + len(requests))


def _rank_in(group: Any) -> int:
    return 0 if group is None else torch.distributed.get_rank(group)
