"""An event loop in a separate thread that can be abandoned if a task blocks it."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Collection, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""How long a task may take to end once it is cancelled; then it is abandoned."""

_label: contextvars.ContextVar[str] = contextvars.ContextVar("label", default="")


class BackgroundLoop:
    """An event loop in a daemon thread; it remembers the label of each task.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_task_factory(self._make_task)
        self._labels: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._blocked_by: str | None = None
        self._stopping = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def submit(self, label: str, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine. Tasks that it starts inherit its label."""
        context = contextvars.copy_context()
        context.run(_label.set, label)
        return context.run(asyncio.run_coroutine_threadsafe, coroutine, self._loop)

    def answers(self, seconds: float | None) -> bool:
        """Whether the loop responds within that time; False if it was abandoned."""
        if self._blocked_by is not None:
            return False
        answered = threading.Event()
        self._loop.call_soon_threadsafe(answered.set)
        return answered.wait(seconds)

    def abandon(self) -> str:
        """Give up the thread; returns the label of the task that blocks it, or "" if unknown.

        Once nothing blocks the thread, its tasks are cancelled and it ends.
        """
        if self._blocked_by is None:
            task = asyncio.current_task(self._loop)
            self._blocked_by = "" if task is None else self._labels.get(task, "")
            self._stop()
        return self._blocked_by

    def close(self, seconds: float | None = None) -> None:
        """Cancel all tasks and end the thread, waiting at most `seconds` for it; None waits without limit."""
        self._stop()
        if threading.current_thread() is not self.thread:  # garbage collection may call this on any thread
            self.thread.join(seconds)

    def _stop(self) -> None:
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **kwargs: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **kwargs)
        self._labels[task] = _label.get()
        return task

    def _run(self) -> None:
        while not self._stopping:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # raised by a task, they leave run_forever
                self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(_wait_for_all(tasks))
        self._loop.close()


async def _wait_for_all(tasks: Collection[asyncio.Task[Any]]) -> None:
    await asyncio.wait([asyncio.gather(*tasks, return_exceptions=True)], timeout=GRACE_SECONDS)


class OverTimeError(Exception):
    """A coroutine exceeded its time limit.

    Attributes:
        task: Its task, if it did not end when it was cancelled; else None.
    """

    def __init__(self, task: asyncio.Task[Any] | None) -> None:
        super().__init__(task)
        self.task = task


async def run_with_limit(coroutine: Coroutine[Any, Any, T], seconds: float | None) -> asyncio.Task[T]:
    """Await a coroutine, and return its finished task; cancel it if it takes too long, and abandon it if that fails.

    Raises:
        OverTimeError: If it took longer, even if it has a result by now, as a task that blocked the loop may.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    task = asyncio.ensure_future(coroutine)
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        task.cancel()
        raise
    if seconds is not None and (clock() - began > seconds or not task.done()):
        task.cancel()
        await asyncio.wait({task}, timeout=GRACE_SECONDS)
        raise OverTimeError(None if task.done() else task)
    return task
