"""Runs the tools and environments of episodes, concurrently and with time limits."""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import json
import logging
import math
import os
import pickle
import threading
import time
import traceback
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import wait as wait_for_futures
from contextlib import nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from types import NoneType
from typing import Any, TypeVar, get_args

from pl_grouprl.episodes.tools import (
    COLUMN,
    EnvironmentHost,
    EnvironmentKind,
    FailureKind,
    Method,
    Tool,
    ToolCall,
    ToolResult,
    check_names,
    describe_row,
    kind_of_row,
    named_factories,
    prepare_tools,
    run_coroutine,
)
from pl_grouprl.utilities.processes import (
    GRACE_SECONDS,
    BackgroundLoop,
    OverTimeError,
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    check_process_groups,
    lead_session,
    run_with_limit,
)
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import describe_error

# Operations on tools and environments, and the errors of those that do not return.


class OperationError(RuntimeError):
    """An operation did not return; the message continues a sentence that begins with its name."""


class OperationTimeoutError(OperationError):
    """It took too long; if `is_stuck`, it may still be running."""

    def __init__(self, message: str, *, is_stuck: bool) -> None:
        super().__init__(message)
        self.is_stuck = is_stuck


class OperationCancelledError(OperationError):
    """It is async and raised `CancelledError`, though nothing had cancelled it."""


class OperationExitError(OperationError):
    """Its process ended."""


@dataclass(frozen=True)
class Operation:
    """A call of a method of `EnvironmentHost`.

    Attributes:
        name: Name of the tool or environment, for errors.
        method: Name of the method.
        arguments: Its arguments.
        limit: Time limit in seconds; None is no limit.
        is_async: Whether it calls an async function, so that it needs an event loop.
        number: Number of the episode's environment, if any; sync operations with the same number run in order.
        uses_environment: Whether it uses that environment, which is dropped if the operation does not end.
    """

    name: str
    method: str
    arguments: tuple[Any, ...]
    limit: float | None
    is_async: bool = False
    number: int | None = None
    uses_environment: bool = True

    def coroutine(self, host: EnvironmentHost) -> Coroutine[Any, Any, Any]:
        """The coroutine that runs it."""
        running: Coroutine[Any, Any, Any] = getattr(host, self.method)(*self.arguments)
        return running


# Lanes: threads that each run one operation at a time, and are replaced if it takes too long.
#
# An environment belongs to one lane, because many libraries (SQLite, browsers) tie an object to the thread that made
# it.
# Everything else runs on any free lane.

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


# Worker processes for tools and environments: one that takes too long is killed, with the processes it started.
#
# The trainer sends pickles. What comes back is JSON and is never unpickled, because the model's text could make a tool
# return anything.


class ToolWorker:
    """A worker process with its environments.

    Args:
        process: The process.
    """

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process

    def start(self) -> None:
        """Start the process, and wait until it is ready.

        Raises:
            RuntimeError: If it does not start, or cannot load a tool or factory.
        """
        self.process.start()

    def run(self, operation: Operation) -> Any:
        """Run an operation in the process, which is killed with its environments if that takes too long.

        Raises:
            OperationTimeoutError: If it took too long.
            OperationExitError: If the process ended, or its answer cannot be read, and it was killed.
            RuntimeError: What `EnvironmentHost` raises.
            ValueError: If the arguments cannot be pickled.
        """
        remedy = "leave out such columns, or set tool_workers to 0."
        message = _pickle(f"What {operation.name} is called with", operation, remedy)
        try:
            answer = self.process.ask(message, operation.limit)
        except WorkerTimeoutError as error:
            raise OperationTimeoutError(str(error), is_stuck=False) from None
        except WorkerExitError as error:
            raise OperationExitError(str(error)) from None
        try:
            found = _read(answer, operation)
        except (ValueError, TypeError, KeyError, RecursionError):  # a tool may have written into the pipe
            self.process.end()
            raise OperationExitError("broke its worker, whose answer cannot be read") from None
        return _value_of(found)


class ToolWorkers(list[ToolWorker]):
    """Worker processes. All end with this process, even if it is killed.

    Args:
        tools: Tools that need no environment; async ones are not sent.
        kinds: The kinds of environments.
        count: How many workers.

    Raises:
        ValueError: If a tool or a factory cannot be pickled.
    """

    def __init__(self, tools: Mapping[str, Tool], kinds: Mapping[str | None, EnvironmentKind], count: int) -> None:
        plain = {name: _pickle(f"Tool {name!r}", tool, _REMEDY) for name, tool in tools.items() if not tool.is_async}
        pickled = {kind: _pickle(f"The factory of {known.class_name}", known, _REMEDY) for kind, known in kinds.items()}
        self._reaper = Reaper()
        arguments = (plain, pickled)
        super().__init__(
            ToolWorker(WorkerProcess("tool worker", run_worker, arguments, _value, self._reaper)) for _ in range(count)
        )

    def kill(self) -> None:
        """Kill all workers, from any thread; threads that wait for a worker get an error."""
        for worker in self:
            worker.process.kill()

    def close(self) -> None:
        """Wait until all have ended."""
        for worker in self:
            worker.process.end()
        self._reaper.close()


class RemoteError(RuntimeError):
    """An error of a worker, with its traceback as the text."""


def run_worker(pipe: Connection, tools: Mapping[str, bytes], kinds: Mapping[str | None, bytes]) -> None:
    """Serve operations on the main thread until the pipe is closed.

    Args:
        pipe: Receives operations, sends results.
        tools: Pickled tools by name.
        kinds: Pickled kinds of environments by name.
    """
    lead_session()
    try:
        host = EnvironmentHost(
            {name: pickle.loads(data) for name, data in tools.items()},  # noqa: S301 (pickled by the trainer)
            {name: pickle.loads(data) for name, data in kinds.items()},  # noqa: S301 (likewise)
        )
    except Exception as error:
        text = f"A tool or factory could not be loaded in a worker ({type(error).__name__}: {error}); {_REMEDY}"
        _send(pipe, _failure(text))
        return
    _send(pipe, {"value": None})
    loop = asyncio.new_event_loop()
    process = os.getpid()
    while True:
        try:
            operation: Operation = pickle.loads(pipe.recv_bytes())  # noqa: S301 (likewise)
        except EOFError:
            return
        answer = _serve(host, loop, operation)
        if os.getpid() != process:  # a tool has forked, and its child returned
            os._exit(0)
        _send(pipe, answer)


_MAX_TRACE = 20_000

_REMEDY = "define it at the top level of a module that can be imported, or set tool_workers to 0."


def _serve(host: EnvironmentHost, loop: asyncio.AbstractEventLoop, operation: Operation) -> dict[str, Any]:
    coroutine = operation.coroutine(host)
    try:
        value = loop.run_until_complete(coroutine) if operation.is_async else run_coroutine(coroutine)
    except BaseException as error:
        if operation.method != "call":
            return _failure(describe_error(error))
        value = ToolResult.error(operation.name, describe_error(error), "raised")
    return {"value": dataclasses.asdict(value) if isinstance(value, ToolResult) else value}


def _failure(message: str) -> dict[str, str]:
    """The answer that reports the exception being handled."""
    return {"error": message, "trace": traceback.format_exc()[-_MAX_TRACE:]}


def _read(answer: bytes, operation: Operation) -> dict[str, Any]:
    """The answer to an operation, with a `value` of its type, or an `error`.

    Raises:
        ValueError, TypeError, KeyError, RecursionError: If it is malformed.
    """
    found = json.loads(answer)
    if "error" in found:
        return {"error": str(found["error"]), "trace": str(found["trace"])}
    value = found["value"]
    if operation.method == "call":
        value = ToolResult(**value)
        texts = (value.name, value.content, value.failure or "")
        if not all(isinstance(text, str) for text in texts) or value.failure not in (None, *get_args(FailureKind)):
            raise ValueError("no result")
        value = dataclasses.replace(value, seconds=float(value.seconds))
    elif not isinstance(value, (str, float, int, NoneType)):
        raise ValueError("no value")
    return {"value": value}


def _value(answer: bytes) -> Any:
    return _value_of(json.loads(answer))


def _value_of(found: Mapping[str, Any]) -> Any:
    if "error" in found:
        raise RuntimeError(found["error"]) from RemoteError(f"in a tool worker:\n{found['trace']}")
    return found["value"]


def _pickle(what: str, value: Any, remedy: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(f"{what} cannot be sent to a worker ({type(error).__name__}: {error}); {remedy}") from error


def _send(pipe: Connection, answer: Mapping[str, Any]) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


# Runs operations on tools and environments: async ones on an event loop, all others on lanes.

T = TypeVar("T")

MAX_THREADS = 256
"""Most sync calls that run in threads at the same time."""


@dataclass(eq=False)
class Started:
    """An operation that has started, and its result."""

    operation: Operation
    future: Future[Any]
    task: Task | None = None
    loop: BackgroundLoop | None = None

    def result(self) -> Any:
        """What it returned.

        Raises:
            OperationTimeoutError: If it took too long.
            OperationExitError: If its process ended.
            RuntimeError: What `EnvironmentHost` raises.
        """
        try:
            return self.future.result()
        except CancelledError:
            if self.loop is None:
                raise OperationExitError("was not called, because the tools were closed") from None
            raise OperationTimeoutError("did not end, because its event loop was blocked", is_stuck=True) from None

    def may_run(self) -> bool:
        """Whether it may still be running, so that its environment cannot be used again."""
        if not self.future.done() or self.future.cancelled():
            return True
        error = self.future.exception()
        return isinstance(error, OperationTimeoutError) and error.is_stuck


class _InProcess:
    def __init__(self, host: EnvironmentHost) -> None:
        self._host = host

    def run(self, operation: Operation) -> Any:
        return run_coroutine(operation.coroutine(self._host))


class Dispatcher:
    """Runs operations: async ones on an event loop, others on lanes, which are threads or worker processes.

    An environment stays in one lane. In a worker, its async methods run there, one at a time.

    Args:
        host: The tools, and the environments of this process.
        workers: The worker processes; None to use threads.

    Attributes:
        process: Id of the process that created it.
    """

    def __init__(self, host: EnvironmentHost, workers: ToolWorkers | None = None) -> None:
        self.process = os.getpid()
        self._host = host
        self._workers = workers
        self._hanging = HangingThreads()
        self._loops: list[BackgroundLoop] = []  # the current one, if any
        self._lock = threading.Lock()
        executors = [_InProcess(host)] * MAX_THREADS if workers is None else workers
        self._lanes = Lanes(executors, "tools" if workers is None else "tool-workers")
        # This priority runs it before multiprocessing joins child processes at exit.
        self._shut_down = Finalize(self, _shut_down, (self._lanes, workers, self._loops), exitpriority=100)
        if workers is not None:
            self._start_workers()

    def start(self, operation: Operation) -> Started:
        """Start an operation. Sync operations of one environment run in order."""
        if operation.is_async and not (self._workers is not None and operation.uses_environment):
            loop = self._current_loop()
            coroutine = _run_with_limit(operation.coroutine(self._host), operation.limit)
            return Started(operation, loop.submit(operation.name, coroutine), loop=loop)
        task = Task(
            operation.name,
            lambda executor: executor.run(operation),
            operation.limit if self._workers is None else None,
            on_abandon=lambda: self._drop_environment(operation),
        )
        lane = None if operation.number is None else operation.number % len(self._lanes)
        self._lanes.submit(task, lane)
        return Started(operation, task.future, task)

    def wait(self, started: Sequence[Started]) -> None:
        """Wait until all have a result.

        Raises:
            RuntimeError: If too many threads hang.
        """
        try:
            self._lanes.wait([one.task for one in started if one.task is not None], self._hanging)
            on_loop = [one for one in started if one.loop is not None]
            while pending := self._pending(on_loop):
                self._abandon_blocked(pending)
        except BaseException:
            for one in started:
                one.future.cancel()
            raise
        finally:
            for one in started:
                if one.may_run():
                    self._drop_environment(one.operation)

    def environment(self, number: int | None) -> Any:
        """The environment of that number, if it is in this process."""
        return None if number is None else self._host.instances.get(number)

    def close(self) -> None:
        """Stop the workers and the threads that do not hang, and drop the environments."""
        self._shut_down()
        self._host.instances.clear()

    def _start_workers(self) -> None:
        starts = [Task("tool workers", lambda worker: worker.start()) for _ in range(len(self._lanes))]
        try:
            for number, task in enumerate(starts):
                self._lanes.submit(task, number)
            for task in starts:
                task.future.result()
        except BaseException:
            self._shut_down()
            raise

    def _current_loop(self) -> BackgroundLoop:
        with self._lock:
            if not self._loops:
                self._loops.append(BackgroundLoop("async-tools"))
            return self._loops[0]

    def _pending(self, started: Sequence[Started]) -> list[Started]:
        """Wait at most as long as the longest limit; returns the operations that are not done."""
        running = [one for one in started if not one.future.done()]
        limit = max((one.operation.limit or math.inf for one in running), default=0.0)
        wait_for_futures([one.future for one in running], None if limit == math.inf else limit)
        return [one for one in running if not one.future.done()]

    def _abandon_blocked(self, pending: Sequence[Started]) -> None:
        """Abandon loops that no longer respond, and every operation on them."""
        for one in pending:
            assert one.loop is not None
            if one.future.done() or one.loop.answers(one.operation.limit):
                continue
            label = one.loop.abandon()
            with self._lock:
                if one.loop in self._loops:
                    self._loops.remove(one.loop)
            for other in pending:
                if other.loop is one.loop:
                    other.future.cancel()
            self._hanging.add(one.loop.thread, label)

    def _drop_environment(self, operation: Operation) -> None:
        if operation.uses_environment and operation.number is not None:
            self._host.drop(operation.number)


def _shut_down(lanes: Lanes, workers: ToolWorkers | None, loops: list[BackgroundLoop]) -> None:
    if workers is not None:
        workers.kill()
    lanes.close(wait_for_busy=workers is not None)
    if workers is not None:
        workers.close()
    for loop in loops:
        loop.close(2 * GRACE_SECONDS)


async def _run_with_limit(coroutine: Coroutine[Any, Any, T], limit: float | None) -> T:
    try:
        task = await run_with_limit(coroutine, limit)
    except OverTimeError as error:
        is_stuck = error.task is not None
        raise OperationTimeoutError(f"took longer than {limit} seconds", is_stuck=is_stuck) from None
    if task.cancelled():
        raise OperationCancelledError("raised CancelledError")
    return task.result()


# Runs the tools and environments of episodes, concurrently and with time limits.

log = logging.getLogger(__name__)

RESET_SECONDS = 600.0
"""Time limit for making and resetting an environment."""


@dataclass(eq=False)
class Session:
    """The tools and the environment of one episode.

    Attributes:
        observation: What `reset` returned.
        environment: The environment; None if there is none, or it lives in a worker.
        reward: After `finish`, what `get_reward` returned; NaN if it failed, None if there is no such method.
        reward_name: The environment's class if it has `get_reward`, otherwise None.
        kind: The environment's name where there are several, otherwise None; see `ToolRunner.kind_of`.
    """

    observation: str | None = None
    environment: Any = None
    reward: float | None = None
    reward_name: str | None = None
    kind: str | None = None
    _number: int | None = field(default=None, repr=False)


class ToolRunner:
    """Calls tools, and makes, resets and calls environments; different episodes run concurrently.

    Async tools run on one event loop, kept between rounds because clients are bound to it. Sync tools and environments
    run in threads or worker processes. An environment stays in its thread or worker, where its sync methods run in
    order; its async methods run on the event loop or, one at a time, in its worker. Environments are reset one at
    a time in the order of the rows; with workers, that holds within each worker.

    After a timeout, a call on the event loop is cancelled. One in a thread cannot be stopped: its thread is abandoned,
    and too many of those end the run. A worker is killed with every process that it started, and replaced; its
    environments are lost.

    Tools are the user's code and run with the user's rights. Workers limit their time; they are no security boundary.

    Args:
        tools: Functions, sync or async, with type hints and Google docstrings.
        environment_factory: Makes an environment. Or a dictionary of factories, from which the row's column
            `environment` chooses; `reset` does not get that column. Each is called once on construction.
        timeout: Time limit in seconds of a call of a tool or of `get_reward`; None is no limit.
        workers: Number of worker processes; 0 uses threads. Tools and factories are pickled to them once, and a
            script needs the usual `if __name__ == "__main__":`.

    Attributes:
        workers: As passed.

    Raises:
        ValueError: If a tool or method lacks type hints or a docstring, two have the same name, an environment has no
            `reset`, or an option is out of range.
    """

    def __init__(
        self,
        tools: Iterable[Callable[..., Any]] = (),
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
        *,
        timeout: float | None = None,
        workers: int = 0,
    ) -> None:
        if timeout is not None and not timeout > 0:
            raise ValueError(f"tool_timeout is {timeout}; it must be larger than 0, or None for no limit.")
        if workers < 0:
            raise ValueError(f"tool_workers is {workers}; it must be at least 1, or 0 to run tools in threads.")
        if workers:
            check_process_groups("tool_workers", workers)
        self.workers = workers
        self._timeout = timeout
        self._tools = prepare_tools(tools)
        self._kinds: dict[str | None, EnvironmentKind] = {}
        self._numbers = _EnvironmentNumbers()
        self._lock, self._resetting = threading.RLock(), threading.Lock()
        self._dispatcher: Dispatcher | None = None
        try:
            self._probe(named_factories(environment_factory))
        except BaseException:
            self.close()
            raise
        if workers and not self._kinds and all(tool.is_async for tool in self._tools.values()):
            raise ValueError(
                f"tool_workers is {workers}, but each of {list(self._tools)} is async and stays in the process; set it "
                "to 0."
            )

    @property
    def has_tools(self) -> bool:
        """Whether the model can call anything; an environment need not have tools."""
        return any(self.schemas(kind) for kind in self._kinds or [None])

    @property
    def has_environments(self) -> bool:
        """Whether each episode has an environment."""
        return bool(self._kinds)

    @property
    def environment_names(self) -> list[str] | None:
        """What a row may have in its column `environment`; None if there is only one environment, or none."""
        return [name for name in self._kinds if name is not None] or None

    @property
    def reward_names(self) -> list[str]:
        """Classes of the environments that have `get_reward`, each once."""
        classes = [kind.class_name for kind in self._kinds.values() if kind.async_reward is not None]
        return list(dict.fromkeys(classes))

    def schemas(self, environment: str | None = None) -> list[dict[str, Any]]:
        """JSON schemas of the tools in an episode, for the chat template.

        Args:
            environment: The row's environment, where there are several.
        """
        methods = self._kinds[environment].methods if self._kinds else {}
        return [*(tool.schema for tool in self._tools.values()), *(method.schema for method in methods.values())]

    def kind_of(self, row: Mapping[str, Any]) -> str | None:
        """The name of a row's environment where there are several, otherwise None.

        Raises:
            ValueError: If the row names none of them.
        """
        return kind_of_row(row, self._kinds)

    def open(self) -> None:
        """Start the workers; otherwise the first call does."""
        self._get_dispatcher()

    def close(self) -> None:
        """Stop the workers and the threads, except those that hang, and drop the environments."""
        dispatcher, self._dispatcher = self._dispatcher, None
        if dispatcher is not None:
            dispatcher.close()

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Session]:
        """Begin an episode per row.

        Args:
            rows: Arguments of each `reset`: the dataset's columns, and `prompt`.

        Raises:
            ValueError: If a row names an unknown environment.
            RuntimeError: If an environment cannot be made or reset.
        """
        if not self._kinds:
            return [Session() for _ in rows]
        kinds = [self.kind_of(row) for row in rows]
        sessions = [self._new_session(kind) for kind in kinds]
        try:
            with nullcontext() if self.workers else self._resetting:
                self._reset(sessions, rows)
        except BaseException:
            self.release(sessions)
            raise
        return sessions

    def call(self, requests: Sequence[tuple[Session, Sequence[ToolCall]]]) -> list[list[ToolResult]]:
        """Call tools. Failures are returned as results, which the model reads.

        Calls of different episodes run concurrently. Within an episode with an environment, sync calls run in order,
        then async ones concurrently; without an environment, all run concurrently.

        Returns:
            Per request: the results of sync tools and of refused calls in order, then those of async tools in order,
            as in TRL.

        Raises:
            RuntimeError: If too many threads hang.
        """
        turns = [[self._look_up(session, call) for call in calls] for session, calls in requests]
        calls = [call for turn in turns for call in turn if call.tool is not None]
        sync_first = {id(call.session) for call in calls if not call.is_async and call.session._number is not None}
        later = [call for call in calls if call.is_async and id(call.session) in sync_first]
        self._run_calls([call for call in calls if not call.is_async or id(call.session) not in sync_first])
        self._run_calls(later)
        return [[call.result for call in sorted(turn, key=_Call.is_late)] for turn in turns]

    def finish(self, sessions: Sequence[Session]) -> None:
        """End episodes and call `get_reward` where there is one. The next episodes reuse their environments."""
        running = [session for session in sessions if session._number is not None]
        scored = [session for session in running if session.reward_name is not None]
        try:
            rewards = [self._start_reward(session) for session in scored]
            self._get_dispatcher().wait(rewards)
            for session, reward in zip(scored, rewards, strict=True):
                session.reward = _reward_result(reward)
        finally:
            self.release(running)

    def release(self, sessions: Sequence[Session]) -> None:
        """End episodes without a reward, such as after losing the sampler; no effect on those that have ended."""
        with self._lock:
            for session in sessions:
                if session._number is not None:
                    self._numbers.put_back(session.kind, session._number)
                    session._number = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_resetting": None, "_dispatcher": None}  # a copy starts closed

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _resetting=threading.Lock())

    def _get_dispatcher(self) -> Dispatcher:
        """The dispatcher of this process, started if there is none."""
        with self._lock:
            if self._dispatcher is None or self._dispatcher.process != os.getpid():  # a fork inherits no threads
                workers = ToolWorkers(self._tools, self._kinds, self.workers) if self.workers else None
                self._dispatcher = Dispatcher(EnvironmentHost(self._tools, self._kinds), workers)
            return self._dispatcher

    def _probe(self, factories: Mapping[str | None, Callable[[], Any]]) -> None:
        """Make an environment of each kind; without workers, episodes use it too."""
        for kind, factory in factories.items():
            if self.workers:
                self._kinds[kind] = EnvironmentKind.of(factory, factory())
            else:
                number = self._numbers.take(kind)
                probe = Operation("environment_factory", "probe", (number, kind, factory), None, number=number)
                self._get_dispatcher().start(probe).result()
                self._numbers.put_back(kind, number)
            check_names(self._kinds[kind], self._tools)

    def _new_session(self, kind: str | None) -> Session:
        known = self._kinds[kind]
        reward_name = None if known.async_reward is None else known.class_name
        with self._lock:
            return Session(reward_name=reward_name, kind=kind, _number=self._numbers.take(kind))

    def _reset(self, sessions: Sequence[Session], rows: Sequence[Mapping[str, Any]]) -> None:
        """Reset environments; in this process one at a time, since they may share state such as a random generator."""
        if None not in self._kinds:
            rows = [{name: value for name, value in row.items() if name != COLUMN} for row in rows]
        resets = []
        for session, row in zip(sessions, rows, strict=True):
            kind = self._kinds[session.kind]
            name, arguments = f"{kind.class_name}.reset", (session._number, session.kind, row)
            reset = Operation(name, "reset", arguments, RESET_SECONDS, kind.async_reset, session._number)
            resets.append(self._get_dispatcher().start(reset))
            if not self.workers:
                self._get_dispatcher().wait(resets[-1:])
                _reset_result(resets[-1], row)  # raises at the first failure
        self._get_dispatcher().wait(resets)
        for session, row, started in zip(sessions, rows, resets, strict=True):
            session.observation = _reset_result(started, row)
            session.environment = self._get_dispatcher().environment(session._number)

    def _look_up(self, session: Session, call: ToolCall) -> _Call:
        if call.kind != "function" or not isinstance(call.name, str):
            return _Call(session, call, None)
        methods = self._kinds[session.kind].methods if self._kinds else {}
        return _Call(session, call, self._tools.get(call.name) or methods.get(call.name))

    def _run_calls(self, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        started = [self._get_dispatcher().start(call.operation(self._timeout)) for call in calls]
        self._get_dispatcher().wait(started)
        for call, one in zip(calls, started, strict=True):
            call.result = _call_result(one)

    def _start_reward(self, session: Session) -> Started:
        kind = self._kinds[session.kind]
        name, arguments = f"{kind.class_name}.get_reward", (session._number, session.kind)
        waits = bool(kind.async_reward)
        return self._get_dispatcher().start(Operation(name, "reward", arguments, self._timeout, waits, session._number))


class _Call:
    """A call with the tool that it names, and its result."""

    def __init__(self, session: Session, call: ToolCall, tool: Tool | Method | None) -> None:
        self.session = session
        self.call = call
        self.tool = tool
        self.is_method = isinstance(tool, Method)
        self.is_async = tool is not None and tool.is_async
        self.result = _refusal(call)

    def operation(self, limit: float | None) -> Operation:
        number, kind = self.session._number, self.session.kind
        arguments = (number, kind, self.call.name, self.call.arguments)
        return Operation(self.call.name, "call", arguments, limit, self.is_async, number, self.is_method)

    def is_late(self) -> bool:
        """Whether its result comes after those of sync tools: it is async, and the arguments matched its signature."""
        return self.is_async and self.result.failure != "arguments"


def _refusal(call: ToolCall) -> ToolResult:
    """The result of a call for which there is no tool."""
    if call.kind == "function":
        return ToolResult.error(str(call.name), f"Tool {call.name} not found.", "unknown")
    return ToolResult.error(call.name or "unknown", f"Unsupported tool call type: {call.kind}", "unsupported")


def _reset_result(reset: Started, row: Mapping[str, Any]) -> str | None:
    try:
        observation: str | None = reset.result()
    except OperationError as error:
        raise RuntimeError(f"{reset.operation.name} {error}, for the row {describe_row(row)}.") from error
    return observation


def _call_result(started: Started) -> ToolResult:
    name, limit = started.operation.name, started.operation.limit
    try:
        result: ToolResult = started.result()
    except OperationError as error:
        kinds: dict[type, FailureKind] = {OperationTimeoutError: "timeout", OperationExitError: "exited"}
        failure = kinds.get(type(error), "raised")
        return ToolResult.error(name, f"Tool {name} {error}.", failure, (limit or 0.0) if failure == "timeout" else 0.0)
    return result


def _reward_result(started: Started) -> float:
    try:
        reward: float = started.result()
    except Exception as error:
        log.warning("%s %s; the episode has no such reward.", started.operation.name, error)
        return math.nan
    return reward


class _EnvironmentNumbers:
    """Numbers of environments. An episode gets the lowest free one of its kind, so as few as possible are made."""

    def __init__(self) -> None:
        self._free: defaultdict[str | None, list[int]] = defaultdict(list)
        self._next = 0

    def take(self, kind: str | None) -> int:
        if self._free[kind]:
            return heapq.heappop(self._free[kind])
        self._next += 1
        return self._next - 1

    def put_back(self, kind: str | None, number: int) -> None:
        heapq.heappush(self._free[kind], number)
