"""Keeps user functions from ending the run with `os._exit`; after `os._exit(0)` the run would look finished."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import NoReturn


class _ExitGate:
    """Replaces `os._exit` while user functions run; counts them, since several threads may run one at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._real: Callable[[int], NoReturn] = os._exit

    def enter(self) -> None:
        with self._lock:
            if self._entered == 0:
                self._real, os._exit = os._exit, self._exit  # type: ignore[assignment]
            self._entered += 1

    def leave(self) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                os._exit = self._real  # type: ignore[assignment]

    def _exit(self, status: int) -> NoReturn:
        if _process.get() != os.getpid():  # another thread or a forked child may exit
            self._real(status)
        raise SystemExit(f"os._exit({status}), which would have ended the run")


_gate = _ExitGate()
_process: ContextVar[int] = ContextVar("process", default=0)


@contextlib.contextmanager
def exits_refused() -> Iterator[None]:
    """Turn `os._exit` into `SystemExit` inside this context, for this process and thread only."""
    token = _process.set(os.getpid())
    _gate.enter()
    try:
        yield
    finally:
        _gate.leave()
        _process.reset(token)
