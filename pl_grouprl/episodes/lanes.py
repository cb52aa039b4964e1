"""Lanes: threads that each run one operation at a time, and are replaced if it takes too long.

An environment belongs to one lane, because many libraries (SQLite, browsers) tie an object to the thread that made it.
Everything else runs on any free lane.
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

from pl_grouprl.episodes.operations import OperationTimeoutError
from pl_grouprl.utilities.progress import tick

MAX_BLOCKED_THREADS = 8
"""The run ends when this many threads hang in tools or environments."""


@dataclass(eq=False)
class Task:
    """An operation on a lane.

    Attributes:
        name: Name of the tool or environment, for errors.
        run: Called with the lane's executor.
        limit: Time limit in seconds; None is no limit.
        on_abandon: Called when it is abandoned, before the lane runs its next task.
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
    """Counts abandoned threads, and ends the run if there are too many."""

    def __init__(self) -> None:
        self._threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def add(self, thread: threading.Thread, what: str) -> None:
        """Add a thread that hangs in the tool or environment of that name.

        Raises:
            RuntimeError: If too many hang.
        """
        with self._lock:
            self._threads = {known for known in (*self._threads, thread) if known.is_alive()}
            count = len(self._threads)
        if count >= MAX_BLOCKED_THREADS:
            raise RuntimeError(
                f"{count} threads hang in tools or environments, the last one in {what!r}; set a time limit on "
                "what it waits for, or set tool_workers: a worker process that takes too long is killed."
            )


class _Lane:
    def __init__(self, executor: Any, lock: threading.RLock) -> None:
        self.executor = executor
        self.thread: threading.Thread | None = None
        self.tasks: deque[Task] = deque()
        self.task: Task | None = None
        self.changed = threading.Condition(lock)


class Lanes:
    """Runs tasks on lanes, whose threads start when they are needed.

    Args:
        executors: What each lane passes to the tasks that it runs, such as a worker process.
        name: Name of the threads.
    """

    def __init__(self, executors: Sequence[Any], name: str) -> None:
        self._lock = threading.RLock()
        self._lanes = [_Lane(executor, self._lock) for executor in executors]
        self._idle: list[_Lane] = []
        self._shared: deque[Task] = deque()
        self._name = name
        self._closed = False

    def __len__(self) -> int:
        return len(self._lanes)

    def submit(self, task: Task, number: int | None = None) -> None:
        """Run a task on a lane, after those submitted to it earlier; None picks any free lane."""
        with self._lock:
            if self._closed:
                raise RuntimeError("these lanes are closed; open the ToolRunner again.")
            if number is not None:
                lane: _Lane | None = self._lanes[number]
                self._lanes[number].tasks.append(task)
            else:
                lane = self._idle.pop() if self._idle else self._unstarted()
                self._shared.append(task)
            self._wake(lane)

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

    def close(self, *, wait_for_busy: bool) -> None:
        """Stop the threads.

        Args:
            wait_for_busy: Join busy threads too; otherwise each ends after its task.
        """
        with self._lock:
            self._closed = True
            for lane in self._lanes:
                lane.changed.notify()
            waiting = [task for tasks in (self._shared, *(lane.tasks for lane in self._lanes)) for task in tasks]
            threads = {
                lane.thread for lane in self._lanes if lane.thread is not None and (wait_for_busy or not lane.task)
            }
        for task in waiting:
            task.future.cancel()
            task.future.set_running_or_notify_cancel()  # wakes threads that wait for it
        if threading.current_thread() not in threads:  # the garbage collector may call this on any thread
            for thread in threads:
                thread.join()

    def _unstarted(self) -> _Lane | None:
        return next((lane for lane in self._lanes if lane.thread is None), None)

    def _wake(self, lane: _Lane | None) -> None:
        if lane is not None and lane.thread is None:
            lane.thread = threading.Thread(target=self._serve, args=(lane,), name=self._name, daemon=True)
            lane.thread.start()
        elif lane is not None:
            lane.changed.notify()

    def _serve(self, lane: _Lane) -> None:
        while (task := self._next(lane)) is not None:
            result, error = None, None
            try:
                result = task.run(lane.executor)
            except BaseException as raised:
                error = raised
            with self._lock:
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
        with self._lock:
            while not self._closed and lane.thread is threading.current_thread():
                waiting = lane.tasks or self._shared
                if not waiting:
                    self._idle.append(lane)
                    lane.changed.wait()
                    if lane in self._idle:
                        self._idle.remove(lane)
                    continue
                task = waiting.popleft()
                if task.future.set_running_or_notify_cancel():
                    lane.task, task.began = task, time.monotonic()
                    return task
            return None

    def _abandon(self, task: Task) -> threading.Thread | None:
        """Replace the thread of a task that is still running; returns the old thread."""
        with self._lock:
            lane = next((lane for lane in self._lanes if lane.task is task), None)
            if lane is None:  # it has just ended
                return None
            thread, lane.thread, lane.task = lane.thread, None, None
            if task.on_abandon is not None:
                task.on_abandon()
            self._wake(lane)
        task.future.set_exception(OperationTimeoutError(f"took longer than {task.limit} seconds", is_stuck=True))
        return thread
