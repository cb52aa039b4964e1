"""Worker processes for tools and environments: one that takes too long is killed, with the processes it started.

The trainer sends pickles. What comes back is JSON and is never unpickled, because the model's text could make a tool
return anything.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import pickle
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import NoneType
from typing import Any, get_args

from pl_grouprl.episodes.environment_host import EnvironmentHost
from pl_grouprl.episodes.environment_kinds import EnvironmentKind
from pl_grouprl.episodes.operations import Operation, OperationExitError, OperationTimeoutError
from pl_grouprl.episodes.tools import FailureKind, Tool, ToolResult, run_coroutine
from pl_grouprl.utilities.text import describe_error
from pl_grouprl.utilities.worker_process import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    lead_session,
)


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
