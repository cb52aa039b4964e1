"""The parsers that come with the package, and the table that users add theirs to."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pl_grouprl.chat.parsing import (
    MalformedTurnError,
    Message,
    Region,
    Schema,
    ToolParser,
    read_json,
    read_regions,
)


def _function_call(found: re.Match[str], body: str) -> Any:
    return {"type": "function", "function": read_json(body)}


def _named_json_call(found: re.Match[str], body: str) -> Any:
    return {"type": "function", "function": {"name": found[1], "arguments": read_json(body)}}


def _text(found: re.Match[str], body: str) -> str:
    return body.strip()


_THINK = Region("reasoning_content", re.compile("<think>"), re.compile(r"</think>\s*"), _text)
_JSON_CALL = Region("tool_calls", re.compile("<tool_call>"), re.compile(r"</tool_call>\s*"), _function_call)
_IM_END = re.compile(r"<\|im_end\|>\s*")


def parse_hermes(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Qwen2.5 and Qwen3: `<think>`, content, and calls as JSON in `<tool_call>` tags."""
    return read_regions(text, (_THINK, _JSON_CALL), _IM_END)


_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")


def _tagged_call(found: re.Match[str], body: str) -> Any:
    arguments: dict[str, Any] = {}
    position = 0
    while (opened := _PARAMETER.search(body, position)) and (end := body.find("</parameter>", opened.end())) >= 0:
        arguments[opened[1]] = _json_or_text(body[opened.end() : end].strip())
        position = end
    return {"type": "function", "function": {"name": found[1], "arguments": arguments}}


def _json_or_text(text: str) -> Any:
    try:
        return read_json(text)
    except MalformedTurnError:
        return text


_TAGGED_CALL = Region(
    "tool_calls",
    re.compile(r"<tool_call>\s*<function=([^\n>]{1,256})>"),
    re.compile(r"</tool_call>\s*"),
    _tagged_call,
)


def parse_tagged(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Qwen3.5: `<think>`, content, and calls as `<function=..>` with `<parameter=..>` tags."""
    return read_regions(text, (_THINK, _TAGGED_CALL), _IM_END)


_LLAMA_CALL = Region(
    "tool_calls",
    re.compile(r'\{"name":\s*"([^"]+)",\s*"parameters":\s*'),
    re.compile(r"\}<\|eot_id\|>\s*"),
    _named_json_call,
)
_EOT = re.compile(r"<\|eot_id\|>\s*")


def parse_llama3(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Llama 3.1 and 3.2: content, or one call as JSON with `name` and `parameters`."""
    return read_regions(text, (_LLAMA_CALL,), _EOT)


def parse_plain(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of the built-in tasks' format; see `templates/plain.jinja`."""
    written, end, _ = text.partition("<end>")
    content, *calls = written.split("<call>")
    message: Message = {"role": "assistant", "content": content.strip()}
    if calls and not end:
        raise MalformedTurnError("a call is cut off")
    if calls:
        message["tool_calls"] = [{"type": "function", "function": _positional_call(call, tools)} for call in calls]
    return message


def _positional_call(text: str, tools: Sequence[Schema]) -> dict[str, Any]:
    name, _, rest = text.strip().partition(" ")
    if not name:
        raise MalformedTurnError("a call has no name")
    functions = [tool.get("function", tool) for tool in tools]
    schema = next((function for function in functions if function.get("name") == name), None)
    parameters = schema.get("parameters", {}).get("properties", {}) if schema else {"input": {}}
    values = rest.split(" ", max(len(parameters) - 1, 0)) if rest else []
    places = parameters or {"input": {}}  # for a tool without parameters too, which then refuses what it was given
    arguments = {key: _cast(value, schema) for (key, schema), value in zip(places.items(), values, strict=False)}
    return {"name": name, "arguments": arguments}


def _cast(value: str, schema: Schema) -> Any:
    """Convert a value to the type that the schema asks for; unconvertible ones stay text, for the tool to refuse."""
    casts: dict[Any, Callable[[str], Any]] = {"integer": int, "number": float, "boolean": _boolean}
    try:
        return casts.get(schema.get("type"), str)(value)
    except (ValueError, KeyError, TypeError):
        return value


def _boolean(value: str) -> bool:
    return {"true": True, "false": False}[value.lower()]


_LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_PARSERS: list[ToolParser] = [
    ToolParser("plain", ("<call>", "<result>"), "<assistant>", parse_plain),
    ToolParser("llama3", ("<|start_header_id|>", '"parameters'), _LLAMA_HEADER, parse_llama3),
    ToolParser("qwen3", ("<|im_start|>", "<tool_call>", '"arguments'), "<|im_start|>assistant\n", parse_hermes),
    ToolParser("qwen3_5", ("<|im_start|>", "<tool_call>", "<function="), "<|im_start|>assistant\n", parse_tagged),
]


def register_tool_parser(parser: ToolParser) -> None:
    """Add a parser. It precedes those added before it, and replaces one of the same name.

    Args:
        parser: Takes effect for every `ChatFormat` made afterwards whose chat template contains its markers.
    """
    _PARSERS[:] = [other for other in _PARSERS if other.name != parser.name] + [parser]


def find_tool_parser(chat_template: str) -> ToolParser | None:
    """The parser of the family that a chat template belongs to; None if it belongs to no known one."""
    return next((p for p in reversed(_PARSERS) if all(marker in chat_template for marker in p.markers)), None)


def tool_parsers() -> tuple[ToolParser, ...]:
    """All parsers, in the order in which they were added."""
    return tuple(_PARSERS)
