"""Several servers used as one: they receive the same weights in parallel."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import httpx2
import torch
from safetensors.torch import save, save_file
from torch import Tensor

from pl_grouprl.rollout.server.labels import Labels
from pl_grouprl.rollout.server.server import RefusedError, Server
from pl_grouprl.sync.compare import check_weights
from pl_grouprl.sync.sampler import SamplerLostError, WeightsMismatchError
from pl_grouprl.sync.transfer import Bucket, buckets

if TYPE_CHECKING:
    from pl_grouprl.rollout.server.nccl import Broadcaster

T = TypeVar("T")

_SPARE = 64 << 20
"""Bytes to leave free in shared memory."""


class Fleet:
    """Servers that receive the same weights.

    Args:
        servers: The servers.
        infos: Description of each server (`Server.describe`).
        labels: Labels of the run's weights.

    Attributes:
        dtype: Dtype of their weights.
    """

    def __init__(self, servers: Sequence[Server], infos: Sequence[dict[str, Any]], labels: Labels) -> None:
        self._servers, self._labels = servers, labels
        self._instances = [info["instance"] for info in infos]
        self._folders = [info["folder"] for info in infos]
        self._pool = ThreadPoolExecutor(len(servers), thread_name_prefix="sampling-server")
        self.dtype: torch.dtype = getattr(torch, infos[0]["dtype"])
        self._workers = [info["workers"] for info in infos]
        self._broadcaster: Broadcaster | None = None
        self._by_nccl = infos[0]["backend"] == "nccl"
        if self._by_nccl:
            from pl_grouprl.rollout.server.nccl import check_device

            check_device()

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
    ) -> int:
        """Replace the weights of all servers, which sample again once the weights of all have been verified.

        A server is labelled as updating while its weights are incomplete, and stays paused if the update fails.

        Args:
            weights: Name and value of each, in the servers' dtype.
            version: Their version.
            checksums: The checksum of each; reading `weights` fills it in.
            bucket_bytes: Size of a bucket.
            pause: What to do with running sequences.

        Returns:
            Number of bytes sent.

        Raises:
            SamplerLostError: If a server was restarted or broke off.
            WeightsMismatchError: If a server loaded other weights, or another trainer uses it.
            RefusedError: If a server refuses a call.
        """
        try:
            with self._naming_cause():
                self._on_all(partial(self._begin, pause))
                if self._by_nccl:
                    self._connect()
                self._on_all(lambda server: server.post("/start_weight_update"))
                size = (self._broadcast if self._by_nccl else self._send)(weights, bucket_bytes)
                for server, workers in zip(self._servers, self._on_all(partial(_end, list(checksums))), strict=True):
                    _compare(server, checksums, workers)
                self._on_all(lambda server: self._resume(server, version))
        except BaseException:
            self._on_all(self._abandon)
            raise
        return size

    def _begin(self, pause: str, server: Server) -> None:
        server.post("/pause", params={"mode": pause, "clear_cache": False})
        server.post("/update_weight_version", {"new_version": self._labels.updating})
        server.rpc("begin_update", self._labels.run)

    def _connect(self) -> None:
        """Make the workers of all servers join the trainer's NCCL group, unless they have joined."""
        from pl_grouprl.rollout.server.nccl import Broadcaster

        if self._broadcaster is None:
            join = [partial(_join, server) for server in self._servers]
            self._broadcaster = Broadcaster(self._workers, join, self._pool)

    def _resume(self, server: Server, version: int) -> None:
        if server.label() != self._labels.updating:
            raise RefusedError(server.url, 409, "another trainer has begun an update")
        server.post("/update_weight_version", {"new_version": self._labels.of(version)})
        server.post("/resume")

    def _abandon(self, server: Server) -> None:
        """Mark the weights as lost, and abort what is sampled from them. Best effort."""
        with suppress(httpx2.HTTPError, RefusedError):
            if server.label() == self._labels.updating:
                server.post("/update_weight_version", {"new_version": self._labels.lost})
                server.post("/pause", params={"mode": "abort"})

    @contextmanager
    def _naming_cause(self) -> Iterator[None]:
        """Replace an error by its cause if a server was lost or another trainer uses it."""
        try:
            yield
        except httpx2.TransportError as error:
            raise SamplerLostError(
                f"a sampling server broke off an update ({type(error).__name__}: {error})."
            ) from error
        except (RefusedError, WeightsMismatchError):
            for server in self._servers:
                self._labels.version(server.wait(), 0, server.url)
            raise

    def _send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Send weights, gathering the next bucket while one is on its way. Returns the number of bytes."""
        total = 0
        calls: list[Future[None]] = []
        try:
            for bucket in buckets(((name, weight.cpu()) for name, weight in weights), bucket_bytes):
                total += sum(weight.nbytes for _, weight in bucket)
                _wait(calls)
                calls = [
                    self._pool.submit(self._deliver, server, folder, bucket)
                    for server, folder in zip(self._servers, self._folders, strict=True)
                ]
        finally:  # nothing is on its way any more when the weights are labelled, as lost if reading them failed
            wait(calls)
        _wait(calls)
        return total

    def _deliver(self, server: Server, folder: str | None, bucket: Bucket) -> None:
        """Send a bucket: through the server's folder if it is on this machine and has room, else in the message."""
        weights, owner = dict(bucket), self._labels.run
        if folder is None or not _has_room(folder, sum(weight.nbytes for weight in weights.values())):
            content = base64.b64encode(save(weights)).decode()
            server.post("/update_weights", {"update_info": {"safetensors": content, "owner": owner}})
            return
        path = Path(folder, f"{secrets.token_hex(8)}.safetensors")
        try:
            save_file(weights, path)
            server.post("/update_weights", {"update_info": {"path": str(path), "owner": owner}})
        finally:
            path.unlink(missing_ok=True)

    def _broadcast(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        assert self._broadcaster is not None
        total = 0
        for bucket in buckets(_on_gpu(weights), bucket_bytes):
            total += sum(weight.nbytes for _, weight in bucket)
            if not self.is_same(self._on_all(lambda server: server.describe())):
                raise SamplerLostError("a sampling server was restarted during an update.")
            announce = [partial(_receive, server) for server in self._servers]
            self._broadcaster.send(bucket, announce, self._pool)
        return total

    def _on_all(self, call: Callable[[Server], T]) -> list[T]:
        return _wait([self._pool.submit(call, server) for server in self._servers])

    def close(self) -> None:
        """Release the servers."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._pool.shutdown(wait=False)


def _end(names: list[str], server: Server) -> list[Any]:
    """Finish the update, drop what was computed from the old weights, and return each worker's checksums."""
    server.post("/finish_weight_update", {})
    server.rpc("refresh_stale_weights")
    if not server.post("/reset_prefix_cache", params={"reset_running_requests": True})["success"]:
        raise RefusedError(server.url, 500, "vLLM did not drop its prefix cache.")
    return server.rpc("weight_checksums", names)


def _compare(server: Server, checksums: dict[str, int], workers: list[Any]) -> None:
    try:
        check_weights(checksums, workers)
    except WeightsMismatchError as error:
        raise WeightsMismatchError(f"At {server.url}: {error}") from error


def _has_room(folder: str, size: int) -> bool:
    """Whether this machine has the server's folder, and room in it."""
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > size + _SPARE


def _join(server: Server, **group: Any) -> None:
    """Make a server's workers join the trainer's group."""
    from pl_grouprl.rollout.server.nccl import init_info

    server.post("/shutdown_weight_transfer_engine")
    _collective(server, "/init_weight_transfer_engine", {"init_info": init_info(**group)})


def _receive(server: Server, described: dict[str, Any]) -> None:
    """Make a server's workers receive a broadcast."""
    _collective(server, "/update_weights", {"update_info": described})


def _collective(server: Server, path: str, body: dict[str, Any]) -> None:
    try:
        server.post(path, body)
    except httpx2.TimeoutException as error:
        raise RuntimeError(
            f"the workers of the sampling server at {server.url} have waited {server.timeout:g} seconds for NCCL, "
            "which waits forever if another process has died. Stop the server and start it again."
        ) from error


def _wait(calls: Sequence[Future[T]]) -> list[T]:
    """Wait for all calls; return their results, or raise the first error."""
    for call in calls:
        call.exception()
    return [call.result() for call in calls]


def _on_gpu(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, weight.cuda()) for name, weight in weights)
