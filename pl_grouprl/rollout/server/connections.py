"""Limits the number of connections to the server, and the time that each may wait for its client."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 << 10
"""Maximum size of a request line with its headers."""

_REQUEST_SECONDS = 30.0
"""Time for a request's headers to arrive, from the opening of the connection or the previous response."""

_STALL_SECONDS = 60.0
"""Time that a client may leave a response unread."""


def max_connections() -> int:
    """Half of this process's open-file limit; models, logs and vLLM's connections need the rest."""
    try:
        import resource
    except ImportError:  # Windows
        return 256
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if files == resource.RLIM_INFINITY else max(16, files // 2)


class LimitedProtocol(H11Protocol):
    """uvicorn's h11 protocol, with limits on time and on the number of connections.

    h11 itself bounds headers and reads no further than the current request. A connection is aborted without a response
    if there are too many connections, if its headers do not arrive in time, or if its response is not read in time.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: Any) -> None:
        """Start waiting for a request."""
        super().connection_made(transport)
        if len(self.connections) > max_connections():
            transport.abort()
        else:
            self._set_timer("request", _REQUEST_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        for timer in self._timers.values():
            timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the client to read the end of the response."""
        super().on_response_complete()
        closing = self.transport.is_closing()
        self._set_timer("closing" if closing else "request", _STALL_SECONDS if closing else _REQUEST_SECONDS)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._set_timer("response", _STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop waiting: the client has read."""
        super().resume_writing()
        if "response" in self._timers:
            self._timers.pop("response").cancel()

    def _set_timer(self, what: str, seconds: float) -> None:
        """Start or restart a timer: waiting for a `request`, a `response` to be read, or the end of a `closing` one."""
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self.loop.call_later(seconds, self._abort_if_stalled, what)

    def _abort_if_stalled(self, what: str) -> None:
        is_responding = self.cycle is not None and not self.cycle.response_complete
        if not (what == "request" and is_responding):
            self.transport.abort()
