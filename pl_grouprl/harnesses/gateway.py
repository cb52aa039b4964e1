"""A local server between an external harness and the sampling servers, and the stage on which the harness plays.

`Stage` runs an environment and its `Gateway` in the event loop of a thread. The harness sends its model's turns to the
gateway, which chooses a server and hides the servers' access token. `RoundRequests` translates requests and answers,
sets seeds and limits, and rejects tokens sampled from other weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import math
import os
import secrets
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.episodes.loop import EpisodeLimits, smallest
from pl_grouprl.rollout.engine import SamplerLostError
from pl_grouprl.rollout.vllm.client import FRESH
from pl_grouprl.rollout.vllm.requests import NOT_FINITE, check_temperature, sampling_options
from pl_grouprl.types import SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.processes import BackgroundLoop
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import mask_secret

_EPISODE = "X-Session-ID"
"""Header with the name of an episode, the same in all its turns."""

_MAX_BODY = 256 << 20
"""Maximum size in bytes of a request."""

MakeEnvironment = Callable[[str, str], Any]
"""Makes an environment (see `verifiers.Environment`) from the gateway's URL and the folder of the tokenizer."""


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

        async def serve() -> None:
            try:
                await self._gateway.start()
                self._environment = self._make_environment(self._gateway.base_url, self._folder.name)
                async with self._environment.serving():
                    ready.set()
                    await self._is_over.wait()
            finally:
                await self._gateway.close()

        self._serving = asyncio.create_task(serve())
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait([self._serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if self._serving.done():
            waiting.cancel()
            await self._serving

    def play(
        self, episodes: Sequence[tuple[str, int]], round_requests: RoundRequests, sampling: Mapping[str, Any]
    ) -> list[Any]:
        """Play episodes concurrently; return them in the order of `episodes`.

        Args:
            episodes: Task, as JSON, and seed of each.
            round_requests: Answers the harness's requests.
            sampling: What the environment records as the sampling options.

        Raises:
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If a server has other weights.
        """

        async def play() -> list[Any]:
            for version in await self._gateway.versions():
                check_version(version, round_requests.version)
            failed = self._gateway.begin(round_requests)
            playing = asyncio.gather(*(self._environment.play(*episode, sampling) for episode in episodes))
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

        return self._loop.submit("play", play()).result()

    def close(self) -> None:
        """Stop the environment and the gateway. Idempotent."""

        async def stop() -> None:
            self._is_over.set()
            with contextlib.suppress(Exception):  # raised by `_start` already
                await self._serving

        self._loop.submit("stop", stop()).result()
        self._folder.cleanup()


class Gateway:
    """Listens on a free local port; `start` and `close` it in the event loop that it serves in.

    Args:
        urls: URLs of the servers; an episode stays with one of them.
        token: The servers' token, if they have one.

    Attributes:
        base_url: URL for the harness's client, with a secret path that other programs on this machine do not know.
    """

    def __init__(self, urls: Sequence[str], token: str | None = None) -> None:
        self.base_url = ""
        self._urls = [url.rstrip("/") for url in urls]
        self._token = token
        self._round_requests: RoundRequests | None = None
        self._failed: asyncio.Future[Any] | None = None
        self._server_of: dict[str, int] = {}
        self._runner: Any = None
        self._client: Any = None

    async def start(self) -> None:
        """Start to listen."""
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        async def no_models(request: Any) -> Any:  # so that clients find no prompt limit to enforce themselves
            return web.json_response({"data": []})

        path = f"/{secrets.token_urlsafe(16)}"
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get(f"{path}/v1/models", no_models)
        app.router.add_post(f"{path}/inference/v1/generate", self._generate)
        # Turns may take any time: the environment's limits end them. Connections are not kept alive, because the server
        # might be about to close them.
        connector = TCPConnector(limit=0, force_close=True)
        self._client = ClientSession(timeout=ClientTimeout(None, sock_connect=30), connector=connector)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}{path}/v1"

    async def close(self) -> None:
        """Stop listening. Idempotent."""
        for part in (self._runner and self._runner.cleanup(), self._client and self._client.close()):
            if part is not None:
                await part
        self._runner = self._client = None

    def begin(self, round_requests: RoundRequests) -> asyncio.Future[Any]:
        """Serve a round of episodes; the returned future gets the error that makes all its rollouts unusable."""
        self._round_requests, self._server_of = round_requests, {}
        self._failed = asyncio.get_running_loop().create_future()
        return self._failed

    def end(self) -> None:
        """Reject requests until the next round."""
        self._round_requests = self._failed = None

    async def versions(self) -> list[str]:
        """Version of the weights of each server.

        Raises:
            SamplerLostError: If a server does not answer.
            RuntimeError: If a server refuses.
        """
        return [str((await self._ask("GET", url, "/weight_info"))["weight_version"]) for url in self._urls]

    async def _generate(self, request: Any) -> Any:
        """Answer one turn of an episode, by the server that the episode stays with."""
        from aiohttp import web

        def refuse(status: int, message: str) -> Any:
            return web.json_response({"error": {"message": message, "type": "invalid_request_error"}}, status=status)

        round_requests, failed = self._round_requests, self._failed
        if round_requests is None or failed is None or failed.done():
            return refuse(409, "no rollouts are being sampled")
        episode = request.headers.get(_EPISODE, "")
        try:
            body = round_requests.request(episode, await request.json())
            if episode not in self._server_of:
                load = Counter(self._server_of.values())
                self._server_of[episode] = min(range(len(self._urls)), key=lambda server: load[server])
            url = self._urls[self._server_of[episode]]
            answered = await self._ask("POST", url, "/inference/v1/generate", body)
            return web.json_response(round_requests.answer(episode, body["token_ids"], answered))
        except ValueError as error:  # fails only this episode
            return refuse(400, str(error))
        except (RuntimeError, ArithmeticError) as error:
            if not failed.done():
                failed.set_exception(error)
            return refuse(409, str(error))

    async def _ask(self, method: str, url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        from aiohttp import ClientError

        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        try:
            async with self._client.request(method, url + path, json=body, headers=headers) as response:
                status, text = response.status, await response.text()
        except (ClientError, OSError) as error:
            raise SamplerLostError(f"the sampling server at {url} does not answer: {error!r}") from error
        if status == 200:
            return json.loads(text)
        is_due_to_request = status in (400, 413, 422)
        kind = ValueError if is_due_to_request else SamplerLostError if status >= 500 else RuntimeError
        reason = mask_secret(text, self._token)[:1000]
        raise kind(f"the sampling server at {url} answers {status} to {path}: {reason}")


@dataclass
class _Usage:
    """The tokens of an episode so far.

    Attributes:
        first_length: Length of the first prompt.
        written: Number of tokens that the model wrote.
        ran_out: Whether a request was rejected for lack of room.
    """

    first_length: int
    written: int = 0
    ran_out: bool = False


@dataclass
class RoundRequests:
    """The requests of one round of episodes.

    Attributes:
        sampling: How the run samples.
        version: Version of the weights that must sample all tokens.
        limits: Limits on an episode, besides `sampling.max_new_tokens`.
        max_model_len: Longest sequence that model and server take, prompt included; no limit if None.
        end_ids: Tokens that end a turn, in addition to the harness's.
        never: Tokens that are never sampled.
        vocab_size: Size of the vocabulary: larger token ids would crash the server. None if unknown.
        model: Name of the adapter to sample with; None for the server's own model.
    """

    sampling: SamplingConfig
    version: str
    limits: EpisodeLimits
    max_model_len: int | None = None
    end_ids: Sequence[int] = ()
    never: Sequence[int] = ()
    vocab_size: int | None = None
    model: str | None = None
    _usage: dict[str, _Usage] = field(default_factory=dict)
    _asked: Counter[tuple[int, bytes]] = field(default_factory=Counter)
    _exchanges: set[bytes] = field(default_factory=set)

    def request(self, episode: str, asked: Mapping[str, Any]) -> dict[str, Any]:
        """Translate a request of the harness into the one to send to the server.

        Args:
            episode: Name of the episode.
            asked: The body of a request to `/inference/v1/generate`; its `sampling_params` hold the rollout's `seed`.

        Raises:
            ValueError: If the episode has no room for another token, or the request has images, or tokens that the
                model does not have.
        """
        token_ids = list(asked.get("token_ids") or [])
        size, length = self.vocab_size or math.inf, len(token_ids)
        if asked.get("features") or asked.get("content_parts"):
            raise ValueError("the harness sent images or other media, but only text can be trained")
        if not token_ids or min(token_ids) < 0 or max(token_ids) >= size:
            raise ValueError(
                f"the harness sent {length} token ids, the largest {max(token_ids, default=None)}, but the model has "
                f"vocab_size={self.vocab_size}; use the tokenizer that belongs to the model"
            )
        usage, max_episode = self._usage.setdefault(episode, _Usage(length)), self.limits.max_tokens
        room = smallest(
            self.sampling.max_new_tokens - usage.written,
            self.limits.max_turn_tokens,
            None if self.max_model_len is None else self.max_model_len - length,
            None if max_episode is None else usage.first_length + max_episode - length,
        )
        assert room is not None
        if room < 1:
            usage.ran_out = True
            raise ValueError(f"the run's limits leave the episode no room for a token after {length}")
        params = asked["sampling_params"]
        # With the rollout's seed alone, all its turns would get the same random numbers.
        read = digest(token_ids)
        self._asked[params["seed"], read] += 1
        seed = derive_seed(params["seed"], read.hex(), self._asked[params["seed"], read])
        end_ids = sorted(token for token in {*self.end_ids, *params.get("stop_token_ids", ())} if token < size)
        limited = replace(self.sampling, max_new_tokens=room)
        sent = sampling_options(limited, end_ids=end_ids, never=self.never, seed=seed)
        return {"token_ids": token_ids, "sampling_params": sent} | ({"model": self.model} if self.model else {})

    def answer(self, episode: str, token_ids: Sequence[int], answered: Mapping[str, Any]) -> dict[str, Any]:
        """The server's answer in the form that the library `renderers` reads.

        Args:
            episode: Name of the episode.
            token_ids: The tokens that were sent.
            answered: The server's answer.

        Raises:
            SamplerLostError: If the server has lost its weights, or broke off the turn.
            WeightsMismatchError: If other weights sampled some of the tokens.
            FloatingPointError: If the model's logits are not finite.
        """
        (choice,) = answered["choices"]
        for span in choice["weight_versions"] or ():
            check_version(span["version"], self.version)
        if choice["finish_reason"] not in ("stop", "length"):
            raise SamplerLostError(f"the server ended a turn with finish reason {choice['finish_reason']!r}.")
        if not choice["weight_versions"]:
            raise WeightsMismatchError("the server does not report which weights sampled its tokens.")
        written = choice["token_ids"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if not all(value is not None and NOT_FINITE < value < math.inf for value in logprobs):  # false for NaN
            raise FloatingPointError("the model's logits are not finite in vLLM; check its weights and dtype.")
        tick(len(written))
        self._usage[episode].written += len(written)
        self._exchanges.add(digest([*token_ids, *written]))
        content = [
            {"token": f"token_id:{token}", "logprob": value, "top_logprobs": []}
            for token, value in zip(written, logprobs, strict=True)
        ]
        choices = [{**choice, "logprobs": {"content": content}}]
        return {"request_id": answered.get("request_id", ""), "choices": choices}

    def ran_out(self, episode: str) -> bool:
        """Whether a request of the episode was rejected because it had no room."""
        return episode in self._usage and self._usage[episode].ran_out

    def was_sampled(self, token_ids: Sequence[int]) -> bool:
        """Whether the tokens are exactly what the model read and wrote in one of the requests."""
        return digest(token_ids) in self._exchanges


def digest(token_ids: Sequence[int]) -> bytes:
    """Hash of token ids."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=16).digest()


def check_version(found: str, expected: str) -> None:
    """Check that a server has the expected weights.

    Raises:
        SamplerLostError: If the server has no weights, or others of this run (after a failed update).
        WeightsMismatchError: If it has weights of another run.
    """
    if found != expected:
        is_lost = found == FRESH or found.startswith(f"{expected.rpartition(':')[0]}:")
        kind = SamplerLostError if is_lost else WeightsMismatchError  # of another trainer
        raise kind(f"the server has weights {found!r}, but {expected!r} is expected.")


def check_sampling(sampling: SamplingConfig) -> None:
    """Check that sampling options can be passed on to a harness's turns.

    Raises:
        ValueError: Names the option and the remedy.
    """
    check_temperature(sampling)
    if sampling.stop:
        raise ValueError(f"SamplingConfig.stop is {list(sampling.stop)} together with a harness; use stop_token_ids.")
