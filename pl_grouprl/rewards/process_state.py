"""Detects changes that a reward function makes to its process, undoes them where possible, and warns.

If the working directory changed, the run would write elsewhere; without its signal handlers, it would save no
checkpoint. In a worker, a leftover alarm would end a later call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pl_grouprl.utilities.exit_gate import exits_refused
from pl_grouprl.utilities.reaper import own_children

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_SIGNALS = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]

_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def left_as_found(name: str, *, children: bool) -> Iterator[None]:
    """`put_back` for a function in the training process, where `os._exit` is refused, too.

    Args:
        name: Name of the function.
        children: Whether to look for processes that it leaves running.
    """
    advice = "make it leave the process as it was, or run it in a worker process (reward_workers)"
    with put_back(name, advice, children=children), exits_refused():
        yield


@contextlib.contextmanager
def put_back(name: str, advice: str, *, children: bool = False) -> Iterator[None]:
    """Put back the working directory, signal handlers, alarm and resource limits after a function's calls.

    Changes of environment variables and processes left running are only reported. Warns once per function and kind of
    change.

    Args:
        name: Name of the function.
        advice: Remedy at the end of the warning.
        children: Whether to look for processes that it leaves running.
    """
    before = _State.now(children)
    try:
        yield
    finally:
        for what, detail in before.restore(children):
            if (name, what) not in _warned:
                _warned.add((name, what))
                log.warning("Reward function %r %s%s; %s.", name, what, detail, advice)


@dataclass(frozen=True)
class _State:
    directory: str
    environment: dict[str, str]
    handlers: dict[signal.Signals, Any]
    alarm: bool
    limits: dict[str, tuple[int, int]]
    children: set[int]

    @classmethod
    def now(cls, children: bool) -> _State:
        kinds = {} if resource is None else {v: name for name, v in vars(resource).items() if name[:7] == "RLIMIT_"}
        return cls(
            _directory(),
            dict(os.environ),
            {number: signal.getsignal(number) for number in _SIGNALS},
            bool(hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0]),
            {name: resource.getrlimit(kind) for kind, name in kinds.items()},
            own_children() if children else set(),
        )

    def restore(self, children: bool) -> Iterator[tuple[str, str]]:
        """Put back what can be, while iterated over; yields each kind of change and its details."""
        now = _State.now(children)
        if now.directory != self.directory:
            yield "changed the working directory", f" to {now.directory!r}{_return_to(self.directory)}"
        if names := [name for name in {**self.environment, **now.environment} if _differs(self, now, name)]:
            yield "changed the environment", f": {sorted(names)}"
        if threading.current_thread() is threading.main_thread():
            yield from self._restore_signals(now)
        if names := [name for name in self.limits if self.limits[name] != now.limits[name]]:
            yield "changed the limits of the process", f": {[self._restore_limit(name) for name in names]}"
        if left := now.children - self.children:
            yield "left processes", f": {sorted(left)}"

    def _restore_signals(self, now: _State) -> Iterator[tuple[str, str]]:
        if now.alarm and not self.alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            yield "left an alarm", " (cancelled)"
        changed = [number for number, handler in self.handlers.items() if handler != now.handlers[number]]
        for number in changed:
            if self.handlers[number] is not None:  # None: not installed from Python
                signal.signal(number, self.handlers[number])
        if changed:
            yield "changed signal handlers", f" of {[number.name for number in changed]} (put back)"

    def _restore_limit(self, name: str) -> str:
        kind, (soft, hard) = getattr(resource, name), self.limits[name]
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            return f"{name} is {resource.getrlimit(kind)}, not {(soft, hard)}"
        return f"{name} (put back)"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _return_to(directory: str) -> str:
    try:
        os.chdir(directory)
    except OSError as error:
        return f" (which cannot be put back: {error})"
    return " (put back)"


def _differs(before: _State, now: _State, name: str) -> bool:
    return before.environment.get(name) != now.environment.get(name)
