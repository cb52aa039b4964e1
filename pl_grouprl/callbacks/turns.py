"""Formats an episode as one line: the model's text, its calls, and their results."""

from __future__ import annotations

import json
from typing import Any

from pl_grouprl.types import Messages


def turns_line(messages: Messages) -> str:
    """Join the turns, such as `Let me see. look_up(key="a") -> 41 | It is 41.`."""
    turns: list[str] = []
    before = None
    for message in messages:
        content = str(message.get("content") or "").strip()
        if message["role"] == "tool" and turns:
            turns[-1] += f"{', ' if before == 'tool' else ' -> '}{content}"
        else:
            turns.append(" ".join(filter(None, (content, _calls(message)))))
        before = message["role"]
    return " | ".join(turns)


def _calls(message: dict[str, Any]) -> str:
    return ", ".join(_call(call.get("function", call)) for call in message.get("tool_calls") or ())


def _call(function: dict[str, Any]) -> str:
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        written = ", ".join(f"{name}={_json(value)}" for name, value in arguments.items())
    else:
        written = _json(arguments)
    return f"{function['name']}({written})"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
