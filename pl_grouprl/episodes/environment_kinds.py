"""What is known about environments before an episode begins: factories, tools, and which rows use them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from pl_grouprl.chat.parsing import Schema
from pl_grouprl.episodes.tools import Tool, is_async, prepare_tools

COLUMN = "environment"
"""The column that chooses a row's environment if there are several."""


class Method(NamedTuple):
    """A method of an environment that the model may call.

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
    """What the environments of one factory have in common.

    Attributes:
        class_name: Name of their class.
        factory: Makes one.
        methods: Their tools, by name.
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
        """Describe a factory's environments from one of them.

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


def named_factories(
    factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
) -> dict[str | None, Callable[[], Any]]:
    """Factories by the value of a row's column `environment`; None for a single factory.

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
    """Refuse methods with the name of a tool."""
    if both := sorted(kind.methods.keys() & tools.keys()):
        raise ValueError(
            f"{both} are tools and methods of {kind.class_name}; the model calls them by name: rename one."
        )


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
