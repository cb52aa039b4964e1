"""Constants that client and server share."""

from __future__ import annotations

TOKEN_VARIABLE = "PL_GROUPRL_TOKEN"  # noqa: S105 (its name, not a token)
"""Environment variable that holds the token, for the server and for the engine."""

MAX_JSON = 256 << 20
"""Maximum size in bytes of a request or answer in JSON."""

HEARTBEAT = 5.0
"""Seconds between the blank lines that keep a streamed answer alive while no rollout finishes."""
