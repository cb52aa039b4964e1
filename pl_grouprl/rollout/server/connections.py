"""Limits on each connection to the server, and on their number."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MAX_HEADER_BYTES = 64 << 10
"""Maximum size of a request line with its headers."""

_REQUEST_SECONDS = 30.0
"""Time for a request's headers to arrive, from the opening of the connection or the last answer."""

_STALL_SECONDS = 60.0
"""Time that a client may leave an answer unread."""


def max_connections() -> int:
    """Half of this process's open-file limit; models, logs and vLLM's connections need the rest."""
    try:
        import resource
    except ImportError:  # Windows
        return 256
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 16 if files == resource.RLIM_INFINITY else max(16, files // 2)


class LimitedProtocol(H11Protocol):
    """HTTP by h11, which bounds headers and reads no further than the current request, with time and number limits.

    A connection is aborted without an answer if there are too many, if its headers do not arrive, or if its answer is
    not read.
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
        """Wait for the next request, or for the client to read the end of the answer."""
        super().on_response_complete()
        closing = self.transport.is_closing()
        self._set_timer("closing" if closing else "request", _STALL_SECONDS if closing else _REQUEST_SECONDS)

    def pause_writing(self) -> None:
        """Wait for the client to read."""
        super().pause_writing()
        self._set_timer("answer", _STALL_SECONDS)

    def resume_writing(self) -> None:
        """Stop waiting: the client has read."""
        super().resume_writing()
        if "answer" in self._timers:
            self._timers.pop("answer").cancel()

    def _set_timer(self, what: str, seconds: float) -> None:
        if what in self._timers:
            self._timers[what].cancel()
        self._timers[what] = self.loop.call_later(seconds, self._abort_if_stalled, what)

    def _abort_if_stalled(self, what: str) -> None:
        answering = self.cycle is not None and not self.cycle.response_complete
        if not (what == "request" and answering):
            self.transport.abort()
