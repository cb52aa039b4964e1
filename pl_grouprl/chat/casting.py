"""Casts arguments that a model wrote as text to the types in the tool's schema.

The rules are those of transformers' `parse_response(..., tools=...)`, which TRL uses.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pl_grouprl.chat.parsing import Message, Schema


def cast_arguments(message: Message, tools: Sequence[Schema]) -> Message:
    """Cast the arguments of a message's calls, in place: the text `7` becomes a number if the schema says `integer`.

    Text that fits no type of the schema, and arguments that are not in it, are left for the tool to refuse.

    Args:
        message: A parsed and checked message.
        tools: Schemas of the tools.

    Returns:
        The message.
    """
    properties = {function["name"]: _properties(function) for function in map(_function, tools) if "name" in function}
    for function in map(_function, message.get("tool_calls", ())):
        arguments = function["arguments"]
        for name, schema in properties.get(function["name"], {}).items():
            if isinstance(arguments, dict) and name in arguments:
                arguments[name] = _cast(arguments[name], tuple(_types(schema)))
    return message


def _function(described: dict[str, Any]) -> dict[str, Any]:
    function: dict[str, Any] = described.get("function", described)
    return function


def _properties(function: dict[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    return properties if isinstance(properties, dict) else {}


def _types(schema: Any) -> Iterator[str]:
    """Names of the types that a schema allows, in its order."""
    if not isinstance(schema, dict):
        return
    declared = schema.get("type")
    yield from (kind for kind in (declared if isinstance(declared, list) else [declared]) if isinstance(kind, str))
    for union in ("anyOf", "oneOf"):
        for choice in schema.get(union) or ():
            yield from _types(choice)
    if schema.get("nullable"):
        yield "null"


def _cast(value: Any, types: Sequence[str]) -> Any:
    if isinstance(value, list) and "array" not in types and types:
        return [_cast(item, types) if isinstance(item, str) else item for item in value]
    if not isinstance(value, str):
        return value
    for kind in types:
        try:
            return _READERS[kind](value)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return value


def _integer(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        number = float(text)
        if not number.is_integer():
            raise
        return int(number)


def _number(text: str) -> int | float:
    number = float(text)
    if "." not in text and number.is_integer():
        return int(number)
    if not math.isfinite(number):
        raise ValueError("JSON has no such number")
    return number


def _boolean(text: str) -> bool:
    return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]


def _null(text: str) -> None:
    if text.strip() not in ("null", "None"):
        raise ValueError("not null")


def _json_of(kind: type) -> Callable[[str], Any]:
    def read(text: str) -> Any:
        value = json.loads(text)
        if not isinstance(value, kind):
            raise ValueError(f"not a {kind.__name__}")
        return value

    return read


_READERS: dict[str, Callable[[str], Any]] = {
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "null": _null,
    "object": _json_of(dict),
    "array": _json_of(list),
}
"""Casts by type; `string` is missing, so text is cast to another of the schema's types if it fits one."""
