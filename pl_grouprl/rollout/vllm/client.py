"""The trainer's client of one sampling server.

`Server` is for everything but sampling; `sample` asks it for the sequences of one prompt, a request for each. `Labels`
reads and writes the labels that say which weights a server has.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

import httpx2
import numpy as np

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.rollout.engine import SamplerLostError, StopStrings
from pl_grouprl.rollout.vllm.access import check_token
from pl_grouprl.rollout.vllm.adapter import ADAPTER_PREFIX, adapter_name
from pl_grouprl.rollout.vllm.requests import NOT_FINITE, Completion
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import mask_secret

T = TypeVar("T")

FRESH = "default"
"""vLLM's label before any weights were sent."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Seconds between two attempts to reach a server."""

_TOO_MANY = 429
"""HTTP status of an overloaded server or proxy."""

_NO_SAMPLER = "this is not a sampling server; start one with python -m pl_grouprl.rollout.vllm."


@dataclass(frozen=True)
class Labels:
    """The labels of one run's weights on servers: `run:version`, `run:updating` or `run:lost`.

    Attributes:
        run: The run's id, the same on all ranks.
    """

    run: str

    def of(self, version: int) -> str:
        """Label of a version that was sent and verified."""
        return f"{self.run}:{version}"

    @property
    def updating(self) -> str:
        """Label during an update, when nothing is sampled."""
        return f"{self.run}:updating"

    @property
    def lost(self) -> str:
        """Label after a failed update."""
        return f"{self.run}:lost"

    def version(self, label: str, min_version: int, url: str) -> int | None:
        """The version of a label; None during an update of this run.

        Args:
            label: A server's label.
            min_version: The oldest version that is accepted.
            url: The server, for errors.

        Raises:
            SamplerLostError: If the server was restarted, or an update has failed.
            WeightsMismatchError: If the weights are another trainer's, or older than `min_version`.
        """
        found = f"the sampling server at {url} has weights {label!r}, not {self.of(min_version)!r}."
        if label in (FRESH, self.lost):
            raise SamplerLostError(f"{found} It was restarted, or has lost an update.")
        run, _, version = str(label).rpartition(":")
        if run != self.run:
            raise WeightsMismatchError(f"{found} Does another trainer use this server? Give each its own servers.")
        if label == self.updating:
            return None
        if not version.isdigit():
            raise WeightsMismatchError(f"{found} No version of this run is called that.")
        if int(version) < min_version:
            raise WeightsMismatchError(f"{found} They are older than those of this run.")
        return int(version)

    def of_tokens(self, spans: Iterable[Mapping[str, Any]] | None, count: int, min_version: int, url: str) -> list[int]:
        """The version of each token of a sequence.

        Args:
            spans: vLLM's `weight_versions`: `version`, `start` and `end` of consecutive tokens.
            count: Tokens of the sequence; further ones are ignored.
            min_version: See `version`.
            url: See `version`.

        Raises:
            SamplerLostError: See `version`.
            WeightsMismatchError: See `version`; also if the spans do not cover the tokens.
        """
        versions: list[int] = []
        for span in spans or ():
            version = self.version(span["version"], min_version, url)
            if version is None or span["start"] != len(versions):
                break
            versions += [version] * (span["end"] - span["start"])
        if len(versions) < count:
            raise WeightsMismatchError(
                f"the sampling server at {url} does not report which weights sampled its tokens."
            )
        return versions[:count]


class RefusedError(RuntimeError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        is_busy: Whether the server, or a proxy in front of it, is overloaded.
        names_model: Whether it lacks the model or adapter that the request names.
    """

    def __init__(self, url: str, status: int, reason: str, *, names_model: bool = False) -> None:
        self.status, self.names_model = status, names_model
        self.is_busy = status == _TOO_MANY
        super().__init__(f"the sampling server at {url} answers {status}: {reason[:2000]}")


class Server:
    """A client of one server; thread-safe. Calls are not retried.

    Args:
        url: `http://host:port`, or `https://...`.
        token: The server's token.
        timeout: Seconds that it may be unreachable, and the time limit of each call.

    Raises:
        ValueError: If the url or the token is malformed.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 300.0) -> None:
        parts = urlsplit(url)
        try:
            is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no port number
            is_valid = False
        if not is_valid or "@" in parts.netloc or parts.query or parts.fragment:
            scheme, divider, rest = url.rpartition("://")
            without_secrets = f"{scheme}{divider}{rest.rpartition('@')[2]}"
            raise ValueError(f"urls has {without_secrets!r}; it must be like http://127.0.0.1:8000.")
        check_token(token, "token")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.token = token
        self._host, self._scheme = parts.hostname, parts.scheme
        self._port = parts.port or {"http": 80, "https": 443}[parts.scheme]

    def post(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """Post to a route, with httpx2's `options`; return the decoded answer.

        Raises:
            RefusedError: If the server answers with an error.
            httpx2.TransportError: If it cannot be reached, or takes too long.
        """
        return self.decode(self._http.post(path, json=body, **options))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers (`rollout.vllm.worker.WeightReceiver`); return each worker's result."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)})
        return answer["results"] if answer else []

    def load_adapter(self, name: str, path: str) -> None:
        """Load an adapter from a folder of the server, and forget the names of earlier ones."""
        for model in self.decode(self._http.get("/v1/models"))["data"]:
            if model["id"].startswith(ADAPTER_PREFIX):
                self._act("/v1/unload_lora_adapter", {"lora_name": model["id"]})
        self._act("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})

    def _act(self, path: str, body: dict[str, Any]) -> None:
        """Post to a route that answers with a text."""
        answer = self._http.post(path, json=body)
        if answer.status_code != 200:
            self.decode(answer)

    def label(self) -> str:
        """The label of its weights."""
        return self.decode(self._http.get("/weight_info"))["weight_version"]

    def describe(self) -> dict[str, Any]:
        """The description of its first worker (`WeightReceiver.describe`), and the number of `workers`."""
        workers = self.rpc("describe")
        return {**workers[0], "workers": len(workers)}

    def wait(self) -> str:
        """Wait until the server can be reached. Returns the label of its weights.

        Raises:
            RefusedError: If it rejects the call, such as for a wrong token.
            RuntimeError: If it stays unreachable for longer than `timeout`.
        """
        reason: Exception | None = None
        for seconds in self.pauses():
            try:
                return self.label()
            except (httpx2.TransportError, RefusedError) as error:
                reason = self.temporary_or_raise(error)
                time.sleep(seconds)
        raise self.unreachable_error(reason)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait between attempts to reach the server, until `timeout` has passed."""
        wait, ends = _FIRST_WAIT, time.monotonic() + self.timeout
        while time.monotonic() + wait < ends:
            yield wait
            wait = min(2 * wait, _LONGEST_WAIT)

    def temporary_or_raise(self, error: Exception) -> Exception:
        """Return a temporary error (the server is unreachable, busy, starting or stopping); raise any other."""
        if isinstance(error, RefusedError) and error.status < 500 and not error.is_busy:
            raise error
        return error

    def unreachable_error(self, reason: Exception | None) -> RuntimeError:
        """The error to raise for a server that stays unreachable."""
        return RuntimeError(
            f"the sampling server at {self.url} did not come back within {self.timeout:g} seconds "
            f"({type(reason).__name__}: {reason}). Start it (python -m pl_grouprl.rollout.vllm --model ... "
            f"--host {self._host} --port {self._port}), or raise timeout."
        )

    def decode(self, response: httpx2.Response) -> Any:
        """Decode an answer.

        Raises:
            RefusedError: If it is an error, or not from a sampling server.
        """
        if response.status_code == 200:
            try:
                return response.json() if response.content else None
            except ValueError:
                raise RefusedError(self.url, 404, _NO_SAMPLER) from None
        reason, names_model = response.reason_phrase, False
        try:  # vLLM puts the reason into `error`, `error.message` or `detail`
            answer = response.json()
            found = answer.get("error") or answer.get("detail") or answer
            reason = str(found.get("message", found) if isinstance(found, dict) else found)
            names_model = response.status_code == 404 and found.get("param") == "model"
        except (ValueError, AttributeError):
            pass
        if response.status_code == 404 and not names_model:
            reason = _NO_SAMPLER
        raise RefusedError(self.url, response.status_code, mask_secret(reason, self.token), names_model=names_model)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of httpx2's clients: no proxies, and no keep-alive connections, which the server may have closed."""
        return {
            "base_url": self.url,
            "headers": {} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            "trust_env": False,
            "limits": httpx2.Limits(max_keepalive_connections=0),
            "verify": httpx2.create_ssl_context() if self._scheme == "https" else False,
        }

    @cached_property
    def _http(self) -> httpx2.Client:
        return httpx2.Client(timeout=self.timeout, **self.options)


# Sampling: a request for each sequence of a prompt.


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
        names_adapter: Whether to name the adapter of a version, rather than sample from the model itself.
        mixtures: Layers whose experts are recorded; None if none are.
    """

    bodies: Sequence[dict[str, Any]]
    stop: StopStrings
    labels: Labels
    min_version: int
    vocab_size: int
    names_adapter: bool = False
    mixtures: Sequence[int] | None = None


def decode(server: Server, response: httpx2.Response) -> Any:
    """Decode an answer while rollouts are sampled.

    Raises:
        BusyError: If the server is overloaded.
        BrokenOffError: If it failed.
        ValueError: If it rejects the request as invalid.
        RefusedError: If it rejects the call for another reason.
    """
    try:
        return server.decode(response)
    except RefusedError as error:
        if error.is_busy:
            raise BusyError(str(error)) from error
        if error.status >= 500:
            raise BrokenOffError(str(error)) from error
        raise ValueError(str(error)) if error.status in (400, 422) else error from None


async def sample(
    http: httpx2.AsyncClient, server: Server, request: PromptRequest, body: dict[str, Any], gate: asyncio.Semaphore
) -> Rollout:
    """Sample one sequence of a prompt; start again if an update aborts it.

    Args:
        http: Client of the server.
        server: The server.
        request: The request.
        body: One of its bodies.
        gate: Limits the sequences that the server samples at a time.

    Raises:
        BrokenOffError: If the server breaks off an answer, or is overloaded.
        httpx2.TransportError: If it cannot be reached.
        SamplerLostError: If it has lost its weights.
        WeightsMismatchError: If it has other weights.
        ValueError: If it refuses the request.
    """
    version = request.min_version
    while True:
        try:
            rollout = await _sample_once(http, server, request, body, gate, version)
            if rollout is not None:
                return rollout
            version = await _current_version(http, server, request)
        except RefusedError as error:
            if not error.names_model:
                raise
            unknown, version = version, await _current_version(http, server, request)
            if version == unknown:
                raise WeightsMismatchError(
                    f"the sampling server at {server.url} has weights of version {version}, but no adapter "
                    f"{adapter_name(version)!r}. Does another trainer use this server?"
                ) from error


async def _sample_once(
    http: httpx2.AsyncClient,
    server: Server,
    request: PromptRequest,
    body: dict[str, Any],
    gate: asyncio.Semaphore,
    version: int,
) -> Rollout | None:
    """See `sample`; returns None if an update came in between, after which the sequence must start again."""
    completion, stopped, part = Completion(request.stop), False, None
    named = {**body, "request_id": secrets.token_hex(8), "stream": bool(request.stop)}
    if request.names_adapter:
        named["model"] = adapter_name(version)
    async with gate, aclosing(_parts(http, server, request, named)) as parts:
        async for part in parts:
            completion.routed_experts = part.routed_experts
            if not (stopped or part.finish_reason == "abort"):
                stopped = completion.add(part.token_ids, part.logprobs, part.finish_reason)
                if stopped:  # vLLM then ends the sequence and reports its weights
                    name = f"generate-tokens-{named['request_id']}"
                    await http.post("/inference/v1/abort_requests", json={"request_ids": [name]})
    if part is None or part.finish_reason is None:
        raise BrokenOffError("the answer ended before its rollout did")
    if part.finish_reason == "abort" and not stopped:
        return None
    rollout = completion.rollout(len(body["token_ids"]), request.mixtures)
    count, limit = len(rollout.token_ids), body["sampling_params"]["max_tokens"]
    if count > limit:
        raise BrokenOffError(f"an answer of {count} tokens, where max_tokens is {limit}")
    versions = request.labels.of_tokens(part.spans, count, request.min_version, server.url)
    if request.names_adapter and set(versions) != {version}:  # named before an update, sampled after it
        return None
    rollout.weight_versions = versions
    tick(count)
    return rollout


async def _current_version(http: httpx2.AsyncClient, server: Server, request: PromptRequest) -> int:
    """The version of a server's weights, once no update is in progress."""
    while True:
        label = decode(server, await http.get("/weight_info", timeout=server.timeout))["weight_version"]
        version = request.labels.version(label, request.min_version, server.url)
        if version is not None:
            return version
        await asyncio.sleep(_FIRST_WAIT)


class _Part(NamedTuple):
    """A part of an answer; `spans` are vLLM's `weight_versions`. The last part has the experts, if any has."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str | None
    spans: Sequence[Mapping[str, Any]] | None
    routed_experts: np.ndarray | None


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
    logprobs = [math.nan if found["logprob"] <= NOT_FINITE else found["logprob"] for found in content]
    experts = choice.get("routed_experts")
    found = None if experts is None else np.load(io.BytesIO(base64.b64decode(experts)), allow_pickle=False)
    return _Part(token_ids, logprobs, choice["finish_reason"], choice.get("weight_versions"), found)


@contextmanager
def _as_broken_off() -> Iterator[None]:
    """Treat an answer that is not in vLLM's form as one that was broken off, by a proxy for example."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BrokenOffError(f"a malformed answer ({type(error).__name__}: {error})") from error


async def run_all(parts: Iterable[Awaitable[T]]) -> list[T]:
    """Run all at once; if one fails, end the others before raising."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Future[Any]]) -> None:
    """Cancel tasks, and wait until they have ended."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
