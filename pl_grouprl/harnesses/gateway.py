"""A local server between a harness and the sampling servers.

A harness sends its model's turns here. The gateway chooses a server, sets seeds and limits, and refuses tokens sampled
from other weights. It also hides the servers' access token from the harness.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.harnesses.requests import RoundRequests
from pl_grouprl.sync.sampler import SamplerLostError
from pl_grouprl.utilities.text import mask_secret

_EPISODE = "X-Session-ID"
"""Header with the name of an episode, the same in all its turns."""

_MAX_BODY = 256 << 20
"""Maximum size in bytes of a request."""

_DUE_TO_REQUEST = (400, 413, 422)
"""HTTP statuses that blame the request, not the server."""


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

        path = f"/{secrets.token_urlsafe(16)}"
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_get(f"{path}/v1/models", _no_models)
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
        """Refuse requests until the next round."""
        self._round_requests = self._failed = None

    async def versions(self) -> list[str]:
        """Version of the weights of each server.

        Raises:
            SamplerLostError: If a server does not answer.
            RuntimeError: If a server refuses.
        """
        return [str((await self._ask("GET", url, "/weight_info"))["weight_version"]) for url in self._urls]

    async def _generate(self, request: Any) -> Any:
        from aiohttp import web

        round_requests, failed = self._round_requests, self._failed
        if round_requests is None or failed is None or failed.done():
            return web.json_response(_error("no rollouts are being sampled"), status=409)
        episode = request.headers.get(_EPISODE, "")
        try:
            body = round_requests.request(episode, await request.json())
            answered = await self._ask("POST", self._url(episode), "/inference/v1/generate", body)
            return web.json_response(round_requests.answer(episode, body["token_ids"], answered))
        except ValueError as error:  # fails only this episode
            return web.json_response(_error(str(error)), status=400)
        except (RuntimeError, ArithmeticError) as error:
            if not failed.done():
                failed.set_exception(error)
            return web.json_response(_error(str(error)), status=409)

    def _url(self, episode: str) -> str:
        if episode not in self._server_of:
            load = Counter(self._server_of.values())
            self._server_of[episode] = min(range(len(self._urls)), key=lambda server: load[server])
        return self._urls[self._server_of[episode]]

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
        kind = ValueError if status in _DUE_TO_REQUEST else SamplerLostError if status >= 500 else RuntimeError
        reason = mask_secret(text, self._token)[:1000]
        raise kind(f"the sampling server at {url} answers {status} to {path}: {reason}")


async def _no_models(request: Any) -> Any:
    """List no models, so that clients find no prompt limit to enforce themselves."""
    from aiohttp import web

    return web.json_response({"data": []})


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error"}}
