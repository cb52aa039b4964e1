"""Several servers used as one: they receive the same weights in parallel, as files or by NCCL."""

from __future__ import annotations

import base64
import os
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx2
import torch
from safetensors.torch import save_file
from torch import Tensor

from pl_grouprl.distributed.checksum import Bucket, WeightsMismatchError, buckets, check_weights
from pl_grouprl.rollout.engine import AdapterWeights, SamplerLostError
from pl_grouprl.rollout.vllm.adapter import adapter_name, adapter_tensors, peft_files
from pl_grouprl.rollout.vllm.client import Labels, RefusedError, Server
from pl_grouprl.rollout.vllm.settings import ADAPTER_FOLDER

T = TypeVar("T")

_PIECE_BYTES = 16 << 20
"""Bytes of an adapter per message."""


class Fleet:
    """Servers that receive the same weights.

    Args:
        servers: The servers.
        infos: Description of each server (`Server.describe`).
        labels: Labels of the run's weights.

    Attributes:
        dtype: Dtype of their weights.
        by_nccl: Whether weights go by NCCL, rather than as files in each server's folder.

    Raises:
        ValueError: If this machine lacks a GPU for NCCL, or a server's folder.
    """

    def __init__(self, servers: Sequence[Server], infos: Sequence[dict[str, Any]], labels: Labels) -> None:
        self._servers, self._labels = servers, labels
        self._instances = [info["instance"] for info in infos]
        self._folders = [Path(info["folder"]) for info in infos]
        self._workers = [info["workers"] for info in infos]
        self._pool = ThreadPoolExecutor(len(servers), thread_name_prefix="sampling-server")
        self._broadcaster: Broadcaster | None = None
        self._loaded: dict[str, int] = {}  # checksums of what the servers have, without an adapter
        self.dtype: torch.dtype = getattr(torch, infos[0]["dtype"])
        self.by_nccl = infos[0]["backend"] == "nccl"
        if self.by_nccl:
            check_device()
            return
        for server, folder in zip(servers, self._folders, strict=True):
            if not os.access(folder, os.W_OK):
                raise ValueError(
                    f"the sampling server at {server.url} reads weights from files in {str(folder)!r}, where this "
                    "process cannot write; start it with --weights-folder in a folder that both have, or with "
                    "--transfer nccl."
                )

    def is_same(self, infos: Sequence[dict[str, Any]]) -> bool:
        """Whether the servers are still the same processes."""
        return [info["instance"] for info in infos] == self._instances

    def update(
        self,
        weights: Iterable[tuple[str, Tensor]],
        version: int,
        checksums: dict[str, int],
        *,
        bucket_bytes: int,
        pause: Literal["keep", "abort"],
        adapter: AdapterWeights | None = None,
    ) -> int:
        """Replace the weights of all servers, which sample again once the weights of all have been verified.

        A server is labeled as updating while its weights are incomplete, and stays paused if the update fails.

        Args:
            weights: Name and value of each, in the servers' dtype; empty if the servers have the base of `adapter`.
            version: Their version.
            checksums: The checksum of each; reading `weights` fills it in.
            bucket_bytes: Size of a bucket.
            pause: What to do with running sequences.
            adapter: An adapter to serve under the name of the version; consumed.

        Returns:
            Number of bytes sent.

        Raises:
            SamplerLostError: If a server was restarted or broke off, or has no base for the adapter.
            WeightsMismatchError: If a server loaded other weights, or another trainer uses it.
            RefusedError: If a server rejects a call.
        """
        servers, updating = self._servers, self._labels.updating
        try:
            self._on_all(lambda server: self._begin(pause, server))
            size = 0
            added: dict[str, int] = {}
            stream = iter(weights)
            first = next(stream, None)
            if first is not None:
                self._loaded = {}
                size += self._renew(chain([first], stream), bucket_bytes)
                self._loaded = checksums
            elif not self._loaded:
                raise SamplerLostError("the sampling servers have lost the base of the adapter.")
            if adapter is not None:
                size += self._serve_adapter(adapter, version, added)
            rerun = {"reset_running_requests": True}  # running sequences recompute their caches from the new weights
            dropped = self._on_all(lambda server: server.post("/reset_prefix_cache", params=rerun))
            loaded = self._on_all(lambda server: server.rpc("weight_checksums", list(self._loaded)))
            if adapter is not None:
                of_adapter = self._on_all(lambda server: server.rpc("adapter_checksums", list(added)))
                loaded = [
                    [base + own for base, own in zip(*workers, strict=True)]
                    for workers in zip(loaded, of_adapter, strict=True)
                ]
            labels = self._on_all(Server.label)
            for server, answer, workers, label in zip(servers, dropped, loaded, labels, strict=True):
                if not answer["success"]:
                    raise RefusedError(server.url, 500, "vLLM did not drop its prefix cache.")
                try:
                    check_weights({**self._loaded, **added}, workers)
                except WeightsMismatchError as error:
                    raise WeightsMismatchError(f"At {server.url}: {error}") from error
                if label != updating:
                    raise RefusedError(server.url, 409, "another trainer has begun an update")
            new_label = {"new_version": self._labels.of(version)}
            self._on_all(lambda server: server.post("/update_weight_version", new_label))
            self._on_all(lambda server: server.post("/resume"))
        except BaseException as error:
            try:
                if isinstance(error, httpx2.TransportError):
                    raise SamplerLostError(
                        f"a sampling server broke off an update ({type(error).__name__}: {error})."
                    ) from error
                if isinstance(error, (RefusedError, WeightsMismatchError)):
                    for server in servers:  # raises a clearer error if it was restarted, or another trainer uses it
                        self._labels.version(server.wait(), 0, server.url)
                raise
            finally:
                self._on_all(self._abandon)
        return size

    def _renew(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Replace the weights, but no adapter. Returns the number of bytes."""
        if self.by_nccl and self._broadcaster is None:
            join = [partial(_join, server) for server in self._servers]
            self._broadcaster = Broadcaster(self._workers, join, self._pool)
        self._on_all(lambda server: server.post("/start_weight_update"))
        size = (self._broadcast if self.by_nccl else self._send)(weights, bucket_bytes)
        self._on_all(lambda server: server.post("/finish_weight_update", {}))
        self._on_all(lambda server: server.rpc("refresh_stale_weights"))
        return size

    def _serve_adapter(self, adapter: AdapterWeights, version: int, checksums: dict[str, int]) -> int:
        """Replace the adapter, by HTTP, which needs no common folder. Returns the number of bytes of its weights."""
        weights = adapter_tensors(adapter, self.dtype, checksums)
        files = peft_files(adapter.config, weights)

        def load(place: int) -> None:
            server = self._servers[place]
            for name, contents in files.items():
                for start in range(0, len(contents), _PIECE_BYTES):
                    piece = base64.b64encode(contents[start : start + _PIECE_BYTES]).decode()
                    server.rpc("receive_adapter", self._labels.run, name, piece, start == 0)
            server.load_adapter(adapter_name(version), str(self._folders[place] / ADAPTER_FOLDER))

        _results([self._pool.submit(load, place) for place in range(len(self._servers))])
        return sum(weight.nbytes for weight in weights.values())

    def _begin(self, pause: str, server: Server) -> None:
        _halt(server, pause)
        server.post("/update_weight_version", {"new_version": self._labels.updating})
        server.rpc("begin_update", self._labels.run)

    def _abandon(self, server: Server) -> None:
        """Mark the weights as lost, and abort what is sampled from them. Best effort."""
        with suppress(httpx2.HTTPError, RefusedError):
            if server.label() == self._labels.updating:
                server.post("/update_weight_version", {"new_version": self._labels.lost})
                _halt(server, "abort")

    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Send weights as files, gathering the next bucket while one is on its way. Returns the number of bytes."""
        total = 0
        calls: list[Future[None]] = []
        try:
            for bucket in buckets(((name, weight.cpu()) for name, weight in weights), bucket_bytes):
                total += sum(weight.nbytes for _, weight in bucket)
                _results(calls)
                calls = [
                    self._pool.submit(self._deliver, server, folder, bucket)
                    for server, folder in zip(self._servers, self._folders, strict=True)
                ]
        finally:  # nothing is on its way any more when the weights are labeled, as lost if reading them failed
            wait(calls)
        _results(calls)
        return total

    def _deliver(self, server: Server, folder: Path, bucket: Bucket) -> None:
        path = folder / f"{secrets.token_hex(8)}.safetensors"
        try:
            save_file(dict(bucket), path)
            server.post("/update_weights", {"update_info": {"path": str(path), "owner": self._labels.run}})
        finally:
            path.unlink(missing_ok=True)

    def _broadcast(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Send weights by NCCL. Returns the number of bytes."""
        assert self._broadcaster is not None
        total = 0
        for bucket in buckets(_on_gpu(weights), bucket_bytes):
            total += sum(weight.nbytes for _, weight in bucket)
            if not self.is_same(self._on_all(lambda server: server.describe())):
                raise SamplerLostError("a sampling server was restarted during an update.")
            announce = [partial(_collective, server, "/update_weights") for server in self._servers]
            self._broadcaster.send(bucket, announce, self._pool)
        return total

    def _on_all(self, call: Callable[[Server], T]) -> list[T]:
        return _results([self._pool.submit(call, server) for server in self._servers])

    def close(self) -> None:
        """Release the servers."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._pool.shutdown(wait=False)


def _halt(server: Server, mode: str) -> None:
    """Stop sampling: `keep` what is being sampled, or `abort` it. New requests wait until `/resume`.

    A sleep of level 0 does only that. `/pause` with `abort` does too in vLLM 0.32, but 0.33 then answers new requests
    with 503.
    """
    server.post("/sleep", params={"level": 0, "mode": mode})


def _join(server: Server, **group: Any) -> None:
    """Make a server's workers join the trainer's NCCL group."""
    server.post("/shutdown_weight_transfer_engine")
    _collective(server, "/init_weight_transfer_engine", {"init_info": init_info(**group)})


def _collective(server: Server, path: str, body: dict[str, Any]) -> None:
    """Make a server's workers take part in a call of NCCL."""
    try:
        server.post(path, body)
    except httpx2.TimeoutException as error:
        raise RuntimeError(
            f"the workers of the sampling server at {server.url} have waited {server.timeout:g} seconds for NCCL, "
            "which waits forever if another process has died. Stop the server and start it again."
        ) from error


def _results(calls: Sequence[Future[T]]) -> list[T]:
    """Wait for all calls; return their results, or raise the first error."""
    for call in calls:
        call.exception()
    return [call.result() for call in calls]


def _on_gpu(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, weight.cuda()) for name, weight in weights)


# NCCL: the trainer's rank 0 broadcasts weights to the workers of all servers. Needs GPUs at both ends.
#
# The communicator's id is sent over HTTP, because vLLM's alternative, a TCPStore, unpickles messages.

_PACK_BYTES = 256 << 20
_PACKS = 2
"""Size in bytes, and number, of the buffers that tensors are packed into; the same at both ends."""


def check_device() -> None:
    """Check that this machine has a CUDA GPU, which NCCL needs.

    Raises:
        ValueError: If there is none.
    """
    if not torch.cuda.is_available():
        raise ValueError("the server's --transfer is 'nccl', but this machine has no CUDA device; use --transfer file.")


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

        identity = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        world_size = 1 + sum(workers)
        joining = [
            pool.submit(
                one,
                unique_id=base64.b64encode(identity).decode(),
                rank_offset=1 + sum(workers[:index]),
                world_size=world_size,
            )
            for index, one in enumerate(join)
        ]
        _raise_first_failure(joining)
        self._close_lock = threading.Lock()
        self._group = uid_init_process_group(identity, 0, world_size, torch.cuda.current_device())
        for future in joining:
            future.result()

    def send(self, bucket: Bucket, announce: Sequence[Callable[[dict[str, Any]], Any]], pool: Executor) -> None:
        """Broadcast a bucket, and wait until all servers have loaded it.

        Args:
            bucket: Tensors on the GPU, in the servers' dtype.
            announce: Per server, a function that sends the body of `/update_weights`; returns when the server has
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
        announced = [pool.submit(one, {"update_info": described}) for one in announce]
        for future in announced:  # NCCL would wait for a failed server forever
            future.add_done_callback(lambda done: None if done.exception() is None else self.close())
        torch.cuda.current_stream().synchronize()  # the broadcast uses other streams
        try:
            packed_nccl_broadcast_producer(
                iterator=iter(bucket),
                group=self._group,
                src=0,
                post_iter_func=lambda item: item[1],
                buffer_size_bytes=_PACK_BYTES,
                num_buffers=_PACKS,
            )
        except RuntimeError:
            _raise_first_failure(announced)  # the cause of the abort
            raise
        _raise_first_failure(announced, None)  # if one server fails, the others may never return

    def close(self) -> None:
        """Leave the group, even during a broadcast. Idempotent."""
        with self._close_lock:
            self._group.destroy()


def _raise_first_failure(calls: Sequence[Future[Any]], seconds: float | None = 1.0) -> None:
    """Raise the first failure of a server, since NCCL would wait for it forever.

    Args:
        calls: The calls to all servers.
        seconds: How long to wait for a failure; None waits for all calls.
    """
    for future in wait(calls, timeout=seconds, return_when=FIRST_EXCEPTION).done:
        future.result()
