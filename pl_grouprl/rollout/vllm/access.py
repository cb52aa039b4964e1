"""Access to a server: its token, and the addresses it may listen on. vLLM loads `TokenAuth` as middleware."""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

TOKEN_VARIABLE = "PL_GROUPRL_TOKEN"  # noqa: S105 (a name, not a token)
"""Environment variable with the token, for server and engine."""

_OPEN = ("/health",)
"""Paths that need no token."""

Scope = dict[str, Any]
Application = Callable[[Scope, Any, Any], Awaitable[None]]


class TokenAuth:
    """Passes requests with `Authorization: Bearer TOKEN` to an ASGI application, and rejects others.

    The token is read from the environment variable PL_GROUPRL_TOKEN, and compared in constant time. Without a token,
    only requests whose Host and Origin (if present) are loopback names pass, so web pages are rejected, even with DNS
    rebinding.

    Args:
        app: The application.
    """

    def __init__(self, app: Application) -> None:
        self.app = app
        token = os.environ.get(TOKEN_VARIABLE)
        self._expected = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        """Answer 401 or 403, or let the application answer."""
        if scope["type"] == "lifespan" or scope["path"] in _OPEN or self._is_authorized(scope):
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif self._expected is None:
            error = "the server has no token, so requests must come from and go to 127.0.0.1 or localhost; set a token."
            await _refuse(send, 403, error)
        else:
            await _refuse(send, 401, f"the token is missing or wrong; pass token=, or set {TOKEN_VARIABLE}.")

    def _is_authorized(self, scope: Scope) -> bool:
        def given(name: bytes) -> list[bytes]:
            return [value for found, value in scope["headers"] if found == name]

        if self._expected is not None:
            tokens = given(b"authorization")
            return len(tokens) == 1 and hmac.compare_digest(tokens[0], self._expected)
        for address in [b"//" + host for host in given(b"host")] + given(b"origin"):
            try:
                host = urlsplit(address.decode("latin-1")).hostname or ""
            except ValueError:
                return False
            if not is_loopback(host):
                return False
        return True


async def _refuse(send: Any, status: int, error: str) -> None:
    """Answer without reading the request's body."""
    body = json.dumps({"error": error}).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *([(b"www-authenticate", b"Bearer")] if status == 401 else []),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def check_token(token: str | None, name: str) -> None:
    """Check that a token can be sent in a header.

    Args:
        token: The token, if there is one.
        name: The option that sets it.

    Raises:
        ValueError: If it is empty, has characters other than printable ASCII, or begins or ends with a blank.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ValueError(f"{name} is empty, or has characters not allowed in headers, or a blank at an end.")


def check_host(host: str, token: str | None) -> None:
    """Check that there is a token if other machines can connect.

    Raises:
        ValueError: If the host is not a loopback address, and there is no token.
    """
    if token is None and not is_loopback(host):
        raise ValueError(
            f"--host is {host}, where other machines can reach the server, and there is no token; pass --token or set "
            "PL_GROUPRL_TOKEN, or leave --host at 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or `localhost`, so that only this machine can reach it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
