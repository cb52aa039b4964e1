"""Runs the tools and environments of episodes, concurrently and with time limits."""

from __future__ import annotations

import asyncio
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
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, get_args

from pl_grouprl.episodes.tools import (
    COLUMN,
    EnvironmentHost,
    EnvironmentKind,
    FailureKind,
    ToolCall,
    ToolResult,
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
    run_concurrently,
    run_with_limit,
)
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import describe_error, shorten

log = logging.getLogger(__name__)

RESET_SECONDS = 600.0
"""Time limit for making and resetting an environment."""

MAX_THREADS = 256
"""Maximum number of sync calls that run in threads at the same time."""


@dataclass(eq=False)
class Session:
    """The tools and the environment of one episode.

    Attributes:
        observation: What `reset` returned.
        environment: The environment; None if there is none, or it lives in a worker.
        reward: After `finish`, what `get_reward` returned; NaN if it failed, None if there is no such method.
        reward_name: The environment's class if it has `get_reward` or `get_step_reward`, otherwise None.
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

    After a timeout, a call on the event loop is canceled. A call in a thread cannot be stopped, so the thread keeps
    running and a warning is given. A worker is killed with every process that it started, and replaced; its
    environments are lost.

    Tools are the user's code and run with the user's rights. Workers limit their time but are not a security boundary.

    Args:
        tools: Functions, sync or async, with type hints and Google docstrings.
        environment_factory: Makes an environment; or a dictionary of factories, from which the row's column
            `environment` chooses; `reset` does not get that column. Each is called once on construction.
        timeout: Time limit in seconds of a call of a tool or of `get_reward`; no limit if None.
        workers: Number of worker processes; 0 uses threads. Tools and factories are pickled to them once, and a
            script needs the usual `if __name__ == "__main__":`.

    Attributes:
        workers: As passed.
        has_environments: Whether each episode has an environment.

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
        if workers:
            check_process_groups("episodes.tool_workers", workers)
        if isinstance(environment_factory, Mapping) and not environment_factory:
            raise ValueError("environment_factory is an empty dictionary; pass factories by name, or None.")
        factories: dict[str | None, Callable[[], Any]] = {}
        if isinstance(environment_factory, Mapping):
            factories.update(environment_factory)
        elif environment_factory is not None:
            factories[None] = environment_factory
        self.workers = workers
        self.has_environments = bool(factories)
        self._timeout = timeout
        self._tools = prepare_tools(tools)
        if workers and not factories and all(tool.is_async for tool in self._tools.values()):
            raise ValueError(
                f"episodes.tool_workers is {workers}, but all of {list(self._tools)} are async; set it to 0."
            )
        self._kinds: dict[str | None, EnvironmentKind] = {}
        # An episode gets the lowest free environment of its kind, so that as few as possible are made.
        self._free: defaultdict[str | None, list[int]] = defaultdict(list)
        self._num_environments = 0
        self._lock = threading.RLock()
        self._executors: _Executors | None = None
        try:
            for kind, factory in factories.items():
                if workers:
                    self._kinds[kind] = EnvironmentKind.of(factory, factory())
                else:  # episodes use it, too
                    number = self._take_environment(kind)
                    probe = Operation("environment_factory", "probe", (number, kind, factory), None, number=number)
                    self._get_executors().run([probe])
                    probe.result()
                    self._free[kind].append(number)
                if both := sorted(self._kinds[kind].methods.keys() & self._tools.keys()):
                    owner = self._kinds[kind].class_name
                    raise ValueError(f"{both} are tools and methods of {owner}, called by name: rename one.")
        except BaseException:
            self.close()
            raise

    @property
    def has_tools(self) -> bool:
        """Whether the model can call anything; an environment need not have tools."""
        return any(self.schemas(kind) for kind in self._kinds or [None])

    @property
    def environment_names(self) -> list[str] | None:
        """What a row may have in its column `environment`; None if there is only one environment, or none."""
        return [name for name in self._kinds if name is not None] or None

    @property
    def reward_names(self) -> list[str]:
        """Classes of the environments that have `get_reward`, each once."""
        return list({kind.class_name: None for kind in self._kinds.values() if kind.async_reward is not None})

    @property
    def step_reward_names(self) -> list[str]:
        """Classes of the environments that have `get_step_reward`, each once."""
        return list({kind.class_name: None for kind in self._kinds.values() if kind.has_step_reward})

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
        if None in self._kinds or not self._kinds:
            return None
        name = row.get(COLUMN)
        if not isinstance(name, str) or name not in self._kinds:
            raise ValueError(f"A row has {COLUMN}={name!r}, not one of environment_factory: {list(self._kinds)}.")
        return name

    def open(self) -> None:
        """Start the workers, which the first call would do otherwise."""
        self._get_executors()

    def close(self) -> None:
        """Stop the workers and all threads that do not hang, and drop the environments."""
        executors, self._executors = self._executors, None
        if executors is not None:
            executors.close()

    def begin(self, rows: Sequence[Mapping[str, Any]]) -> list[Session]:
        """Begin an episode for each row.

        Args:
            rows: Arguments of each `reset`: the dataset's columns, and `prompt`.

        Raises:
            ValueError: If a row names an unknown environment.
            RuntimeError: If an environment cannot be made or reset.
        """
        if not self._kinds:
            return [Session() for _ in rows]
        begun = []
        for row, kind in zip(rows, [self.kind_of(row) for row in rows], strict=True):
            known, number = self._kinds[kind], self._take_environment(kind)
            session = Session(reward_name=known.reward_name, kind=kind, _number=number)
            columns = row if kind is None else {name: value for name, value in row.items() if name != COLUMN}
            arguments = (number, kind, columns)
            name = f"{known.class_name}.reset"
            begun.append((session, Operation(name, "reset", arguments, RESET_SECONDS, known.async_reset, number)))
        sessions = [session for session, _ in begun]
        try:
            executors = self._get_executors()
            # In this process one at a time, since environments may share state such as a random generator.
            with nullcontext() if self.workers else executors.resetting:
                for batch in [begun] if self.workers else [[one] for one in begun]:
                    executors.run([reset for _, reset in batch])
                    for session, reset in batch:
                        try:
                            session.observation = reset.result()
                        except OperationError as error:
                            shown = shorten(dict(reset.arguments[-1]), 300)
                            raise RuntimeError(f"{reset.name} {error}, for the row {shown}.") from error
                        session.environment = executors.host.instances.get(session._number)
        except BaseException:
            self.release(sessions)
            raise
        return sessions

    def call(self, requests: Sequence[tuple[Session, Sequence[ToolCall]]]) -> list[list[ToolResult]]:
        """Call tools. Failures are returned as results, which the model reads.

        Calls of different episodes run concurrently. Within an episode with an environment, sync calls run in order,
        then async ones concurrently; without an environment, all run concurrently.

        Returns:
            Per request: results of sync tools and of unsupported calls in order, then results of async tools in order,
            as in TRL.
        """
        turns = [[self._prepare(session, call) for call in calls] for session, calls in requests]
        operations = [one for turn in turns for one in turn if isinstance(one, Operation)]
        sync_first = {one.number for one in operations if one.number is not None and not one.is_async}
        later = [one for one in operations if one.is_async and one.number in sync_first]
        for batch in ([one for one in operations if one not in later], later):
            if batch:
                self._get_executors().run(batch)
        found = []
        for turn in turns:
            now: list[ToolResult] = []
            late: list[ToolResult] = []
            for one in turn:
                if isinstance(one, ToolResult):
                    now.append(one)
                    continue
                try:
                    result: ToolResult = one.result()
                except OperationError as error:
                    seconds = one.limit or 0.0 if error.failure == "timeout" else 0.0
                    result = ToolResult.error(one.name, f"Tool {one.name} {error}.", error.failure, seconds)
                (late if one.is_async and result.failure != "arguments" else now).append(result)
            found.append(now + late)
        return found

    def finish(self, sessions: Sequence[Session]) -> None:
        """End episodes and call `get_reward` where there is one. The next episodes reuse their environments."""
        running = [session for session in sessions if session._number is not None]
        scored = [session for session in running if self._kinds[session.kind].async_reward is not None]
        rewards = [
            Operation(
                f"{session.reward_name}.get_reward",
                "reward",
                (session._number, session.kind),
                self._timeout,
                bool(self._kinds[session.kind].async_reward),
                session._number,
            )
            for session in scored
        ]
        try:
            if rewards:
                self._get_executors().run(rewards)
            for session, reward in zip(scored, rewards, strict=True):
                try:
                    session.reward = reward.result()
                except Exception as error:
                    log.warning("%s %s; the episode has no such reward.", reward.name, error)
                    session.reward = math.nan
        finally:
            self.release(running)

    def release(self, sessions: Sequence[Session]) -> None:
        """End episodes without a reward, such as after losing the sampler; no effect on ended ones."""
        with self._lock:
            for session in sessions:
                if session._number is not None:
                    heapq.heappush(self._free[session.kind], session._number)
                    session._number = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_lock": None, "_executors": None}  # a copy starts closed

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def _get_executors(self) -> _Executors:
        with self._lock:
            if self._executors is None or self._executors.process != os.getpid():  # a fork inherits no threads
                host = EnvironmentHost(self._tools, self._kinds)
                self._executors = _Executors(host, self.workers, self.has_environments)
            return self._executors

    def _take_environment(self, kind: str | None) -> int:
        with self._lock:
            if self._free[kind]:
                return heapq.heappop(self._free[kind])
            self._num_environments += 1
            return self._num_environments - 1

    def _prepare(self, session: Session, call: ToolCall) -> Operation | ToolResult:
        """The operation of a call, or its result if there is no such tool."""
        if call.kind != "function":
            return ToolResult.error(call.name or "unknown", f"Unsupported tool call type: {call.kind}", "unsupported")
        name = call.name if isinstance(call.name, str) else None
        methods = self._kinds[session.kind].methods if self._kinds else {}
        tool = self._tools.get(name) or methods.get(name)
        if tool is None:
            return ToolResult.error(str(call.name), f"Tool {call.name} not found.", "unknown")
        number, is_method = session._number, name not in self._tools
        arguments = (number, session.kind, name, call.arguments)
        return Operation(call.name, "call", arguments, self._timeout, tool.is_async, number, is_method)


class OperationError(RuntimeError):
    """An operation did not return. The message continues a sentence that begins with the operation's name.

    Attributes:
        failure: Kind of failure.
        is_stuck: Whether it may still be running.
    """

    def __init__(self, message: str, failure: FailureKind, *, is_stuck: bool = False) -> None:
        super().__init__(message)
        self.failure: FailureKind = failure
        self.is_stuck = is_stuck


@dataclass(eq=False)
class Operation:
    """A call of a method of `EnvironmentHost`.

    Attributes:
        name: Name of the tool or environment, for errors.
        method: Name of the method.
        arguments: Its arguments.
        limit: Time limit in seconds; no limit if None.
        is_async: Whether it calls an async function, so that it needs an event loop.
        number: Number of the episode's environment, if any; sync operations with the same number run in order.
        uses_environment: Whether it uses that environment, which is dropped if the operation may still be running.
        future: Its result.
        loop: The event loop that runs it, if any.
        began: When its executor started it, by `time.monotonic`; None before, and where a worker keeps the limit.
    """

    name: str
    method: str
    arguments: tuple[Any, ...]
    limit: float | None
    is_async: bool = False
    number: int | None = None
    uses_environment: bool = True
    future: Future[Any] = field(default_factory=Future)
    loop: BackgroundLoop | None = None
    began: float | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until its limit, at the earliest."""
        if self.limit is None:
            return math.inf
        return self.limit if self.began is None else self.began + self.limit - time.monotonic()

    @property
    def may_run(self) -> bool:
        """Whether it may still be running, so that its environment cannot be used again."""
        if not self.future.done() or self.future.cancelled():
            return True
        error = self.future.exception()
        return isinstance(error, OperationError) and error.is_stuck

    def coroutine(self, host: EnvironmentHost) -> Coroutine[Any, Any, Any]:
        """The coroutine that runs it, which never waits if it is not async."""
        running: Coroutine[Any, Any, Any] = getattr(host, self.method)(*self.arguments)
        return running

    def result(self) -> Any:
        """What it returned.

        Raises:
            OperationError: If it did not return.
            RuntimeError: What `EnvironmentHost` raises.
        """
        try:
            return self.future.result()
        except CancelledError:  # its loop was abandoned
            message = "did not end, because its event loop was blocked"
            raise OperationError(message, "timeout", is_stuck=True) from None


class _Executors:
    """Runs operations: async ones on an event loop, all others in threads or worker processes.

    Many libraries (SQLite, browsers) tie an object to the thread that made it. So the operations of an environment run
    in the thread or worker of its number; without environments, any thread or worker runs any operation.

    Args:
        host: The tools, and the environments of this process.
        num_workers: Number of worker processes; 0 for threads.
        has_environments: Whether operations belong to environments.
    """

    def __init__(self, host: EnvironmentHost, num_workers: int, has_environments: bool) -> None:
        self.process, self.host, self.resetting = os.getpid(), host, threading.Lock()
        self._uses_workers = num_workers > 0
        workers: list[WorkerProcess] = []
        reaper = None
        if num_workers:
            sent = EnvironmentHost({name: tool for name, tool in host.tools.items() if not tool.is_async}, host.kinds)
            data = _pickle("A tool or factory", sent, _REMEDY)
            reaper = Reaper()
            workers = [WorkerProcess("tool worker", run_worker, (data,), _read, reaper) for _ in range(num_workers)]
        calls: list[Callable[[Operation], Any]] = [partial(_ask, worker) for worker in workers]
        calls = calls or [lambda operation: run_coroutine(operation.coroutine(host))] * MAX_THREADS
        pools = [[call] for call in calls] if has_environments else [calls]
        self._threads = [_Threads(pool, keeps_limits=not workers) for pool in pools]
        self._loop = _Loop(host)
        # This priority runs it before multiprocessing joins child processes at exit.
        self._shut_down = Finalize(self, _shut_down, (self._threads, self._loop, workers, reaper), exitpriority=100)
        try:
            run_concurrently([worker.start for worker in workers])
        except BaseException:
            self._shut_down()
            raise

    def run(self, operations: Sequence[Operation]) -> None:
        """Run operations until all have a result; an executor past its limit is replaced."""
        executors: dict[Operation, _Threads | _Loop] = {}
        try:
            for operation in operations:
                on_loop = operation.is_async and not (self._uses_workers and operation.uses_environment)
                threads = self._threads[(operation.number or 0) % len(self._threads)]
                executors[operation] = self._loop if on_loop else threads
                executors[operation].submit(operation)
            while running := [operation for operation in operations if not operation.future.done()]:
                left = min(operation.seconds_left for operation in running)
                wait_for_futures([one.future for one in running], None if left == math.inf else max(left, 0.0))
                for operation in running:
                    if operation.seconds_left <= 0 and not operation.future.done():
                        executors[operation].replace(operation, self._drop_environment)
        except BaseException:
            for operation in operations:
                operation.future.cancel()
            raise
        finally:
            for operation in operations:
                if operation.may_run:
                    self._drop_environment(operation)

    def close(self) -> None:
        """Stop the workers and the threads that do not hang, and drop the environments."""
        self._shut_down()
        self.host.instances.clear()

    def _drop_environment(self, operation: Operation) -> None:
        if operation.uses_environment and operation.number is not None:
            self.host.drop(operation.number)


def _shut_down(
    threads: Sequence[_Threads], loop: _Loop, workers: Sequence[WorkerProcess], reaper: Reaper | None
) -> None:
    for worker in workers:  # their threads get an error, and end
        worker.kill()
    for pool in threads:
        pool.close(wait_for_busy=bool(workers))
    for worker in workers:
        worker.end()
    if reaper is not None:
        reaper.close()
    loop.close()


class _Loop:
    """An event loop for async operations; replaced if one of them blocks it."""

    def __init__(self, host: EnvironmentHost) -> None:
        self._host, self._lock = host, threading.Lock()
        self._current: BackgroundLoop | None = None

    def submit(self, operation: Operation) -> None:
        """Run an operation, which is cancelled after its limit."""
        with self._lock:
            self._current = operation.loop = self._current or BackgroundLoop("async-tools")
        operation.future = operation.loop.submit(operation.name, self._run(operation))
        operation.began = time.monotonic()

    async def _run(self, operation: Operation) -> Any:
        try:
            task = await run_with_limit(operation.coroutine(self._host), operation.limit)
        except OverTimeError as error:
            message = f"took longer than {operation.limit} seconds"
            raise OperationError(message, "timeout", is_stuck=error.task is not None) from None
        if task.cancelled():
            raise OperationError("raised CancelledError", "raised")
        return task.result()

    def replace(self, operation: Operation, before: Callable[[Operation], None]) -> None:
        """Leave the loop of an overdue operation behind if it is blocked."""
        assert operation.loop is not None
        if operation.loop.answers(operation.limit):
            operation.began = time.monotonic()  # it is being cancelled
            return
        label = operation.loop.abandon()
        with self._lock:
            if self._current is operation.loop:
                self._current = None
                log.warning("%r blocks the event loop of the async tools, which is replaced; await instead.", label)
        operation.future.cancel()

    def close(self) -> None:
        """Cancel what runs, and end the thread."""
        if self._current is not None:
            self._current.close(2 * GRACE_SECONDS)


class _Threads:
    """Daemon threads that run the operations of one queue, each one at a time; they start when they are needed.

    Args:
        calls: Each thread calls one of these with its operations.
        keeps_limits: Whether a thread whose operation takes too long is replaced.
    """

    def __init__(self, calls: Iterable[Callable[[Operation], Any]], *, keeps_limits: bool) -> None:
        self._unused = list(calls)
        self._keeps_limits = keeps_limits
        self._threads: dict[threading.Thread, Callable[[Operation], Any]] = {}
        self._waiting: deque[Operation] = deque()
        self._running: dict[Operation, threading.Thread] = {}
        self._changed = threading.Condition()
        self._closed = False

    def submit(self, operation: Operation) -> None:
        """Run an operation after those submitted earlier."""
        with self._changed:
            if self._closed:
                raise RuntimeError("these tools are closed; open the ToolRunner again.")
            self._waiting.append(operation)
            if self._unused and len(self._waiting) + len(self._running) > len(self._threads):
                self._start(self._unused.pop())
            self._changed.notify()

    def _start(self, call: Callable[[Operation], Any]) -> None:
        thread = threading.Thread(target=self._serve, args=(call,), name="tools", daemon=True)
        self._threads[thread] = call
        thread.start()

    def _serve(self, call: Callable[[Operation], Any]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                operation = self._waiting.popleft()
                if not operation.future.set_running_or_notify_cancel():
                    continue
                self._running[operation] = threading.current_thread()
                operation.began = time.monotonic() if self._keeps_limits else None
            try:
                settle = partial(operation.future.set_result, call(operation))
            except BaseException as error:
                settle = partial(operation.future.set_exception, error)
            with self._changed:
                if self._running.pop(operation, None) is None:  # this thread was replaced
                    return
            tick()
            settle()
            del operation, settle  # an idle thread keeps nothing alive

    def replace(self, operation: Operation, before: Callable[[Operation], None]) -> None:
        """Leave the thread of an overdue operation behind, and start another; `before` is called in between."""
        with self._changed:
            thread = self._running.pop(operation, None)
            if thread is None:  # it has just ended
                return
            before(operation)
            self._start(self._threads.pop(thread))
        log.warning("%s hangs; its thread cannot be stopped. episodes.tool_workers would kill it.", operation.name)
        message = f"took longer than {operation.limit} seconds"
        operation.future.set_exception(OperationError(message, "timeout", is_stuck=True))

    def close(self, *, wait_for_busy: bool) -> None:
        """Stop the threads; busy ones, unless waited for, end after their operation."""
        with self._changed:
            self._closed = True
            waiting, self._waiting = self._waiting, deque()
            threads = set(self._threads) - (set() if wait_for_busy else set(self._running.values()))
            self._changed.notify_all()
        for operation in waiting:
            if operation.future.set_running_or_notify_cancel():
                message = "was not called, because the tools were closed"
                operation.future.set_exception(OperationError(message, "exited"))
        for thread in threads - {threading.current_thread()}:  # the garbage collector may call this on any thread
            thread.join()


# Worker processes. The trainer sends pickles. Answers are JSON and are never unpickled, because the model's text could
# make a tool return anything, or write into the pipe.

_MAX_TRACE = 20_000

_REMEDY = "define it at the top level of a module that can be imported, or set episodes.tool_workers to 0."


class RemoteError(RuntimeError):
    """An error of a worker, with its traceback as the text."""


def run_worker(pipe: Connection, data: bytes) -> None:
    """Serve operations on the main thread until the pipe is closed.

    Args:
        pipe: Receives operations, sends results.
        data: A pickled `EnvironmentHost`.
    """
    lead_session()
    try:
        host: EnvironmentHost = pickle.loads(data)  # noqa: S301 (pickled by the trainer)
    except Exception as error:
        text = f"A tool or factory could not be loaded in a worker ({type(error).__name__}: {error}); {_REMEDY}"
        pipe.send_bytes(json.dumps({"error": text, "trace": traceback.format_exc()[-_MAX_TRACE:]}).encode())
        return
    pipe.send_bytes(json.dumps({"value": None}).encode())
    loop, process = asyncio.new_event_loop(), os.getpid()
    while True:
        try:
            name, method, arguments, is_async = pickle.loads(pipe.recv_bytes())  # noqa: S301 (likewise)
        except EOFError:
            return
        answer: dict[str, Any]
        try:
            coroutine = getattr(host, method)(*arguments)
            value = loop.run_until_complete(coroutine) if is_async else run_coroutine(coroutine)
            answer = {"value": asdict(value) if isinstance(value, ToolResult) else value}
        except BaseException as error:
            answer = {"error": describe_error(error), "trace": traceback.format_exc()[-_MAX_TRACE:]}
            if method == "call":
                answer = {"value": asdict(ToolResult.error(name, describe_error(error), "raised"))}
        if os.getpid() != process:  # a tool has forked, and its child returned
            os._exit(0)
        pipe.send_bytes(json.dumps(answer).encode())


def _ask(worker: WorkerProcess, operation: Operation) -> Any:
    """Run an operation in a worker, which is killed with its environments if that takes too long."""
    request = (operation.name, operation.method, operation.arguments, operation.is_async)
    remedy = "omit such columns, or set episodes.tool_workers to 0."
    try:
        answer = worker.ask(_pickle(f"What {operation.name} is called with", request, remedy), operation.limit)
    except WorkerTimeoutError as error:
        raise OperationError(str(error), "timeout") from None
    except WorkerExitError as error:
        raise OperationError(str(error), "exited") from None
    try:
        value = _read(answer)
        if operation.method == "call":
            value = ToolResult(**value)
            texts = (value.name, value.content, value.failure or "")
            is_readable = all(isinstance(text, str) for text in texts) and isinstance(value.seconds, float | int)
            is_readable = is_readable and isinstance(value.reward, float | None)
            is_readable = is_readable and all(isinstance(n, int) and isinstance(png, str) for n, png in value.images)
            if not is_readable or value.failure not in (None, *get_args(FailureKind)):
                raise TypeError("no result")
        elif not isinstance(value, str | float | int | None):
            raise TypeError("no value")
    except (ValueError, TypeError, KeyError, RecursionError):
        worker.end()
        raise OperationError("broke its worker, whose answer cannot be read", "exited") from None
    return value


def _read(answer: bytes) -> Any:
    """The value of a worker's answer.

    Raises:
        RuntimeError: The error that it reports.
        ValueError, TypeError, KeyError, RecursionError: If it is malformed.
    """
    found = json.loads(answer)
    if "error" in found:
        raise RuntimeError(str(found["error"])) from RemoteError(f"in a tool worker:\n{found['trace']}")
    return found["value"]


def _pickle(what: str, value: Any, remedy: str) -> bytes:
    try:
        return pickle.dumps(value)
    except Exception as error:
        raise ValueError(f"{what} cannot be sent to a worker ({type(error).__name__}: {error}); {remedy}") from error
