"""What client and server share."""

from __future__ import annotations

TOKEN_VARIABLE = "PL_GROUPRL_TOKEN"  # noqa: S105 (a name, not a token)
"""Environment variable with the token, for server and engine."""

MAX_JSON = 256 << 20
"""Maximum size in bytes of a request or answer in JSON."""

HEARTBEAT = 5.0
"""Seconds between heartbeats (blank lines) in a streamed answer while no rollout finishes."""


def check_token(token: str | None, name: str) -> None:
    """Refuse a token that cannot be sent in a header.

    Args:
        token: The token, if there is one.
        name: The option that sets it.

    Raises:
        ValueError: If it is empty, or has other characters than printable ASCII, or blanks around it.
    """
    if token is not None and not (token.isascii() and token.isprintable() and token.strip() == token != ""):
        raise ValueError(f"{name} has characters not allowed in headers; use printable ASCII without blanks.")
