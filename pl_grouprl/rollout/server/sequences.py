"""Samples the sequences of one prompt on one server, with a request for each."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx

from pl_grouprl.rollout.server.labels import Labels
from pl_grouprl.rollout.server.server import RefusedError, Server
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.rollout.vllm.requests import Completion
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.progress import tick

T = TypeVar("T")

_NOT_FINITE = -9999.0
"""Log-probability that vLLM reports in place of one that is not finite."""


class BrokenOffError(Exception):
    """A server broke off an answer."""


class BusyError(BrokenOffError):
    """A server is overloaded."""


@dataclass(frozen=True)
class PromptRequest:
    """A request for the sequences of a prompt.

    Attributes:
        bodies: Body of the call of `/inference/v1/generate` for each sequence.
        stop: Strings that end a sequence.
        labels: Labels of the run's weights.
        min_version: The oldest version that tokens may be sampled from.
    """

    bodies: Sequence[dict[str, Any]]
    stop: StopStrings
    labels: Labels
    min_version: int

    def check(self, label: str, server: Server) -> None:
        """Refuse weights that are lost, too old, or another trainer's; see `Labels.version`."""
        self.labels.version(label, self.min_version, server.url)


async def sample(http: httpx.AsyncClient, server: Server, request: PromptRequest) -> list[Rollout]:
    """Sample the sequences of a prompt concurrently.

    Raises:
        BrokenOffError: If the server breaks off an answer, or is overloaded.
        httpx.TransportError: If it cannot be reached.
        SamplerLostError: If it has lost its weights.
        WeightsMismatchError: If it has other weights.
        ValueError: If it refuses the request.
    """
    return await _all(_sequence(http, server, request, body) for body in request.bodies)


async def read_label(http: httpx.AsyncClient, server: Server) -> str:
    """The label of a server's weights."""
    return server.decode(await http.get("/weight_info", timeout=server.timeout))["weight_version"]


def decode(server: Server, response: httpx.Response) -> Any:
    """Decode an answer while rollouts are sampled.

    Raises:
        BusyError: If the server is overloaded.
        BrokenOffError: If it failed.
        ValueError: If it rejects the request as invalid.
        RefusedError: If it refuses for another reason.
    """
    try:
        return server.decode(response)
    except RefusedError as error:
        if error.is_busy:
            raise BusyError(str(error)) from error
        if error.status >= 500:
            raise BrokenOffError(str(error)) from error
        raise ValueError(str(error)) if error.status in (400, 422) else error from None


async def _sequence(http: httpx.AsyncClient, server: Server, request: PromptRequest, body: dict[str, Any]) -> Rollout:
    """Sample one sequence; start again if an update aborts it."""
    while True:
        completion, stopped, choice = Completion(request.stop), False, None
        named = {**body, "request_id": secrets.token_hex(8), "stream": bool(request.stop)}
        async for choice in _choices(http, server, named):
            reason = choice["finish_reason"]
            if not (stopped or reason == "abort"):
                stopped = completion.add(*_new_tokens(choice), reason)
                if stopped:  # vLLM then ends the sequence and reports its weights
                    name = f"generate-tokens-{named['request_id']}"
                    await http.post("/inference/v1/abort_requests", json={"request_ids": [name]})
        if choice is None or choice["finish_reason"] is None:
            raise BrokenOffError("the answer ended before its rollout did")
        if stopped or choice["finish_reason"] != "abort":
            return _rollout(server, request, completion, choice)
        label = decode(server, await http.get("/weight_info", timeout=server.timeout))["weight_version"]
        request.check(label, server)


async def _choices(http: httpx.AsyncClient, server: Server, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """The answer of vLLM, streamed in parts if there are stop strings to look for."""
    async with http.stream("POST", "/inference/v1/generate", json=body) as response:
        if not body["stream"] or response.status_code != 200:
            await response.aread()
            yield decode(server, response)["choices"][0]
            return
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                message = json.loads(line.removeprefix("data: "))
                if "error" in message:
                    raise BrokenOffError(str(message["error"])[:2000])
                for choice in message["choices"]:
                    yield choice


def _rollout(server: Server, request: PromptRequest, completion: Completion, last: dict[str, Any]) -> Rollout:
    rollout = completion.rollout()
    count = len(rollout.token_ids)
    rollout.weight_versions = request.labels.of_tokens(last["weight_versions"], count, request.min_version, server.url)
    tick(count)
    return rollout


def _new_tokens(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    content = (choice["logprobs"] or {}).get("content") or ()
    logprobs = (found["logprob"] for found in content)
    return choice["token_ids"] or [], [math.nan if value <= _NOT_FINITE else value for value in logprobs]


async def _all(parts: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all at once; if one fails, end the others before raising."""
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
