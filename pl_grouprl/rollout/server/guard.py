"""Who may ask: the token, and the addresses that a server may listen on."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import Any

_OPEN = ("/health",)
"""Paths that need no token."""

Scope = dict[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class TokenGuard:
    """Lets requests through to an ASGI application that carry `Authorization: Bearer TOKEN`.

    Args:
        app: The application.
        token: The token, compared in constant time; None lets everything through.
    """

    def __init__(self, app: Application, token: str | None) -> None:
        self.app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer 401, or let the application answer."""
        if scope["type"] != "http" or self._expected is None or scope["path"] in _OPEN or self._may(scope):
            await self.app(scope, receive, send)
            return
        body = json.dumps({"error": "the token is missing or wrong; pass token=, or set PL_GROUPRL_TOKEN."}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"www-authenticate", b"Bearer"),
            (b"connection", b"close"),  # what it sends is not read
        ]
        await send({"type": "http.response.start", "status": 401, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _may(self, scope: Scope) -> bool:
        assert self._expected is not None
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def check_host(host: str, token: str | None) -> None:
    """Refuse to listen where other machines can ask, if there is no token.

    Raises:
        ValueError: If the host is not this machine's own, and there is no token.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"--host is {host}, where other machines can reach the server, and there is no token; pass --token or set "
            "PL_GROUPRL_TOKEN, or leave --host at 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
