"""Limits how much of a request's body is read, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any

from pl_grouprl.rollout.server.auth import Application, Scope, answer_and_close
from pl_grouprl.rollout.server.sampler import RefusalError

_BASE_SECONDS = 30.0
"""Seconds that a body of any size may take; `_MIN_RATE` adds to it."""

_MIN_RATE = 1 << 20
"""Bytes per second that a large body must average."""


class BodyLimit:
    """Lets an ASGI application read at most the request's Content-Length, within a time limit.

    Requests with a Transfer-Encoding are refused, because it overrides the Content-Length. If a body was not read to
    its end, the connection is closed after the response.

    Args:
        app: The application.
    """

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Refuse the request with 411, or pass it to the application."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif any(name == b"transfer-encoding" for name, _ in scope["headers"]):
            error = "the request has a Transfer-Encoding, which announces no length; send a Content-Length."
            await answer_and_close(send, 411, error)
        else:
            body = _Body(_content_length(scope), receive, send)
            await self.app(scope, body.receive, body.send)


class _Body:
    """The body of one request; `receive` and `send` are what the application calls."""

    def __init__(self, length: int, receive: Any, send: Any) -> None:
        self._length, self._receive, self._send = length, receive, send
        self._read = 0
        self._ended = length == 0
        self._deadline = asyncio.get_running_loop().time() + _BASE_SECONDS + length / _MIN_RATE

    async def receive(self) -> dict[str, Any]:
        if self._ended:  # only a disconnect can follow
            return await self._receive()
        try:
            left = self._deadline - asyncio.get_running_loop().time()
            message: dict[str, Any] = await asyncio.wait_for(self._receive(), left)
        except asyncio.TimeoutError:
            raise RefusalError(408, f"only {self._read} of the body's {self._length} bytes arrived in time.") from None
        self._read += len(message.get("body", b""))
        if self._read > self._length:
            raise RefusalError(413, f"the body has more than the {self._length} bytes that it announces.")
        self._ended = not message.get("more_body", False)
        return message

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start" and not self._ended:
            message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
        await self._send(message)


def _content_length(scope: Scope) -> int:
    """The Content-Length; 0 without one, since there is then no body."""
    return next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
