"""Which ranks sample with which engine: each with one of its own, or several side by side with one together.

With `tensor_parallel_size=1` an engine is its rank's alone: after the start it samples whatever prompts the rank has,
at any time, or none. With t > 1, ranks 0 to t-1 have one engine, ranks t to 2t-1 the next, as vLLM counts them: a layer
is spread over the t ranks, so they sample the same prompts at the same time.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pl_grouprl.utilities.distributed import gather_plain, num_ranks


def check_ranks(tensor_parallel_size: int) -> None:
    """Refuse a number of ranks per engine that this run cannot have.

    Raises:
        ValueError: If it is below 1, or does not divide the number of ranks.
    """
    if tensor_parallel_size < 1:
        raise ValueError(f"tensor_parallel_size is {tensor_parallel_size}; it must be at least 1.")
    ranks = num_ranks()
    if ranks % tensor_parallel_size:
        raise ValueError(
            f"tensor_parallel_size={tensor_parallel_size} spreads an engine over {tensor_parallel_size} ranks of the "
            f"trainer, but it has {ranks}; train with a multiple of {tensor_parallel_size} (Trainer(devices=...)), or "
            "set tensor_parallel_size to a divisor of the number of ranks."
        )


def engine_arguments(tensor_parallel_size: int) -> dict[str, Any]:
    """What vLLM's `EngineArgs` are told of the ranks.

    Raises:
        ValueError: If this run cannot have so many ranks per engine.
    """
    check_ranks(tensor_parallel_size)
    return {"distributed_executor_backend": "external_launcher", "tensor_parallel_size": tensor_parallel_size}


def engine_environment(device: torch.device) -> dict[str, str]:
    """What vLLM reads of this rank in the environment.

    Args:
        device: Of the trainer in this rank. vLLM takes the GPU of its index, whichever rank it is.
    """
    rank = torch.distributed.get_rank() if num_ranks() > 1 else 0
    return {"RANK": str(rank), "LOCAL_RANK": str(device.index or 0), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def engine_group(tensor_parallel_size: int) -> Any:
    """The process group, on CPUs, of the ranks that share this rank's engine; None where it has its own.

    There is one once the engine is built.
    """
    if tensor_parallel_size == 1:
        return None
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().cpu_group


def gather_from(group: Any, value: Any) -> list[Any]:
    """Collect a value from every rank of an engine, in rank order. They all call it.

    Args:
        group: Of `engine_group`.
        value: Numbers, strings, tensors, and lists and dictionaries of them.
    """
    return [value] if group is None else gather_plain(value, group=group)


def share_requests(requests: Sequence[Any], group: Any) -> tuple[list[Any], slice]:
    """Put the requests of the ranks of an engine together. They all call it.

    Args:
        requests: Of this rank, as `gather_from` takes them. May be empty.
        group: Of `engine_group`.

    Returns:
        The requests of all ranks of the engine, in rank order, which each of them samples; and where among them this
        rank's are.
    """
    shares = gather_from(group, list(requests))
    start = sum(map(len, shares[: _rank_in(group)]))
    return [request for share in shares for request in share], slice(start, start + len(requests))


def _rank_in(group: Any) -> int:
    return 0 if group is None else torch.distributed.get_rank(group)


@contextmanager
def own_shared_memory(device: torch.device) -> Iterator[None]:
    """Where engines are built: on CPUs, their ranks' shared memory gets a name that no other run has.

    vLLM 0.32 calls it the same in every run that starts its ranks itself, and the second one on a machine fails.
    """
    if device.type != "cpu" or num_ranks() == 1:
        yield
        return
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    usual = _CPUSHMDistributed.make_group_name
    run = gather_plain(uuid.uuid4().hex)[0]

    def group_name(communicator: Any) -> str:
        return f"{run}-{usual(communicator).replace('/', '')}"

    with patch.object(_CPUSHMDistributed, "make_group_name", staticmethod(group_name)):
        yield
