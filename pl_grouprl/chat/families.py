"""The built-in parsers, and the registry to which users can add theirs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pl_grouprl.chat.parsing import (
    MalformedTurnError,
    Message,
    Region,
    Schema,
    ToolParser,
    TurnGrammar,
    read_json,
)


def _function_call(found: re.Match[str], body: str) -> Any:
    return {"type": "function", "function": read_json(body)}


def _named_json_call(found: re.Match[str], body: str) -> Any:
    return {"type": "function", "function": {"name": found["name"], "arguments": read_json(body)}}


def _text(found: re.Match[str], body: str) -> str:
    return body.strip()


_THINK = Region("reasoning_content", "<think>", r"</think>\s*", _text)
_JSON_CALL = Region("tool_calls", "<tool_call>", r"</tool_call>\s*", _function_call)
_HERMES = TurnGrammar(_THINK, _JSON_CALL, end=r"<\|im_end\|>\s*")


def parse_hermes(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Qwen2.5 and Qwen3: `<think>`, content, and calls as JSON in `<tool_call>` tags."""
    return _HERMES.read(text)


_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")


def _tagged_call(found: re.Match[str], body: str) -> Any:
    arguments: dict[str, Any] = {}
    position = 0
    while (opened := _PARAMETER.search(body, position)) and (end := body.find("</parameter>", opened.end())) >= 0:
        arguments[opened[1]] = body[opened.end() : end].strip()
        position = end
    return {"type": "function", "function": {"name": found["name"], "arguments": arguments}}


_TAGGED_CALL = Region(
    "tool_calls", r"<tool_call>\s*<function=(?P<name>[^\n>]{1,256})>", r"</tool_call>\s*", _tagged_call
)
_TAGGED = TurnGrammar(_THINK, _TAGGED_CALL, end=r"<\|im_end\|>\s*")


def parse_tagged(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Qwen3.5: `<think>`, content, and calls as `<function=..>` with `<parameter=..>` tags of text."""
    return _TAGGED.read(text)


_TAGGED_CALLS = TurnGrammar(_TAGGED_CALL, end=r"<\|im_end\|>\s*")


def parse_nemotron(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Nemotron 3: calls as in Qwen3.5; the prompt opens a `<think>`, which the model may close."""
    text = text.removeprefix("</think>")  # a prompt without reasoning closes it too
    thought, closed, rest = text.partition("</think>")
    message = _TAGGED_CALLS.read(rest.lstrip() if closed else text)
    return {**message, "reasoning_content": thought.strip()} if closed else message


_LLAMA_CALL = Region(
    "tool_calls",
    r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
    r"\}<\|eot_id\|>\s*",
    _named_json_call,
)
_LLAMA = TurnGrammar(_LLAMA_CALL, end=r"<\|eot_id\|>\s*")


def parse_llama3(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Llama 3.1 and 3.2: content, or one call as JSON with `name` and `parameters`."""
    return _LLAMA.read(text)


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
    places = parameters or {"input": {}}  # a tool without parameters also gets an argument, and refuses it
    return {"name": name, "arguments": dict(zip(places, values, strict=False))}


_LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_IM_HEADER = "<|im_start|>assistant\n"
_PARSERS: list[ToolParser] = [
    ToolParser("plain", ("<call>", "<result>"), "<assistant>", parse_plain),
    ToolParser("llama3", ("<|start_header_id|>", '"parameters'), _LLAMA_HEADER, parse_llama3),
    ToolParser("qwen3", ("<|im_start|>", "<tool_call>", '"arguments'), _IM_HEADER, parse_hermes),
    ToolParser("qwen3_5", ("<|im_start|>", "<tool_call>", "<function="), _IM_HEADER, parse_tagged),
    ToolParser("nemotron_3", ("<function=", "truncate_history_thinking"), f"{_IM_HEADER}<think>", parse_nemotron),
]


def register_tool_parser(parser: ToolParser) -> None:
    """Add a parser. It takes precedence over earlier ones, and replaces one with the same name.

    Args:
        parser: Used by every later `ChatFormat` whose chat template contains its markers.
    """
    _PARSERS[:] = [other for other in _PARSERS if other.name != parser.name] + [parser]


def find_tool_parser(chat_template: str) -> ToolParser | None:
    """The parser of a chat template's family; None if the family is unknown."""
    return next((p for p in reversed(_PARSERS) if all(marker in chat_template for marker in p.markers)), None)
