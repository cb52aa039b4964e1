"""Rollouts from several servers at once: one request per sequence, prompts shared between the servers."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import httpx

from pl_grouprl.rollout.server.labels import Labels
from pl_grouprl.rollout.server.server import RefusedError, Server
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.rollout.vllm.requests import Completion
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.progress import tick

T = TypeVar("T")

_HEARTBEAT = 5.0
"""Seconds between two looks at a server that samples."""

_SILENCE = (15.0, 60.0)
"""Bounds on the seconds after which a silent server counts as away: `timeout`, clamped to these. Only its engine may be
silent for longer, for `timeout`: the first rollouts may wait for a compiler."""

_BROKEN = 5
"""Give up after a server broke off rollouts this many times."""

_NOT_FINITE = -9999.0
"""The log-probability by which vLLM says NaN."""


class _BrokenError(Exception):
    """An answer that broke off."""


class Calls:
    """Coroutines that several threads run, each in an event loop of its own."""

    def __init__(self) -> None:
        self._running: set[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = set()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, even if this thread already runs an event loop.

        Raises:
            RuntimeError: If it was cancelled.
        """
        try:
            return self._in_another_thread(main) if _has_loop() else asyncio.run(self._noted(main))
        except asyncio.CancelledError:
            raise RuntimeError("the engine was closed while it sampled.") from None

    def _in_another_thread(self, main: Coroutine[Any, Any, T]) -> T:
        with ThreadPoolExecutor(1, thread_name_prefix="sampling-servers") as pool:
            call = pool.submit(asyncio.run, self._noted(main))
            try:
                return call.result()
            except KeyboardInterrupt:
                self.cancel()
                raise

    def cancel(self) -> None:
        """End all that are running."""
        for loop, task in list(self._running):
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

    async def _noted(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        call = asyncio.get_running_loop(), task
        self._running.add(call)
        try:
            return await main
        finally:
            self._running.discard(call)


def _has_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class Sampling:
    """The rollouts of one call of an engine.

    Args:
        servers: The servers; a free one takes the next prompt.
        at_once: Prompts that a server works on at a time.
        labels: Labels of the run's weights.
        least: The oldest version that rollouts may be sampled from.
        stop: Strings that end a sequence.
    """

    def __init__(
        self, servers: Sequence[Server], at_once: int, *, labels: Labels, least: int, stop: StopStrings
    ) -> None:
        self._servers, self._at_once = servers, at_once
        self._labels, self._least, self._stop = labels, least, stop
        self._found: dict[int, list[Rollout]] = {}

    async def groups(self, requests: Sequence[Sequence[dict[str, Any]]]) -> list[list[Rollout]]:
        """Sample.

        Args:
            requests: For each prompt, the body of `/inference/v1/generate` of each sequence.

        Raises:
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If it has other weights.
            RuntimeError: If it stays away, or breaks off again and again.
        """
        self._requests = requests
        self._waiting = deque(range(len(requests)))
        if requests:
            await _all(self._use(server) for server in self._servers)
        return [self._found[place] for place in range(len(requests))]

    async def _use(self, server: Server) -> None:
        """Sample with one server until no prompt is waiting. Prompts that it breaks off wait again."""
        at_once = min(self._at_once, -(-len(self._requests) // len(self._servers)))
        silence = min(max(server.timeout, _SILENCE[0]), _SILENCE[1])
        timeout = httpx.Timeout(silence, read=None)
        async with httpx.AsyncClient(timeout=timeout, **server.options) as http:
            for broken in range(1, _BROKEN + 1):
                self._check(server, await self._label(http, server))
                try:
                    await _until(
                        _all(self._work(http, server) for _ in range(at_once)),
                        self._watch(http, server, silence),
                        self._watch_label(http, server),
                    )
                    return
                except (_BrokenError, httpx.TransportError) as error:
                    if broken == _BROKEN:
                        raise RuntimeError(
                            f"the sampling server at {server.url} broke off a rollout {broken} times, most recently: "
                            f"{type(error).__name__}: {error}. See its log."
                        ) from error

    async def _work(self, http: httpx.AsyncClient, server: Server) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            try:
                self._found[place] = await _all(self._sequence(http, server, one) for one in self._requests[place])
            except BaseException:
                self._waiting.appendleft(place)
                raise

    async def _sequence(self, http: httpx.AsyncClient, server: Server, request: dict[str, Any]) -> Rollout:
        """Sample one sequence, again if an update aborts it."""
        while True:
            completion, stopped, choice = Completion(self._stop), False, None
            named = {**request, "request_id": secrets.token_hex(8)}
            async for choice in self._choices(http, server, named):
                reason = choice["finish_reason"]
                if not (stopped or reason == "abort"):
                    stopped = completion.add(*_new_tokens(choice), reason)
                    if stopped:  # vLLM ends the sequence, and says which weights it is from
                        name = f"generate-tokens-{named['request_id']}"
                        await http.post("/inference/v1/abort_requests", json={"request_ids": [name]})
            if choice is None or choice["finish_reason"] is None:
                raise _BrokenError("the answer ended before its rollout did")
            if stopped or choice["finish_reason"] != "abort":
                return self._rollout(server, completion, choice)
            self._check(server, await self._label(http, server))

    def _rollout(self, server: Server, completion: Completion, last: dict[str, Any]) -> Rollout:
        rollout = completion.rollout()
        count = len(rollout.token_ids)
        rollout.weight_versions = self._labels.of_tokens(last["weight_versions"], count, self._least, server.url)
        tick(count)
        return rollout

    async def _choices(
        self, http: httpx.AsyncClient, server: Server, request: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        """What vLLM answers, part by part if there are stop strings to look for."""
        body = {**request, "stream": bool(self._stop)}
        async with http.stream("POST", "/inference/v1/generate", json=body) as response:
            if not self._stop or response.status_code != 200:
                await response.aread()
                yield _parsed(server, response)["choices"][0]
                return
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    message = json.loads(line.removeprefix("data: "))
                    if "error" in message:
                        raise _BrokenError(str(message["error"])[:2000])
                    for choice in message["choices"]:
                        yield choice

    async def _watch(self, http: httpx.AsyncClient, server: Server, silence: float) -> None:
        """Ask the server now and then: rollouts may take long, but not without an answer to this."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            _parsed(server, await http.get("/health", timeout=silence))
            tick()

    async def _watch_label(self, http: httpx.AsyncClient, server: Server) -> None:
        """The same for its engine, and for the weights, which another trainer may change."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            response = await http.get("/weight_info", timeout=server.timeout)
            self._check(server, _parsed(server, response)["weight_version"])

    async def _label(self, http: httpx.AsyncClient, server: Server) -> str:
        """See `Server.wait`."""
        reason: Exception | None = None
        for seconds in server.pauses():
            try:
                return server.read(await http.get("/weight_info", timeout=server.timeout))["weight_version"]
            except (httpx.TransportError, RefusedError) as error:
                reason = server.passing(error)
                await asyncio.sleep(seconds)
        raise server.away(reason)

    def _check(self, server: Server, label: str) -> None:
        self._labels.version(label, self._least, server.url)


def _parsed(server: Server, response: httpx.Response) -> Any:
    """What an answer to a rollout says; a server that fails has broken it off."""
    try:
        return server.read(response)
    except RefusedError as error:
        if error.status >= 500:
            raise _BrokenError(str(error)) from error
        raise ValueError(str(error)) if error.status in (400, 422) else error from None


def _new_tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    content = (choice["logprobs"] or {}).get("content") or ()
    logprobs = (found["logprob"] for found in content)
    return choice["token_ids"] or [], [math.nan if value <= _NOT_FINITE else value for value in logprobs]


async def _all(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all; if one fails, end the others first."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until(*parts: Coroutine[Any, Any, Any]) -> None:
    """Run all until one ends or fails."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        done.pop().result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
