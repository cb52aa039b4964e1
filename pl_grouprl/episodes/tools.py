"""Tools: functions that the model may call, and the text that it reads as their result.

A tool is the user's code and runs with the user's rights, with arguments that the model chose. What the model writes is
never evaluated as code. Results and errors have the same text as with TRL's `GRPOTrainer`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pl_grouprl.chat.parsing import Schema
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.exit_gate import exits_refused

FailureKind = Literal["unknown", "arguments", "raised", "timeout", "exited", "too_long", "unsupported"]
"""Why a call failed, in order: there is no such tool; the arguments do not match its signature; it raised; it took too
long; it tried to end the process, its process ended, or its environment was lost in an earlier call; its result is too
long; the type of the call or of its result is not supported."""

MAX_RESULT_CHARACTERS = 2**20
"""Longest result or error message of a tool; the model reads a short error instead of a longer one."""

_MEDIA = frozenset({"image", "image_url", "video", "audio"})


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asked for.

    Attributes:
        name: Name of the tool.
        arguments: Its keyword arguments, as parsed; anything but a mapping with strings as keys is refused.
        kind: Type of the call; only `function` is supported.
    """

    name: str
    arguments: Any
    kind: str = "function"


@dataclass(frozen=True)
class ToolResult:
    """What a call returned.

    Attributes:
        name: Name of the tool.
        content: What the model reads.
        failure: Why the call failed; None if it did not.
        seconds: How long it ran.
    """

    name: str
    content: str
    failure: FailureKind | None = None
    seconds: float = 0.0

    @classmethod
    def error(cls, name: str, message: str, failure: FailureKind, seconds: float = 0.0) -> ToolResult:
        """The result of a call that failed: a dictionary with its `error`, written as text."""
        return cls(name, str({"error": message}), failure, seconds)

    @property
    def message(self) -> dict[str, Any]:
        """The chat message in which the model reads it."""
        return {"role": "tool", "name": self.name, "content": self.content}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Name by which the model calls it.
        function: The function.
        is_async: Whether it is a coroutine function.
        schema: Its JSON schema, for the chat template.
    """

    name: str
    function: Callable[..., Any]
    is_async: bool
    schema: Schema

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Describe a function, a bound method, a `functools.partial` or a callable object.

        Raises:
            ValueError: If it lacks type hints or a Google docstring.
        """
        if not callable(function):
            raise ValueError(f"tools has {function!r}, which cannot be called; pass functions.")
        name = _tool_name(function)
        return cls(name, function, is_async(function), _tool_schema(name, function))


def prepare_tools(functions: Iterable[Callable[..., Any]]) -> dict[str, Tool]:
    """Describe tools, by name.

    Raises:
        ValueError: If one lacks type hints or a Google docstring, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for tool in map(Tool.of, functions):
        if tool.name in tools:
            raise ValueError(f"tools has two functions named {tool.name!r}; the model calls them by name: rename one.")
        tools[tool.name] = tool
    return tools


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a function, or a callable object, is a coroutine function."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


async def call_tool(tool: Tool, arguments: Any) -> ToolResult:
    """Call a tool with a copy of the arguments; an exception becomes its result. Only async tools are awaited."""
    began = time.perf_counter()
    try:
        with exits_refused():
            value = tool.function(**private_copy(arguments))
            content = _result_text(tool.name, await value if tool.is_async else value)
    except BaseException as error:
        if tool.is_async and isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            raise
        with exits_refused():
            message, failure = _explain_failure(tool, arguments, error)
        return ToolResult.error(tool.name, message, failure, time.perf_counter() - began)
    return ToolResult(tool.name, content, None, time.perf_counter() - began)


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")


class _UnreadableResultError(Exception):
    def __init__(self, message: str, failure: FailureKind) -> None:
        super().__init__(message)
        self.failure: FailureKind = failure


def _result_text(name: str, value: Any) -> str:
    """A returned value as text: its `str`, or the joined texts of a list of text blocks."""
    if inspect.iscoroutine(value):
        value.close()
        raise _UnreadableResultError(f"Tool {name} returned a coroutine; define it with async def.", "unsupported")
    if isinstance(value, Generator) or inspect.isasyncgen(value):
        raise _UnreadableResultError(f"Tool {name} returned a generator; return text.", "unsupported")
    blocks = value if isinstance(value, list) and all(isinstance(block, Mapping) for block in value) else []
    if any(str(block.get("type")) in _MEDIA for block in blocks):
        raise _UnreadableResultError(f"Tool {name} returned media; only text is supported.", "unsupported")
    if blocks and all(block.get("type") == "text" and isinstance(block.get("text"), str) for block in blocks):
        value = "".join(block["text"] for block in blocks)
    return _checked_length(name, str(value))


def _checked_length(name: str, text: str) -> str:
    if len(text) > MAX_RESULT_CHARACTERS:
        raise _UnreadableResultError(
            f"The result of tool {name} has {len(text)} characters; at most {MAX_RESULT_CHARACTERS} are allowed.",
            "too_long",
        )
    return str.encode(text, "utf-8", "replace").decode()  # tokenizers refuse lone surrogates


def _explain_failure(tool: Tool, arguments: Any, error: BaseException) -> tuple[str, FailureKind]:
    """The text that the model reads for an exception, and the kind of failure."""
    if isinstance(error, _UnreadableResultError):
        return str(error), error.failure
    if isinstance(error, SystemExit):
        return f"Tool {tool.name} tried to end the process.", "exited"
    try:
        message = _checked_length(tool.name, str(error))
    except _UnreadableResultError as unreadable:
        return str(unreadable), unreadable.failure
    except BaseException:  # an exception's `__str__` is user's code, too, and may call sys.exit
        message = type(error).__name__
    if isinstance(error, TypeError) and not _takes(tool.function, arguments):
        return message, "arguments"
    return message, "raised"


def _takes(function: Callable[..., Any], arguments: Any) -> bool:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some builtin functions have none
        return True
    try:
        signature.bind(**arguments)
    except TypeError:
        return False
    return True


def _tool_name(function: Any) -> str:
    while isinstance(function, functools.partial) and not hasattr(function, "__name__"):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _tool_schema(name: str, function: Any) -> Schema:
    from transformers.utils import get_json_schema

    described, bound = _unwrap(function)
    try:
        schema: Schema = get_json_schema(described)
    except Exception as error:
        raise ValueError(
            f"Tool {name!r} cannot be described to the model ({type(error).__name__}: {error}); give it a Google "
            "docstring with a line for each argument under 'Args:', and every argument a type hint."
        ) from error
    schema["function"]["name"] = name
    parameters = schema["function"]["parameters"]
    for parameter in bound:
        parameters["properties"].pop(parameter, None)
    if "required" in parameters:
        parameters["required"] = [parameter for parameter in parameters["required"] if parameter not in bound]
    return schema


def _unwrap(function: Any) -> tuple[Any, Sequence[str]]:
    """The function that has the docstring and type hints, and the parameters that `functools.partial` binds."""
    bound: list[str] = []
    while isinstance(function, functools.partial):
        bound += [*list(inspect.signature(function.func).parameters)[: len(function.args)], *function.keywords]
        function = function.func
    if not (inspect.isroutine(function) or inspect.isclass(function)):
        function = function.__call__
    return function, bound
