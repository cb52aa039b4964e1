"""Lanes: threads that each run one operation at a time, and are replaced where one takes too long.

An environment belongs to one lane, because many libraries (SQLite, browsers) tie an object to the thread that made it.
What belongs to no environment runs on any lane that is free.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, field
from typing import Any

from pl_grouprl.utilities.progress import tick

MAX_BLOCKED_THREADS = 8
"""Number of threads hanging in tools or environments at which the run ends."""


class OperationError(RuntimeError):
    """An operation did not return; its text says what it did."""


class OperationTimeoutError(OperationError):
    """It took too long; it may still run if `is_stuck`."""

    def __init__(self, message: str, *, is_stuck: bool) -> None:
        super().__init__(message)
        self.is_stuck = is_stuck


class OperationCancelledError(OperationError):
    """It is async and raised `CancelledError`, though nothing had cancelled it."""


class OperationExitError(OperationError):
    """Its process ended."""


@dataclass(eq=False)
class Task:
    """An operation on a lane.

    Attributes:
        name: Of the tool or environment, for errors.
        run: What to run.
        limit: Seconds that it may take, from when it starts; None for any time.
        on_abandon: Called when it is abandoned, before the lane goes on.
        future: Its result.
        began: When it started, by `time.monotonic`.
    """

    name: str
    run: Callable[[Any], Any]
    limit: float | None = None
    on_abandon: Callable[[], None] | None = None
    future: Future[Any] = field(default_factory=Future)
    began: float | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until its limit at the earliest; infinity if it has none."""
        if self.limit is None:
            return math.inf
        return self.limit if self.began is None else self.began + self.limit - time.monotonic()


class HangingThreads:
    """Counts threads that were abandoned, and ends the run where there are too many."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def add(self, thread: threading.Thread, what: str) -> None:
        """Add a thread that hangs in the tool or environment of that name.

        Raises:
            RuntimeError: If too many hang.
        """
        self._threads = [known for known in (*self._threads, thread) if known.is_alive()]
        if len(self._threads) >= MAX_BLOCKED_THREADS:
            raise RuntimeError(
                f"{len(self._threads)} threads hang in tools or environments, the last one in {what!r}; give what it "
                "waits for a time limit, or set tool_workers: a worker process that takes too long is killed."
            )


class _Lane:
    def __init__(self, executor: Any) -> None:
        self.executor = executor
        self.thread: threading.Thread | None = None
        self.tasks: deque[Task] = deque()
        self.task: Task | None = None


class Lanes:
    """Runs tasks on lanes, whose threads start when they are needed.

    Args:
        executors: One per lane; tasks are called with it.
        name: Name of the threads.
    """

    def __init__(self, executors: Sequence[Any], name: str) -> None:
        self._lanes = [_Lane(executor) for executor in executors]
        self._shared: deque[Task] = deque()
        self._name = name
        self._changed = threading.Condition()
        self._idle = 0
        self._closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    def submit(self, task: Task, lane: int | None = None) -> Task:
        """Run a task on a lane, after those submitted to it earlier; on any that is free if `lane` is None."""
        with self._changed:
            if self._closed:
                raise RuntimeError("these lanes are closed; open the ToolRunner again.")
            if lane is None:
                self._shared.append(task)
                if self._idle < len(self._shared):
                    self._start(next((lane for lane in self._lanes if lane.thread is None), None))
            else:
                self._lanes[lane].tasks.append(task)
                self._start(self._lanes[lane])
            self._changed.notify_all()
        return task

    def wait(self, tasks: Sequence[Task], hanging: HangingThreads) -> None:
        """Wait until all tasks are done; abandon those that exceed their limits.

        Raises:
            RuntimeError: If too many threads hang.
        """
        pending = {task.future: task for task in tasks}
        try:
            while pending:
                left = min(task.seconds_left for task in pending.values())
                done, _ = wait_for_futures(pending, None if left == math.inf else max(left, 0.0))
                for future in done:
                    del pending[future]
                for task in [task for task in pending.values() if task.seconds_left <= 0]:
                    if thread := self._abandon(task):
                        hanging.add(thread, task.name)
        except BaseException:
            for future in pending:
                future.cancel()
            raise

    def close(self) -> None:
        """End the threads, except those that are busy: they end with their tasks."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            idle = [lane.thread for lane in self._lanes if lane.thread is not None and lane.task is None]
        for thread in idle:
            thread.join()

    def _start(self, lane: _Lane | None) -> None:
        if lane is not None and lane.thread is None:
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=self._name, daemon=True)
            lane.thread.start()

    def _serve(self, lane: _Lane) -> None:
        while (task := self._next(lane)) is not None:
            result, error = None, None
            try:
                result = task.run(lane.executor)
            except BaseException as raised:
                error = raised
            with self._changed:
                if lane.task is not task:  # it was abandoned
                    return
                lane.task = None
            tick()
            if error is None:
                task.future.set_result(result)
            else:
                task.future.set_exception(error)
            del task, result, error

    def _next(self, lane: _Lane) -> Task | None:
        with self._changed:
            while not self._closed and lane.thread is threading.current_thread():
                waiting = lane.tasks or self._shared
                if not waiting:
                    self._idle += 1
                    self._changed.wait()
                    self._idle -= 1
                    continue
                task = waiting.popleft()
                if task.future.set_running_or_notify_cancel():
                    lane.task, task.began = task, time.monotonic()
                    return task
            return None

    def _abandon(self, task: Task) -> threading.Thread | None:
        """Replace the thread of a task that still runs; returns that thread."""
        with self._changed:
            lane = next((lane for lane in self._lanes if lane.task is task), None)
            if lane is None:  # it has just ended
                return None
            thread, lane.thread, lane.task = lane.thread, None, None
            if task.on_abandon is not None:
                task.on_abandon()
            self._start(lane)
        task.future.set_exception(OperationTimeoutError(f"took longer than {task.limit} seconds", is_stuck=True))
        return thread
