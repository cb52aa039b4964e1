"""Samples the sequences of one prompt on one server, with a request for each."""

from __future__ import annotations

import asyncio
import json
import math
import secrets
from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2

from pl_grouprl.rollout.server.labels import Labels
from pl_grouprl.rollout.server.server import RefusedError, Server
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.rollout.vllm.requests import Completion
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import mask_secret

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
        vocab_size: Size of the model's vocabulary.
    """

    bodies: Sequence[dict[str, Any]]
    stop: StopStrings
    labels: Labels
    min_version: int
    vocab_size: int

    def check(self, label: str, server: Server) -> None:
        """Refuse weights that are lost, too old, or another trainer's; see `Labels.version`."""
        self.labels.version(label, self.min_version, server.url)


async def sample(
    http: httpx2.AsyncClient, server: Server, request: PromptRequest, gate: asyncio.Semaphore
) -> list[Rollout]:
    """Sample the sequences of a prompt concurrently.

    Args:
        http: Client of the server.
        server: The server.
        request: The request.
        gate: Limits the sequences that the server samples at a time.

    Raises:
        BrokenOffError: If the server breaks off an answer, or is overloaded.
        httpx2.TransportError: If it cannot be reached.
        SamplerLostError: If it has lost its weights.
        WeightsMismatchError: If it has other weights.
        ValueError: If it refuses the request.
    """
    return await _all(_sequence(http, server, request, body, gate) for body in request.bodies)


async def read_label(http: httpx2.AsyncClient, server: Server) -> str:
    """The label of a server's weights."""
    return server.decode(await http.get("/weight_info", timeout=server.timeout))["weight_version"]


def decode(server: Server, response: httpx2.Response) -> Any:
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


@dataclass(frozen=True)
class _Part:
    """A part of an answer.

    Attributes:
        token_ids: New tokens.
        logprobs: The log-probability of each.
        finish_reason: Why the sequence has ended; None if it has not.
        spans: vLLM's `weight_versions`.
    """

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    spans: Sequence[Mapping[str, Any]] | None


async def _sequence(
    http: httpx2.AsyncClient, server: Server, request: PromptRequest, body: dict[str, Any], gate: asyncio.Semaphore
) -> Rollout:
    """Sample one sequence; start again if an update aborts it."""
    while True:
        completion, stopped, part = Completion(request.stop), False, None
        named = {**body, "request_id": secrets.token_hex(8), "stream": bool(request.stop)}
        async with gate, aclosing(_parts(http, server, request, named)) as parts:
            async for part in parts:
                if not (stopped or part.finish_reason == "abort"):
                    stopped = completion.add(part.token_ids, part.logprobs, part.finish_reason)
                    if stopped:  # vLLM then ends the sequence and reports its weights
                        name = f"generate-tokens-{named['request_id']}"
                        await http.post("/inference/v1/abort_requests", json={"request_ids": [name]})
        if part is None or part.finish_reason is None:
            raise BrokenOffError("the answer ended before its rollout did")
        if stopped or part.finish_reason != "abort":
            rollout = completion.rollout()
            return _checked(rollout, server, request, part, body["sampling_params"]["max_tokens"])
        label = decode(server, await http.get("/weight_info", timeout=server.timeout))["weight_version"]
        request.check(label, server)


async def _parts(
    http: httpx2.AsyncClient, server: Server, request: PromptRequest, body: dict[str, Any]
) -> AsyncGenerator[_Part, None]:
    """The answer of vLLM, streamed in parts if there are stop strings to look for."""
    async with http.stream("POST", "/inference/v1/generate", json=body) as response:
        if not body["stream"] or response.status_code != 200:
            await response.aread()
            answer = decode(server, response)
            with _as_broken_off():
                part = _read_part(answer["choices"][0], request.vocab_size)
            yield part
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            with _as_broken_off():
                message = json.loads(line.removeprefix("data: "))
                parts = [_read_part(choice, request.vocab_size) for choice in message.get("choices", ())]
            if "error" in message:
                raise BrokenOffError(mask_secret(str(message["error"]), server.token)[:2000])
            for part in parts:
                yield part


def _read_part(choice: Mapping[str, Any], vocab_size: int) -> _Part:
    token_ids = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    if [found["token_id"] for found in content] != token_ids:
        raise ValueError("its log-probabilities are not those of its tokens")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        raise ValueError(f"it has token ids from {min(token_ids)} to {max(token_ids)}, beyond vocab_size={vocab_size}")
    logprobs = [math.nan if found["logprob"] <= _NOT_FINITE else found["logprob"] for found in content]
    return _Part(token_ids, logprobs, choice["finish_reason"], choice.get("weight_versions"))


def _checked(rollout: Rollout, server: Server, request: PromptRequest, last: _Part, max_tokens: int) -> Rollout:
    """Check the length of a rollout, and set the versions of its weights."""
    count = len(rollout.token_ids)
    if count > max_tokens:
        raise BrokenOffError(f"an answer of {count} tokens, where max_tokens is {max_tokens}")
    rollout.weight_versions = request.labels.of_tokens(last.spans, count, request.min_version, server.url)
    tick(count)
    return rollout


@contextmanager
def _as_broken_off() -> Iterator[None]:
    """Treat an answer that is not in vLLM's form as one that was broken off, by a proxy for example."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokenOffError(f"a malformed answer ({type(error).__name__}: {error})") from error


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
