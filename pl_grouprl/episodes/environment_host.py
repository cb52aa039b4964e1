"""The environments of one process, and calls of their methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pl_grouprl.episodes.environment_kinds import EnvironmentKind
from pl_grouprl.episodes.tools import MAX_RESULT_CHARACTERS, Tool, ToolResult, call_tool
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.exit_gate import exits_refused
from pl_grouprl.utilities.text import describe_error, shorten


class EnvironmentHost:
    """The environments of this process, by number. Its coroutines suspend only in the user's async methods.

    Args:
        tools: Tools that need no environment.
        kinds: The kinds of environments, by the name of their factory.
    """

    def __init__(self, tools: Mapping[str, Tool], kinds: dict[str | None, EnvironmentKind]) -> None:
        self._tools = tools
        self.kinds = kinds
        self.instances: dict[int, Any] = {}

    async def probe(self, number: int, kind: str | None, factory: Callable[[], Any]) -> None:
        """Make an environment, and describe its kind from it."""
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
        described = self.kinds[kind]
        try:
            with exits_refused():
                if number not in self.instances:
                    self.instances[number] = self._make(described)
                observation = self.instances[number].reset(**private_copy(dict(row)))
                if described.async_reset:
                    observation = await observation
        except (Exception, SystemExit) as error:
            raise RuntimeError(
                f"The environment {described.class_name} cannot begin an episode with the row {describe_row(row)}: "
                f"{type(error).__name__}: {describe_error(error)}"
            ) from error
        if observation is None:
            return None
        if not isinstance(observation, str) or len(observation) > MAX_RESULT_CHARACTERS:
            raise RuntimeError(
                f"{described.class_name}.reset returned {_describe_value(observation)} for the row "
                f"{describe_row(row)}; it must return None, or text of at most {MAX_RESULT_CHARACTERS} characters that "
                "is appended to the prompt."
            )
        return str.encode(observation, "utf-8", "replace").decode()

    def _make(self, described: EnvironmentKind) -> Any:
        made = described.factory()
        if any(made is other for other in list(self.instances.values())):  # episodes would share its state
            raise ValueError("environment_factory returned an instance that another episode uses; make one per call")
        return made

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


def describe_row(row: Mapping[str, Any]) -> str:
    """A row as text for errors."""
    return shorten(dict(row), 300)


def _describe_value(value: Any) -> str:
    return f"{len(value)} characters" if isinstance(value, str) else f"a {type(value).__name__}"
