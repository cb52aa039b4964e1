"""Several servers used as one: they receive the same weights in parallel, and share the prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pl_grouprl.rollout.server.client import RefusedError, ServerClient
from pl_grouprl.sync.transfer import Bucket, buckets

if TYPE_CHECKING:
    from pl_grouprl.rollout.server.nccl import Broadcaster

T = TypeVar("T")


def map_over_servers(ask: Callable[[int, int], T], tasks: int, servers: int, at_once: int) -> list[T]:
    """Distribute tasks over servers; a free server takes the next task.

    Args:
        ask: Runs a task on a server; takes the numbers of server and task. Called on several threads.
        tasks: Number of tasks.
        servers: Number of servers.
        at_once: Maximum number of tasks that one server works on at a time.

    Returns:
        What `ask` returned for each task, in order.

    Raises:
        Exception: The first that `ask` raises; tasks that have not begun are dropped.
    """
    waiting = deque(range(tasks))
    found: dict[int, T] = {}
    failed: list[Exception] = []

    def work(server: int) -> None:
        while not failed:
            try:
                task = waiting.popleft()
            except IndexError:
                return
            try:
                found[task] = ask(server, task)
            except Exception as error:
                failed.append(error)

    at_once = min(at_once, -(-tasks // servers))
    with ThreadPoolExecutor(max(1, servers * at_once), thread_name_prefix="sampling-server") as pool:
        try:
            wait([pool.submit(work, server) for _ in range(at_once) for server in range(servers)])
        except BaseException:  # Ctrl-C
            waiting.clear()
            raise
    if failed:
        raise failed[0]
    return [found[task] for task in range(tasks)]


class Fleet:
    """Servers that receive the same weights.

    Args:
        clients: One for each server.
        infos: Each server's `info`.
        transfer: `http` or `nccl`.

    Attributes:
        dtype: Dtype of their weights.
        updates: Each server's id of the current update.
    """

    def __init__(self, clients: Sequence[ServerClient], infos: Sequence[dict[str, Any]], transfer: str) -> None:
        self._clients = clients
        self._instances = [info["instance"] for info in infos]
        self._pool = ThreadPoolExecutor(len(clients), thread_name_prefix="sampling-server")
        self.dtype: torch.dtype = getattr(torch, infos[0]["model"]["dtype"])
        self.updates: list[str] = []
        self._broadcaster: Broadcaster | None = None
        if transfer == "nccl":
            from pl_grouprl.rollout.server.nccl import Broadcaster, check_device

            check_device()
            join = [client.connect for client in clients]
            self._broadcaster = Broadcaster([info["workers"] for info in infos], join, self._pool)

    def is_same(self, infos: Sequence[dict[str, Any]]) -> bool:
        """Whether the servers are still the same processes."""
        return [info["instance"] for info in infos] == self._instances

    def begin(self) -> None:
        """Begin an update on all."""
        self.updates = self._on_all(lambda server, client: client.begin_weights())

    def send(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        """Send weights, in the servers' dtype, to all. Returns their bytes.

        The next bucket is gathered while one is on its way.
        """
        if self._broadcaster is not None:
            return self._broadcast(weights, bucket_bytes)
        total = 0
        calls: list[Future[None]] = []
        for index, bucket in enumerate(buckets(_on_cpu(weights), bucket_bytes)):
            body = _serialized(bucket)
            total += sum(weight.nbytes for _, weight in bucket)
            _wait(calls)
            calls = self._send_bucket(index, body)
        _wait(calls)
        return total

    def end(self, version: int, names: list[str]) -> list[Any]:
        """Activate the weights; returns the checksums of each server's workers."""
        return self._on_all(lambda server, client: client.end_weights(self.updates[server], version, names))

    def abort(self) -> None:
        """Drop the update on every server that has it."""

        def drop(server: int, client: ServerClient) -> None:
            with suppress(OSError, RuntimeError):  # abort is best effort
                client.abort_weights(self.updates[server])

        self._on_all(drop)

    def close(self) -> None:
        """Release the servers."""
        if self._broadcaster is not None:
            self._broadcaster.close()
        self._pool.shutdown(wait=False)

    def _send_bucket(self, index: int, body: bytes) -> list[Future[None]]:
        return self._start(lambda server, client: client.send_bucket(self.updates[server], index, body))

    def _broadcast(self, weights: Iterable[tuple[str, Tensor]], bucket_bytes: int) -> int:
        assert self._broadcaster is not None
        total = 0
        for index, bucket in enumerate(buckets(_on_gpu(weights), bucket_bytes)):
            total += sum(weight.nbytes for _, weight in bucket)
            if not self.is_same(self._on_all(lambda server, client: client.info())):
                raise _restarted(self._clients[0])
            announce = [
                partial(client.announce, update, index)
                for client, update in zip(self._clients, self.updates, strict=True)
            ]
            self._broadcaster.send(bucket, announce, self._pool)
        return total

    def _start(self, call: Callable[[int, ServerClient], T]) -> list[Future[T]]:
        return [self._pool.submit(call, server, client) for server, client in enumerate(self._clients)]

    def _on_all(self, call: Callable[[int, ServerClient], T]) -> list[T]:
        return _wait(self._start(call))


def _wait(calls: Sequence[Future[T]]) -> list[T]:
    """Wait for all, then raise the first error."""
    for call in calls:
        call.exception()
    return [call.result() for call in calls]


def _on_cpu(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, weight.cpu()) for name, weight in weights)


def _on_gpu(weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    return ((name, weight.cuda()) for name, weight in weights)


def _serialized(bucket: Bucket) -> bytes:
    from safetensors.torch import save

    return save(dict(bucket))


def _restarted(client: ServerClient) -> RefusedError:
    return RefusedError(client.url, 409, {"error": "a server was restarted during an update.", "version": None})
