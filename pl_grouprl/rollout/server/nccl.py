"""Weights by NCCL: the trainer's rank 0 broadcasts them to the workers of all servers. Needs GPUs at both ends.

The communicator's id is sent over HTTP, because vLLM's alternative, a TCPStore, unpickles messages.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, wait
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.sync.transfer import Bucket

_PACK_BYTES = 256 << 20
_PACKS = 2
"""Size in bytes, and number, of the buffers that tensors are packed into; the same at both ends."""


def check_device() -> None:
    """Refuse a machine without a CUDA GPU, which NCCL needs.

    Raises:
        ValueError: If there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError(
            "transfer is 'nccl', but this machine has no CUDA device; choose 'http', on the server (--transfer) and in "
            "the engine."
        )


def init_info(unique_id: str, rank_offset: int, world_size: int) -> dict[str, Any]:
    """The message that makes vLLM's workers join the trainer's group.

    Args:
        unique_id: Id of the communicator, base64.
        rank_offset: Rank of this server's first worker; the trainer is rank 0.
        world_size: 1 for the trainer, plus the number of workers of all servers.
    """
    return {
        "nccl_unique_id_b64": unique_id,
        "rank_offset": rank_offset,
        "world_size": world_size,
        "packed": True,
        "packed_buffer_size_bytes": _PACK_BYTES,
        "packed_num_buffers": _PACKS,
    }


class Broadcaster:
    """The trainer's end: a communicator with the workers of all servers.

    Args:
        workers: Number of workers of each server.
        join: Per server, a function that makes its workers join; takes `unique_id`, `rank_offset` and `world_size`,
            and returns when they have joined.
        pool: Runs `join` and `announce`; needs a thread per server.
    """

    def __init__(self, workers: Sequence[int], join: Sequence[Callable[..., Any]], pool: Executor) -> None:
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        check_device()
        identity = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        world_size = 1 + sum(workers)
        joining = [
            pool.submit(
                one, unique_id=base64.b64encode(identity).decode(), rank_offset=1 + before, world_size=world_size
            )
            for one, before in zip(join, _sums_before(workers), strict=True)
        ]
        _raise_early(joining)
        self._close_lock = threading.Lock()
        self._group = uid_init_process_group(identity, 0, world_size, torch.cuda.current_device())
        for future in joining:
            future.result()

    def send(self, bucket: Bucket, announce: Sequence[Callable[[dict[str, Any]], Any]], pool: Executor) -> None:
        """Broadcast a bucket, and wait until all servers have loaded it.

        Args:
            bucket: Tensors on the GPU, in the servers' dtype.
            announce: Per server, a function that sends `names`, `dtype_names` and `shapes`; returns when the server has
                received the bucket, and raises without retrying if it fails.
            pool: See the class.

        Raises:
            Exception: The error of `announce`. The group is then unusable.
        """
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        described = {
            "names": [name for name, _ in bucket],
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for _, weight in bucket],
            "shapes": [list(weight.shape) for _, weight in bucket],
        }
        announced = [pool.submit(one, described) for one in announce]
        for future in announced:
            future.add_done_callback(self._abort_if_failed)
        torch.cuda.current_stream().synchronize()  # the broadcast uses other streams
        try:
            packed_nccl_broadcast_producer(
                iterator=iter(bucket),
                group=self._group,
                src=0,
                post_iter_func=_value,
                buffer_size_bytes=_PACK_BYTES,
                num_buffers=_PACKS,
            )
        except RuntimeError:
            _raise_early(announced)  # the cause of the abort
            raise
        _raise_early(announced, None)  # if one server fails, the others may never return

    def close(self) -> None:
        """Leave the group, even during a broadcast. Idempotent."""
        with self._close_lock:
            self._group.destroy()

    def _abort_if_failed(self, announced: Future[Any]) -> None:
        """Abort if a server failed, as NCCL would wait for it forever."""
        if announced.exception() is not None:
            self.close()


def _value(item: tuple[str, Tensor]) -> Tensor:
    return item[1]


def _sums_before(counts: Sequence[int]) -> list[int]:
    return [sum(counts[:index]) for index in range(len(counts))]


def _raise_early(calls: Sequence[Future[Any]], seconds: float | None = 1.0) -> None:
    """Raise a server's early refusal, since NCCL would wait for it forever.

    Args:
        calls: The calls to all servers.
        seconds: How long to wait for a failure; None waits for all calls.
    """
    for future in wait(calls, timeout=seconds, return_when=FIRST_EXCEPTION).done:
        future.result()
