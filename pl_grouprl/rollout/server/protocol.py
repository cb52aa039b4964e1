"""Constants that client and server share."""

from __future__ import annotations

TOKEN_VARIABLE = "PL_GROUPRL_TOKEN"  # noqa: S105 (a name, not a token)
"""Environment variable with the token, for server and engine."""

MAX_JSON = 256 << 20
"""Maximum size in bytes of a request or answer in JSON."""

HEARTBEAT = 5.0
"""Seconds between heartbeats (blank lines) in a streamed answer while no rollout finishes."""
