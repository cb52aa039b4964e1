"""Runs the tools and environments of episodes, concurrently and with time limits."""

from __future__ import annotations

import heapq
import logging
import math
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from pl_grouprl.episodes.dispatch import Dispatcher, Started
from pl_grouprl.episodes.environment_host import EnvironmentHost, describe_row
from pl_grouprl.episodes.environment_kinds import (
    COLUMN,
    EnvironmentKind,
    Method,
    check_names,
    kind_of_row,
    named_factories,
)
from pl_grouprl.episodes.operations import Operation, OperationError, OperationExitError, OperationTimeoutError
from pl_grouprl.episodes.tools import FailureKind, Tool, ToolCall, ToolResult, prepare_tools
from pl_grouprl.episodes.workers import ToolWorkers
from pl_grouprl.utilities.worker_process import check_process_groups

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
