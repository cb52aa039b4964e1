"""Authentication: the token, and the addresses that a server may listen on."""

from __future__ import annotations

import hmac
import ipaddress
import json
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

_OPEN = ("/health",)
"""Paths that need no token."""

Scope = dict[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class TokenAuth:
    """Passes requests with `Authorization: Bearer TOKEN` to an ASGI application, and refuses others.

    Args:
        app: The application.
        token: The token, compared in constant time. None passes every request whose Host is a loopback name, which
            rules out web pages, even with DNS rebinding.
    """

    def __init__(self, app: Application, token: str | None) -> None:
        self.app = app
        self._expected = None if token is None else f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer 401 or 403, or let the application answer."""
        if scope["type"] != "http" or scope["path"] in _OPEN or self._is_authorized(scope):
            await self.app(scope, receive, send)
            return
        status, error = 401, "the token is missing or wrong; pass token=, or set PL_GROUPRL_TOKEN."
        if self._expected is None:
            status, error = 403, "the server has no token, so requests must go to 127.0.0.1 or localhost; set a token."
        await answer_and_close(send, status, error)

    def _is_authorized(self, scope: Scope) -> bool:
        if self._expected is None:
            return all(_is_loopback(_hostname(value)) for name, value in scope["headers"] if name == b"host")
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


async def answer_and_close(send: Any, status: int, error: str) -> None:
    """Refuse a request without reading its body."""
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b"Bearer")] if status == 401 else []),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def check_host(host: str, token: str | None) -> None:
    """Refuse to listen where other machines can connect, if there is no token.

    Raises:
        ValueError: If the host is not a loopback address, and there is no token.
    """
    if token is None and not _is_loopback(host):
        raise ValueError(
            f"--host is {host}, where other machines can reach the server, and there is no token; pass --token or set "
            "PL_GROUPRL_TOKEN, or leave --host at 127.0.0.1."
        )


def _hostname(header: bytes) -> str:
    try:
        return urlsplit(f"//{header.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
