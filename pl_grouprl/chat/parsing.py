"""Parses model output into assistant messages, with one parser per family of chat templates.

A parser reads decoded text, never evaluates it, and agrees with TRL's `response_template` for the family: the fields of
a turn are regions between an opening and a closing mark; everything else is content.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Schema = dict[str, Any]
"""JSON schema of a tool, as returned by transformers' `get_json_schema`."""

MAX_NESTING = 64
"""A call with arguments nested deeper is malformed; copying and pickling them would overflow the stack."""


class MalformedTurnError(ValueError):
    """A turn that cannot be parsed, and therefore counts as plain text."""


@dataclass(frozen=True)
class ToolParser:
    """Parser of turns in the format of one family of chat templates.

    Attributes:
        name: Name of the family.
        markers: Strings that all chat templates of the family contain.
        header: What the chat template writes before a turn of the model. Text that follows it in the prompt, such as an
            opened `<think>`, is passed to `parse` with the turn.
        parse: Takes the text of a turn, special tokens included, and the tools' schemas; returns the message, or raises
            `MalformedTurnError`, which makes the turn plain text.
    """

    name: str
    markers: tuple[str, ...]
    header: str
    parse: Callable[[str, Sequence[Schema]], Message]


@dataclass(frozen=True)
class Region:
    """A field of a turn between two marks.

    Attributes:
        field: Key of the message. Values of `tool_calls` accumulate; for other fields, the last one counts.
        opens: Regular expression of the opening mark; `read` may use its named groups.
        closes: Regular expression of the closing mark; if it is missing in a turn, the region extends to the end.
        read: Converts the match of the opening mark, and the text up to the closing mark, to the value.
    """

    field: str
    opens: str
    closes: str
    read: Callable[[re.Match[str], str], Any]


class TurnGrammar:
    """Splits a turn into regions and content, in time linear in its length.

    Args:
        regions: Fields between marks. Text outside them is content; if there are several stretches, the last counts.
        end: Regular expression of the end of a turn.
    """

    def __init__(self, *regions: Region, end: str) -> None:
        marks = [*((region.field, region.opens) for region in regions), ("end", end)]
        self._marks = re.compile("|".join(f"(?P<{name}>{expression})" for name, expression in marks))
        self._regions = {region.field: (re.compile(region.closes), region.read) for region in regions}

    def read(self, text: str) -> Message:
        """Parse a turn.

        Raises:
            MalformedTurnError: If a region cannot be read.
        """
        message: Message = {"role": "assistant", "content": ""}
        position = 0
        while position < len(text):
            mark = self._marks.search(text, position)
            stop = mark.start() if mark else len(text)
            if stop > position:
                message["content"] = text[position:stop].strip()
            position = stop
            if mark is not None:
                position = self._read_region(mark, text, message)
        return message

    def _read_region(self, mark: re.Match[str], text: str, message: Message) -> int:
        """Add the region that a mark opens to the message; returns where the region ends."""
        field = mark.lastgroup or ""
        if field == "end":
            return mark.end()
        closes, read = self._regions[field]
        closed = closes.search(text, mark.end())
        value = read(mark, text[mark.end() : closed.start() if closed else len(text)])
        if field == "tool_calls":
            message.setdefault(field, []).append(value)
        else:
            message[field] = value
        return closed.end() if closed else len(text)


def checked_message(message: Any) -> Message:
    """Validate a parsed message, complete its calls, and make its strings encodable.

    Raises:
        MalformedTurnError: If a call has no name, or its arguments are nested too deeply.
    """
    if not isinstance(message, dict):
        raise MalformedTurnError(f"the parsed turn is {type(message).__name__}, not a dictionary")
    message = {"role": "assistant", **plain_data(message)}
    if not message.get("reasoning_content"):
        message.pop("reasoning_content", None)
    message["content"] = message.get("content") or ""
    calls = message.get("tool_calls")
    if calls is None:
        message.pop("tool_calls", None)
    elif not isinstance(calls, list):
        raise MalformedTurnError("tool_calls is not a list")
    for call in calls or []:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise MalformedTurnError("a call has no name")
        if function.get("arguments") is None:
            function["arguments"] = {}
    return message


def plain_data(value: Any, depth: int = 0) -> Any:
    """Copy JSON data; lone surrogates, which cannot be encoded, become U+FFFD.

    Raises:
        MalformedTurnError: If it is nested deeper than `MAX_NESTING`.
    """
    if depth > MAX_NESTING:
        raise MalformedTurnError(f"nested deeper than {MAX_NESTING} levels")
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {plain_data(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, depth + 1) for item in value]
    return value


def encodable(text: str) -> str:
    """Replace lone surrogates by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udfff]", "\ufffd", text)
    return text


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        MalformedTurnError: If it is not JSON, is nested too deeply, or has a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedTurnError(f"not JSON: {error}") from error
