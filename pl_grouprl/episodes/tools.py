"""Tools and environments: what the model may call, and the text and images that it reads as their result.

Both are the user's code and run with the user's rights, with arguments that the model chose. What the model writes is
never evaluated as code. Results and errors have the same text as with TRL's `GRPOTrainer`.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import logging
import math
import time
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, Literal

from pl_grouprl.chat.parsing import Schema
from pl_grouprl.media.rows import read_image
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.processes import exits_refused
from pl_grouprl.utilities.text import describe_error, shorten

log = logging.getLogger(__name__)

FailureKind = Literal["unknown", "arguments", "raised", "timeout", "exited", "too_long", "unsupported"]
"""Why a call failed, in order: there is no such tool; the arguments do not match its signature; it raised; it took too
long; it tried to end the process, its process ended, or its environment was lost in an earlier call; its result is too
long; the type of the call or of its result is not supported."""

MAX_RESULT_CHARACTERS = 2**20
"""Maximum length of a tool's result or error message; the model reads a short error instead of a longer one."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asked for.

    Attributes:
        name: Name of the tool.
        arguments: Its keyword arguments, as parsed; anything but a mapping with string keys is an error.
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
        reward: What the environment's `get_step_reward` returned after the call, NaN if it failed; None without one.
        images: Images in it, each with the number of characters of `content` before it, as PNG files in base64, so
            that workers can send them.
    """

    name: str
    content: str
    failure: FailureKind | None = None
    seconds: float = 0.0
    reward: float | None = None
    images: Sequence[tuple[int, str]] = ()

    @classmethod
    def error(cls, name: str, message: str, failure: FailureKind, seconds: float = 0.0) -> ToolResult:
        """The result of a call that failed: a dictionary with its `error`, written as text."""
        return cls(name, str({"error": message}), failure, seconds)

    def without_images(self) -> ToolResult:
        """The result in its place for a model that reads only text: an error."""
        error = f"Tool {self.name} returned an image; only text is supported."
        return replace(self.error(self.name, error, "unsupported", self.seconds), reward=self.reward)

    @property
    def message(self) -> dict[str, Any]:
        """The chat message in which the model reads it; images are parts `{"type": "image"}` without contents."""
        content: Any = self.content
        if self.images:
            ends = [*(place for place, _ in self.images), len(self.content)]
            texts = [self.content[start:end] for start, end in pairwise([0, *ends])]
            parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})]
            content = [part for part in parts[:-1] if part.get("text") != ""]
        return {"role": "tool", "name": self.name, "content": content}


def tool_schema(name: str, description: str, parameters: Schema) -> Schema:
    """A tool's JSON schema, as chat templates take it, from what a server says of the tool."""
    function = {"name": name, "description": description, "parameters": {"properties": {}, **parameters}}
    return {"type": "function", "function": function}


@dataclass(frozen=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Name by which the model calls it.
        function: The function; None for a method of an environment, which each instance has.
        is_async: Whether it is a coroutine function.
        schema: Its JSON schema, for the chat template.
    """

    name: str
    function: Any
    is_async: bool
    schema: Schema

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Describe a function, a bound method, a `functools.partial` or a callable object.

        Raises:
            ValueError: If it lacks type hints or a Google docstring.
        """
        from transformers.utils import get_json_schema

        described: Any = function
        name: Any = None
        bound: list[str] = []
        while isinstance(described, partial):
            name = name or getattr(described, "__name__", None)
            parameters = list(inspect.signature(described.func).parameters)
            bound += [*parameters[: len(described.args)], *described.keywords]
            described = described.func
        name = name or getattr(described, "__name__", type(described).__name__)
        try:
            is_function = inspect.isroutine(described) or inspect.isclass(described)
            schema: Schema = get_json_schema(described if is_function else described.__call__)
        except Exception as error:
            raise ValueError(
                f"Tool {name!r} cannot be described to the model ({type(error).__name__}: {error}); give it a Google "
                "docstring with a line for each argument under 'Args:', and every argument a type hint."
            ) from error
        schema["function"]["name"] = name
        arguments = schema["function"]["parameters"]
        arguments["properties"] = {key: value for key, value in arguments["properties"].items() if key not in bound}
        if "required" in arguments:
            arguments["required"] = [key for key in arguments["required"] if key not in bound]
        return cls(name, function, is_async(function), schema)


class ToolServer(ABC):
    """Several tools at once, in place of a function in `tools`."""

    @abstractmethod
    def tools(self) -> list[Tool]:
        """Describe them."""


def prepare_tools(functions: Iterable[Callable[..., Any] | ToolServer | Tool]) -> dict[str, Tool]:
    """Describe tools, by name.

    Raises:
        ValueError: If one lacks type hints or a Google docstring, or two have the same name.
    """
    tools: dict[str, Tool] = {}
    for tool in chain.from_iterable(one.tools() if isinstance(one, ToolServer) else [one] for one in functions):
        tool = tool if isinstance(tool, Tool) else Tool.of(tool)
        if tool.name in tools:
            raise ValueError(f"two tools are named {tool.name!r}; rename or remove one.")
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
            content, failure, images = _read_result(tool.name, await value if tool.is_async else value)
    except BaseException as error:
        if tool.is_async and isinstance(error, (asyncio.CancelledError, GeneratorExit)):
            raise
        with exits_refused():
            (content, failure), images = _explain(tool, arguments, error), []
    seconds = time.perf_counter() - began
    if failure is not None:
        return ToolResult.error(tool.name, content, failure, seconds)
    return ToolResult(tool.name, content, None, seconds, images=images)


def _read_result(name: str, value: Any) -> tuple[str, FailureKind | None, list[tuple[int, str]]]:
    """A returned value as text, and its images: its `str`, or blocks of text and images. Or an error, and its kind."""
    if inspect.iscoroutine(value):
        value.close()
        return f"Tool {name} returned a coroutine; define it with async def.", "unsupported", []
    if isinstance(value, Generator) or inspect.isasyncgen(value):
        return f"Tool {name} returned a generator; return text.", "unsupported", []
    blocks = value if isinstance(value, list) and all(isinstance(block, Mapping) for block in value) else []
    kinds = [str(block.get("type")) for block in blocks]
    if {*kinds} & {"image_url", "video", "audio"}:
        return f"Tool {name} returned media; only text and images are supported.", "unsupported", []
    texts = [block.get("text") if kind == "text" else "" for kind, block in zip(kinds, blocks, strict=True)]
    if not blocks or not {*kinds} <= {"text", "image"} or not all(isinstance(text, str) for text in texts):
        return *_limit_length(name, str(value), None), []
    content, failure = _limit_length(name, "".join(map(str, texts)), None)
    places = accumulate((len(str(text)) for text in texts), initial=0)
    shown = zip(places, kinds, blocks, strict=False)
    return content, failure, [(place, _png(block)) for place, kind, block in shown if kind == "image"]


def _png(block: Mapping[str, Any]) -> str:
    """An image block's image, `image` (TRL) or `data` in base64 (MCP), as a PNG file in base64."""
    file = io.BytesIO()
    read_image(b64decode(block["data"]) if "data" in block else block.get("image")).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


def _explain(tool: Tool, arguments: Any, error: BaseException) -> tuple[str, FailureKind | None]:
    """The text that the model reads for an exception, and the kind of failure."""
    if isinstance(error, SystemExit):
        return f"Tool {tool.name} tried to end the process.", "exited"
    is_mismatch = isinstance(error, TypeError) and not _takes(tool.function, arguments)
    failure: FailureKind = "arguments" if is_mismatch else "raised"
    try:
        return _limit_length(tool.name, str(error), failure)
    except BaseException:  # an exception's `__str__` is user's code, too, and may call sys.exit
        return type(error).__name__, failure


def _limit_length(name: str, text: str, failure: FailureKind | None) -> tuple[str, FailureKind | None]:
    if len(text) > MAX_RESULT_CHARACTERS:
        allowed = f"at most {MAX_RESULT_CHARACTERS} are allowed."
        return f"The result of tool {name} has {len(text)} characters; {allowed}", "too_long"
    return str.encode(text, "utf-8", "replace").decode(), failure  # tokenizers reject lone surrogates


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


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that never waits, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise RuntimeError("the coroutine waits for something")


class Environment(ABC):  # noqa: B024 (recognized by its methods)
    """Any class with a method `reset`, which begins an episode; its other public methods are tools.

    `reset(**row)` returns None, or text that is appended to the last message of the prompt. `get_reward()`, if defined,
    adds a reward. So does `get_step_reward()`, for the turn: it is called after each call of a method, even if the call
    raised, and returns a number, or None. Like tools, environments are the user's code and run with the user's rights.

    Inheriting from this class is optional: environments written for TRL's `GRPOTrainer` work unchanged.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return any("reset" in vars(base) for base in other.__mro__) if cls is Environment else NotImplemented


class ListedEnvironment(ABC):
    """An environment whose tools are known only once it is made, such as the tools of a server."""

    @abstractmethod
    def reset(self, **row: Any) -> Any:
        """Begin an episode; see `Environment`."""

    @abstractmethod
    def list_tools(self) -> list[Tool]:
        """Describe its tools, without functions."""

    @abstractmethod
    def call_tool(self, name: str, /, **arguments: Any) -> Any:
        """Call a tool; a coroutine if the tool is async."""


EnvironmentFactory = Callable[[], Environment] | Callable[..., Any]
"""A class, a function that returns an instance, or (in YAML) a class with its arguments."""


COLUMN = "environment"
"""The column that chooses a row's environment if there are several."""


@dataclass(frozen=True)
class EnvironmentKind:
    """What the environments of one factory have in common.

    Attributes:
        class_name: Name of their class.
        factory: Makes one.
        methods: Their tools, by name, each with the name of its attribute and no function.
        async_reset: Whether `reset` is a coroutine function.
        async_reward: Whether `get_reward` is a coroutine function; None if there is no such method.
        has_step_reward: Whether there is a `get_step_reward`.
    """

    class_name: str
    factory: Callable[[], Any]
    methods: dict[str, Tool]
    async_reset: bool
    async_reward: bool | None
    has_step_reward: bool

    @property
    def reward_name(self) -> str | None:
        """The class name if there is a `get_reward` or a `get_step_reward`."""
        return None if self.async_reward is None and not self.has_step_reward else self.class_name

    @classmethod
    def of(cls, factory: Callable[[], Any], instance: Any) -> EnvironmentKind:
        """Describe a factory's environments from one of them.

        Raises:
            ValueError: If it has no `reset`, `get_step_reward` is async, or a public method lacks type hints or a
                Google docstring.
        """
        methods = dict(inspect.getmembers(instance, predicate=inspect.ismethod))
        reset, get_reward = methods.pop("reset", None), methods.pop("get_reward", None)
        get_step_reward = methods.pop("get_step_reward", None)
        class_name = type(instance).__name__
        if reset is None:
            raise ValueError(f"environment_factory made a {class_name}, which has no method reset; define one.")
        if get_step_reward is not None and is_async(get_step_reward):
            raise ValueError(f"{class_name}.get_step_reward is async; define it with def, since it follows sync tools.")
        if isinstance(instance, ListedEnvironment):
            listed = prepare_tools(instance.list_tools())
            async_reward = None if get_reward is None else is_async(get_reward)
            return cls(class_name, factory, listed, is_async(reset), async_reward, get_step_reward is not None)
        public = {name: method for name, method in methods.items() if not name.startswith("_")}
        try:
            tools = prepare_tools(public.values()).values()
        except ValueError as error:
            raise ValueError(
                f"environment_factory made a {class_name}, whose public methods are tools. {error} If it is not meant "
                "for the model, let its name begin with an underscore."
            ) from error
        described = {
            tool.name: replace(tool, name=name, function=None) for name, tool in zip(public, tools, strict=True)
        }
        async_reward = None if get_reward is None else is_async(get_reward)
        return cls(class_name, factory, described, is_async(reset), async_reward, get_step_reward is not None)


class EnvironmentHost:
    """The environments of this process, by number. Its coroutines suspend only in the user's async methods.

    Args:
        tools: Tools that need no environment.
        kinds: The kinds of environments, by the name of their factory.
    """

    def __init__(self, tools: Mapping[str, Tool], kinds: dict[str | None, EnvironmentKind]) -> None:
        self.tools = tools
        self.kinds = kinds
        self.instances: dict[int | None, Any] = {}

    async def probe(self, number: int, kind: str | None, factory: Callable[[], Any]) -> None:
        """Make an environment, and describe its kind from it."""
        self.instances[number] = factory()
        self.kinds[kind] = EnvironmentKind.of(factory, self.instances[number])

    async def call(self, number: int | None, kind: str | None, name: str, arguments: Any) -> ToolResult:
        """Call a tool, or a method of an environment."""
        if name in self.tools:
            return await call_tool(self.tools[name], arguments)
        if number not in self.instances:
            return ToolResult.error(name, "The environment of this episode was lost.", "exited")
        method = self.kinds[kind].methods[name]
        try:
            instance = self.instances[number]
            is_listed = isinstance(instance, ListedEnvironment)
            function = partial(instance.call_tool, name) if is_listed else getattr(instance, method.name)
        except Exception as error:
            return ToolResult.error(name, describe_error(error), "raised")
        result = await call_tool(replace(method, name=name, function=function), arguments)
        if not self.kinds[kind].has_step_reward:
            return result
        try:
            with exits_refused():
                reward = self.instances[number].get_step_reward()
                return replace(result, reward=None if reward is None else float(reward))
        except (Exception, SystemExit) as error:
            what = f"{self.kinds[kind].class_name}.get_step_reward raised {type(error).__name__}"
            log.warning("%s: %s; the episode has no such reward.", what, describe_error(error))
            return replace(result, reward=math.nan)

    async def reset(self, number: int, kind: str | None, row: Mapping[str, Any]) -> str | None:
        """Begin an episode, in a new environment if there is none of that number.

        Raises:
            RuntimeError: If the factory or `reset` raises, or `reset` returns neither None nor text.
        """
        described, row_text = self.kinds[kind], shorten(dict(row), 300)
        try:
            with exits_refused():
                if number not in self.instances:
                    made = described.factory()
                    if any(made is other for other in list(self.instances.values())):
                        raise ValueError("environment_factory returned an instance that another episode uses")
                    self.instances[number] = made
                observation = self.instances[number].reset(**private_copy(dict(row)))
                if described.async_reset:
                    observation = await observation
        except (Exception, SystemExit) as error:
            raise RuntimeError(
                f"The environment {described.class_name} cannot begin an episode with the row {row_text}: "
                f"{type(error).__name__}: {describe_error(error)}"
            ) from error
        if observation is None:
            return None
        if not isinstance(observation, str) or len(observation) > MAX_RESULT_CHARACTERS:
            is_text = isinstance(observation, str)
            returned = f"{len(observation)} characters" if is_text else f"a {type(observation).__name__}"
            expected = f"it must return None, or text of at most {MAX_RESULT_CHARACTERS} characters"
            raise RuntimeError(f"{described.class_name}.reset returned {returned} for the row {row_text}; {expected}.")
        return str.encode(observation, "utf-8", "replace").decode()

    async def reward(self, number: int, kind: str | None) -> float:
        """Call `get_reward`.

        Returns:
            What it returned; NaN in place of None.

        Raises:
            RuntimeError: If it raises, does not return a number, or the environment was lost. The message continues a
                sentence that begins with the method's name.
        """
        if number not in self.instances:
            raise RuntimeError("was not called, because the environment was lost")
        try:
            with exits_refused():
                reward = self.instances[number].get_reward()
                if self.kinds[kind].async_reward:
                    reward = await reward
                return math.nan if reward is None else float(reward)
        except (Exception, SystemExit) as error:
            raise RuntimeError(f"raised {type(error).__name__}: {describe_error(error)}") from error

    def drop(self, number: int) -> None:
        """Drop an environment that a call may still be using."""
        self.instances.pop(number, None)
