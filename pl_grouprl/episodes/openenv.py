"""Environments of OpenEnv servers (github.com/meta-pytorch/OpenEnv), through its library `openenv`."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from pl_grouprl.episodes.tools import ListedEnvironment, Tool, tool_schema
from pl_grouprl.utilities.optional import OPENENV_AVAILABLE, require
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.text import describe_error

STEP = "step"
"""Name of the tool of an environment without tools; OpenEnv reserves it."""

_HIDDEN = {"metadata", "done", "reward"}
"""Fields that every observation has; the model does not read them."""


class OpenEnv(ListedEnvironment):
    """An environment on an OpenEnv server, for `environment_factory`; each instance has a separate session.

    If the environment takes MCP actions, its tools are the model's. Otherwise the model has one tool, `step`, whose
    arguments are the fields of the environment's action. The model reads the observation after each call, and the first
    one at the end of the prompt. After the environment says that it is done, calls fail.

    Args:
        base_url: Address of the server, such as `http://localhost:8000`. It must allow as many sessions as there are
            rollouts in a batch (`max_concurrent_envs` of `create_app`).
        reward: The episode's reward: from the `last` step that had one, or the `sum` of all; 0 without any. With
            `steps`, each step's reward goes to its turn instead, as with `get_step_reward`.
        observation_key: Field of an observation that the model reads. If None, it reads all that are not null, as JSON,
            or as text if there is only one.
        reset_columns: Columns of a row that the server's reset gets, if the row has them.
        timeout: Maximum seconds to wait for a reply of the server.
        headers: HTTP headers, such as `Authorization`.

    Raises:
        ModuleNotFoundError: If the library is missing.
        OSError: If the server cannot be reached.
    """

    def __init__(
        self,
        base_url: str,
        *,
        reward: Literal["last", "sum", "steps"] = "last",
        observation_key: str | None = None,
        reset_columns: Sequence[str] = ("seed",),
        timeout: float = 60.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        require(OPENENV_AVAILABLE, "OpenEnv", "openenv")
        from openenv.core import GenericEnvClient

        valid = reward in ("last", "sum", "steps")
        check_options({"OpenEnv.reward": (reward, valid, "'last', 'sum' or 'steps'")})
        self._base_url, self._headers, self._timeout = base_url.rstrip("/"), dict(headers or {}), timeout
        self._mode, self._key, self._reset_columns = reward, observation_key, reset_columns
        asynchronous = GenericEnvClient(base_url=base_url, message_timeout_s=timeout, headers=self._headers or None)
        self._client = asynchronous.sync()
        weakref.finalize(self, self._client.close)
        self._rewards: list[float | None] = []
        self._end_reason: str | None = "reset was not called"

    def reset(self, **row: Any) -> str | None:
        """Begin an episode; returns the first observation, None if it has no fields."""
        columns = {name: row[name] for name in self._reset_columns if name in row}
        result = self._client.reset(**columns)
        self._rewards, self._end_reason = [], "the environment is done" if result.done else None
        return self._read(result.observation) or None

    def list_tools(self) -> list[Tool]:
        """The tools of the environment, or the one tool that steps."""
        import httpx2

        address = self._base_url.replace("ws", "http", 1) if self._base_url.startswith("ws") else self._base_url
        reply = httpx2.get(f"{address}/schema", headers=self._headers, timeout=self._timeout)
        action = reply.raise_for_status().json()["action"]
        properties = action.get("properties", {})
        if properties.get("type", {}).get("const") == "call_tool":
            found = self._client.step({"type": "list_tools"}).observation["tools"]
        else:
            fields = {name: one for name, one in properties.items() if name != "metadata"}
            parameters = {**action, "properties": fields}
            description = parameters.pop("description", "Act in the environment.")
            found = [{"name": STEP, "description": description, "input_schema": parameters}]
        return [
            Tool(one["name"], None, False, tool_schema(one["name"], one["description"], one["input_schema"]))
            for one in found
        ]

    def call_tool(self, name: str, /, **arguments: Any) -> str:
        """Step.

        Raises:
            RuntimeError: If the episode has ended, or the server or its tool reports an error.
        """
        if self._end_reason is not None:
            raise RuntimeError(f"The episode has ended: {self._end_reason}.")
        action = arguments if name == STEP else {"type": "call_tool", "tool_name": name, "arguments": arguments}
        try:
            result = self._client.step(action)
        except Exception as error:
            # The client reconnects by itself, to an environment that was not reset.
            if not isinstance(error, RuntimeError):
                self._end_reason = "the connection to the environment was lost"
            raise RuntimeError(describe_error(error)) from error
        self._rewards.append(None if result.reward is None else float(result.reward))
        if result.done:
            self._end_reason = "the environment is done"
        if name == STEP:
            return self._read(result.observation)
        if failure := result.observation.get("error"):
            raise RuntimeError(failure["message"])
        returned = result.observation["result"]
        content = returned.get("content") if isinstance(returned, dict) else None
        text = "".join(block.get("text") or "" for block in content) if content else _as_text(returned)
        if content and returned.get("is_error"):
            raise RuntimeError(text)
        return text

    def _read(self, observation: Mapping[str, Any]) -> str:
        """What the model reads of an observation."""
        fields = {name: value for name, value in observation.items() if name not in _HIDDEN and value is not None}
        if self._key is not None:
            return _as_text(fields.get(self._key, ""))
        return _as_text(next(iter(fields.values()), "") if len(fields) <= 1 else fields)

    @property
    def get_reward(self) -> Callable[[], float]:
        """The method that returns the episode's reward; none if steps have their own."""
        if self._mode == "steps":
            raise AttributeError("get_reward")  # so that hasattr is False
        return self._total

    @property
    def get_step_reward(self) -> Callable[[], float | None]:
        """The method that returns the last step's reward; none if the episode has one."""
        if self._mode != "steps":
            raise AttributeError("get_step_reward")  # so that hasattr is False
        return self._take

    def _total(self) -> float:
        given = [reward for reward in self._rewards if reward is not None]
        return sum(given if self._mode == "sum" else given[-1:])

    def _take(self) -> float | None:
        return self._rewards.pop() if self._rewards else None


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
