"""Environments: objects that live as long as an episode, and whose methods are tools.

An environment has `reset(**row)`, which returns None or text that is appended to the last message of the prompt. Its
other public methods are tools. `get_reward()`, if there is one, is one more reward. Like tools, environments are the
user's code, with the user's rights.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pl_grouprl.chat.parsing import Schema
from pl_grouprl.episodes.tools import MAX_RESULT_CHARACTERS, Tool, ToolResult, call_tool, is_async, prepare_tools
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.exit_gate import exits_refused
from pl_grouprl.utilities.text import describe_error, shorten

COLUMN = "environment"
"""The column that names a row's environment where there are several."""


class Method(NamedTuple):
    """A method of an environment that is a tool.

    Attributes:
        attribute: Its name in the environment.
        is_async: Whether it is a coroutine function.
        schema: Its JSON schema.
    """

    attribute: str
    is_async: bool
    schema: Schema


@dataclass(frozen=True)
class EnvironmentKind:
    """What is known of the environments that a factory makes.

    Attributes:
        class_name: Name of their class.
        factory: Makes one.
        methods: Their tools, by the name that the model calls.
        async_reset: Whether `reset` is a coroutine function.
        async_reward: Whether `get_reward` is a coroutine function; None if there is no such method.
    """

    class_name: str
    factory: Callable[[], Any]
    methods: dict[str, Method]
    async_reset: bool
    async_reward: bool | None

    @classmethod
    def of(cls, factory: Callable[[], Any], instance: Any) -> EnvironmentKind:
        """Describe the environments of a factory by one of them.

        Raises:
            ValueError: If it has no `reset`, or a public method lacks type hints or a Google docstring.
        """
        methods = dict(inspect.getmembers(instance, predicate=inspect.ismethod))
        reset, get_reward = methods.pop("reset", None), methods.pop("get_reward", None)
        class_name = type(instance).__name__
        if reset is None:
            raise ValueError(
                f"environment_factory made a {class_name}, which has no method reset; define reset(self, **row), "
                "which begins an episode and returns None or text for the prompt."
            )
        public = {name: method for name, method in methods.items() if not name.startswith("_")}
        try:
            tools = prepare_tools(public.values()).values()
        except ValueError as error:
            raise ValueError(
                f"environment_factory made a {class_name}, whose public methods are tools. {error} If it is not meant "
                "for the model, let its name begin with an underscore."
            ) from error
        async_reward = None if get_reward is None else is_async(get_reward)
        by_name = {
            tool.name: Method(name, tool.is_async, tool.schema) for name, tool in zip(public, tools, strict=True)
        }
        return cls(class_name, factory, by_name, is_async(reset), async_reward)


class EnvironmentHost:
    """The environments of this process, by number. Methods wait only where the environment's method is async.

    Args:
        tools: Tools that need no environment.
        kinds: The kinds of environments, by the name of their factory.
    """

    def __init__(self, tools: Mapping[str, Tool], kinds: dict[str | None, EnvironmentKind]) -> None:
        self._tools = tools
        self.kinds = kinds
        self.instances: dict[int, Any] = {}

    async def probe(self, number: int, kind: str | None, factory: Callable[[], Any]) -> None:
        """Make an environment to find out what its kind is."""
        self.instances[number] = factory()
        self.kinds[kind] = EnvironmentKind.of(factory, self.instances[number])

    async def call(self, number: int | None, kind: str | None, name: str, arguments: Any) -> ToolResult:
        """Call a tool, or a method of an environment."""
        if name in self._tools:
            return await call_tool(self._tools[name], arguments)
        if number not in self.instances:
            return ToolResult.error(name, "The environment of this episode was lost.", "exited")
        method = self.kinds[kind].methods[name]
        try:
            function = getattr(self.instances[number], method.attribute)
        except Exception as error:
            return ToolResult.error(name, describe_error(error), "raised")
        return await call_tool(Tool(name, function, method.is_async, method.schema), arguments)

    async def reset(self, number: int, kind: str | None, row: Mapping[str, Any]) -> str | None:
        """Begin an episode, in a new environment if there is none of that number.

        Raises:
            RuntimeError: If the factory or `reset` raises, or `reset` returns neither None nor text.
        """
        known = self.kinds[kind]
        try:
            with exits_refused():
                if number not in self.instances:
                    self.instances[number] = self._make(known)
                observation = self.instances[number].reset(**private_copy(dict(row)))
                if known.async_reset:
                    observation = await observation
        except (Exception, SystemExit) as error:
            raise RuntimeError(
                f"The environment {known.class_name} cannot begin an episode with the row {describe_row(row)}: "
                f"{type(error).__name__}: {describe_error(error)}"
            ) from error
        if observation is None:
            return None
        if not isinstance(observation, str) or len(observation) > MAX_RESULT_CHARACTERS:
            raise RuntimeError(
                f"{known.class_name}.reset returned {_describe_value(observation)} for the row {describe_row(row)}; it "
                f"must return None, or text of at most {MAX_RESULT_CHARACTERS} characters that is appended to the "
                "prompt."
            )
        return str.encode(observation, "utf-8", "replace").decode()

    def _make(self, known: EnvironmentKind) -> Any:
        made = known.factory()
        if any(made is other for other in list(self.instances.values())):  # episodes would play on one board
            raise ValueError("environment_factory returned an instance that another episode uses; make one per call")
        return made

    async def reward(self, number: int, kind: str | None) -> float:
        """Call `get_reward`.

        Returns:
            What it returned; NaN in place of None.

        Raises:
            RuntimeError: If it raises, returns no number, or the environment was lost; the text follows its name.
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

    def lose(self, number: int) -> None:
        """Forget an environment in which a call has not returned."""
        self.instances.pop(number, None)


def named_factories(
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
) -> dict[str | None, Callable[[], Any]]:
    """Factories by the name that a row has in its column `environment`; the name of a single one is None.

    Raises:
        ValueError: If one cannot be called, or the dictionary is empty.
    """
    if factory is None:
        return {}
    named: dict[Any, Any] = {**factory} if isinstance(factory, Mapping) else {None: factory}
    if not named:
        raise ValueError("environment_factory is an empty dictionary; pass factories by name, or None.")
    for name, make in named.items():
        if not callable(make):
            argument = "environment_factory" if name is None else f"environment_factory[{name!r}]"
            raise ValueError(f"{argument} is {make!r}; pass a class, or another callable that makes an environment.")
    return named


def check_names(kind: EnvironmentKind, tools: Mapping[str, Tool]) -> None:
    """Refuse methods that are named like tools."""
    if both := sorted(kind.methods.keys() & tools.keys()):
        raise ValueError(
            f"{both} are tools and methods of {kind.class_name}; the model calls them by name: rename one."
        )


def describe_row(row: Mapping[str, Any]) -> str:
    """A row as errors show it."""
    return shorten(dict(row), 300)


def _describe_value(value: Any) -> str:
    return f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"


def kind_of_row(row: Mapping[str, Any], kinds: Mapping[str | None, EnvironmentKind]) -> str | None:
    """The name of a row's environment.

    Raises:
        ValueError: If there are several, and the row names none of them.
    """
    if None in kinds or not kinds:
        return None
    name = row.get(COLUMN)
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(
            f"A row has {COLUMN}={name!r}, which is not among the environments passed to environment_factory; use one "
            f"of {list(kinds)}."
        )
    return name
