"""A pool of servers that samples for several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from pl_grouprl.rollout.server.distribution import Distribution
from pl_grouprl.rollout.server.sequences import PromptRequest
from pl_grouprl.rollout.server.server import Server
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.background_loop import BackgroundLoop


class ServerPool:
    """Samples on several servers; thread-safe. A background thread runs the event loop while there are calls.

    Args:
        servers: The servers.
        max_concurrent: Number of prompts that a server works on at a time.
    """

    def __init__(self, servers: Sequence[Server], max_concurrent: int) -> None:
        self._servers, self._max_concurrent = servers, max_concurrent
        self._lock = threading.Lock()
        self._running: tuple[BackgroundLoop, Distribution] | None = None
        self._calls: set[Future[Any]] = set()

    def sample(self, requests: Sequence[PromptRequest]) -> list[list[Rollout]]:
        """Sample each prompt's rollouts; other threads may call this at the same time.

        Raises:
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If a server has other weights.
            ValueError: If a server refuses a request.
            RuntimeError: If a server stays unreachable or keeps breaking off, or `cancel` was called.
        """
        if not requests:
            return []
        call = None
        try:
            call = self._begin(requests)
            return call.result()
        except CancelledError:
            raise RuntimeError("the engine was closed while it sampled.") from None
        finally:
            if call is not None:
                call.cancel()  # after an interruption
            self._stop_if_idle()

    def cancel(self) -> None:
        """Cancel all calls; each raises a RuntimeError."""
        with self._lock:
            for call in self._calls:
                call.cancel()

    def _begin(self, requests: Sequence[PromptRequest]) -> Future[list[list[Rollout]]]:
        with self._lock:
            if self._running is None:
                self._running = BackgroundLoop("sampling-servers"), Distribution(self._servers, self._max_concurrent)
            loop, distribution = self._running
            call = loop.submit("rollouts", distribution.sample(requests))
            self._calls.add(call)
            return call

    def _stop_if_idle(self) -> None:
        """Stop the loop if all calls have ended."""
        with self._lock:
            self._calls = {call for call in self._calls if not call.done()}
            if self._calls or self._running is None:
                return
            loop, _ = self._running
            self._running = None  # first, in case an interruption ends this method
        loop.close()
