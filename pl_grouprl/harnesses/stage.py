"""Runs the episodes of an external harness: an environment and its gateway, in the event loop of a thread."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pl_grouprl.harnesses.gateway import Gateway
from pl_grouprl.harnesses.requests import RoundRequests, check_version
from pl_grouprl.utilities.background_loop import BackgroundLoop

MakeEnvironment = Callable[[str, str], Any]
"""Makes an environment (see `library.Environment`) from the gateway's URL and the folder of the tokenizer."""


@functools.cache
def loop_of_process(process_id: int) -> BackgroundLoop:
    """The event loop that all stages of a process share, because the library renderers has a lock bound to one loop."""
    return BackgroundLoop("harness")


class Stage:
    """Plays episodes until it is closed.

    Args:
        urls: URLs of the sampling servers.
        token: Their token.
        tokenizer: The policy's tokenizer, of which the harness loads a copy.
        make_environment: Makes the environment.
    """

    def __init__(
        self, urls: Sequence[str], token: str | None, tokenizer: Any, make_environment: MakeEnvironment
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pl_grouprl_tokenizer_")
        tokenizer.save_pretrained(self._folder.name)
        self._gateway = Gateway(urls, token)
        self._make_environment = make_environment
        self._environment: Any = None
        self._is_over = asyncio.Event()
        self._loop = loop_of_process(os.getpid())
        try:
            self._loop.submit("start", self._start()).result()
        except BaseException:
            self.close()
            raise

    async def _start(self) -> None:
        """Start to serve in a separate task, because the task that opens the environment must also close it."""
        ready = asyncio.Event()
        self._serving = asyncio.create_task(self._serve(ready))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            waiting.cancel()
            await self._serving

    async def _serve(self, ready: asyncio.Event) -> None:
        try:
            await self._gateway.start()
            self._environment = self._make_environment(self._gateway.base_url, self._folder.name)
            async with self._environment.serving():
                ready.set()
                await self._is_over.wait()
        finally:
            await self._gateway.close()

    def play(self, episodes: Sequence[Any], round_requests: RoundRequests, sampling: Mapping[str, Any]) -> list[Any]:
        """Play episodes concurrently; return them in the order of `episodes`.

        Args:
            episodes: The episodes to play.
            round_requests: Answers the harness's requests.
            sampling: What the environment records as the sampling options.

        Raises:
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If a server has other weights.
        """
        return self._loop.submit("play", self._play(episodes, round_requests, sampling)).result()

    async def _play(
        self, episodes: Sequence[Any], round_requests: RoundRequests, sampling: Mapping[str, Any]
    ) -> list[Any]:
        for version in await self._gateway.versions():
            check_version(version, round_requests.version)
        failed = self._gateway.begin(round_requests)
        playing = asyncio.gather(*(self._environment.play(episode, sampling) for episode in episodes))
        try:
            both: list[asyncio.Future[Any]] = [playing, failed]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            return failed.result() if failed.done() else playing.result()
        finally:
            self._gateway.end()
            playing.cancel()
            failed.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await playing

    def close(self) -> None:
        """Stop the environment and the gateway. Idempotent."""
        self._loop.submit("stop", self._stop()).result()
        self._folder.cleanup()

    async def _stop(self) -> None:
        self._is_over.set()
        with contextlib.suppress(Exception):  # raised by `_start` already
            await self._serving
