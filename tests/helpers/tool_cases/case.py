"""A scripted conversation with tools, and what the model writes in it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

END = "<|im_end|>"
COLUMNS = ("environment", "difficulty", "topic")
"""Of the rows below, besides the prompt."""

Answer = str
"""What the model writes in one turn; it ends with `END`, unless it is cut."""


@dataclass(frozen=True)
class ToolCase:
    """Prompts, tools, and what the model answers.

    Attributes:
        answers: Of each rollout in turn, group by group: the answers of its turns.
        rows: Of the data set, one for each group.
        tools: As in TRL's `GRPOTrainer`, and so the next three.
        max_completion_length: Longest completion in tokens, results of tools included.
        template_kwargs: Passed to the chat template.
    """

    answers: tuple[tuple[Answer, ...], ...]
    rows: tuple[dict[str, Any], ...] = ({"prompt": [{"role": "user", "content": "What is 3 times 4?"}]},)
    tools: tuple[Callable[..., Any], ...] = ()
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None
    max_tool_calling_iterations: int | None = None
    max_completion_length: int = 1024
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_generations(self) -> int:
        return len(self.answers) // len(self.rows)


def seen_by_reward(arguments: Mapping[str, Any], rollout: int) -> dict[str, Any]:
    """What a reward function was told about one rollout, for comparison; `arguments` are its keyword arguments."""
    environments = arguments.get("environments")
    columns = {name: arguments[name][rollout] for name in COLUMNS if name in arguments}
    return {
        "completion_ids": arguments["completion_ids"][rollout],
        "prompt_messages": arguments["prompts"][rollout],
        "messages": arguments["completions"][rollout],
        "environment": None if environments is None else type(environments[rollout]).__name__,
        "columns": columns,
    }


def call(name: str, /, **arguments: Any) -> str:
    """A call of a tool as the model writes it."""
    return call_json(json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False))


def call_json(text: str) -> str:
    """A call of a tool with any text between its marks."""
    return f"<tool_call>\n{text}\n</tool_call>"


def user(text: str, **columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": text}], **columns}


def conversation() -> dict[str, Any]:
    """A prompt with a system message and an earlier call of a tool."""
    earlier = [{"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 2}}}]
    return {
        "prompt": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": "2 times 2?"},
            {"role": "assistant", "content": "", "tool_calls": earlier},
            {"role": "tool", "name": "multiply", "content": "4"},
            {"role": "assistant", "content": "4."},
            {"role": "user", "content": "And 3 times 4?"},
        ]
    }


GOOD = call("multiply", a=3, b=4) + END
DONE = "Done!" + END
