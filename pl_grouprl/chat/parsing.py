"""Parses model output into assistant messages, with one parser per family of chat templates.

A parser reads decoded text, never evaluates it, and agrees with TRL's `response_template` for the family: the fields of
a turn are regions between an opening and a closing mark; everything else is content.
"""

from __future__ import annotations

import json
import logging
import math
import re
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from pl_grouprl.utilities.processes import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    lead_session,
    require_system,
)
from pl_grouprl.utilities.text import describe_error

log = logging.getLogger(__name__)

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

    def read(self, text: str, tools: Sequence[Schema] = ()) -> Message:
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
            if mark is None:
                break
            position = mark.end()
            field = mark.lastgroup or ""
            if field == "end":
                continue
            closes, read = self._regions[field]
            closed = closes.search(text, position)
            value = read(mark, text[position : closed.start() if closed else len(text)])
            if field == "tool_calls":
                message.setdefault(field, []).append(value)
            else:
                message[field] = value
            position = closed.end() if closed else len(text)
        return message


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
        return value if value.isascii() else re.sub("[\ud800-\udfff]", "\ufffd", value)
    if isinstance(value, dict):
        return {plain_data(key): plain_data(item, depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, depth + 1) for item in value]
    return value


def read_json(text: str) -> Any:
    """Parse JSON.

    Raises:
        MalformedTurnError: If it is not JSON, is nested too deeply, or has a number with thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MalformedTurnError(f"not JSON: {error}") from error


def cast_arguments(message: Message, tools: Sequence[Schema]) -> Message:
    """Cast the arguments of a message's calls, in place: the text `7` becomes a number if the schema says `integer`.

    The rules are those of transformers' `parse_response(..., tools=...)`, which TRL uses. Text that fits no type of the
    schema, and arguments that are not in it, are left for the tool to reject.

    Args:
        message: A parsed and checked message.
        tools: Schemas of the tools.

    Returns:
        The message.
    """
    properties: dict[str, dict[str, Any]] = {}
    for tool in tools:
        function = tool.get("function", tool)
        parameters = function.get("parameters")
        described = parameters.get("properties") if isinstance(parameters, dict) else None
        if "name" in function and isinstance(described, dict):
            properties[function["name"]] = described
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        arguments = function["arguments"]
        for name, schema in properties.get(function["name"], {}).items():
            if isinstance(arguments, dict) and name in arguments:
                arguments[name] = _cast(arguments[name], tuple(_types(schema)))
    return message


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
            return _read_as(kind, value)
        except (KeyError, ValueError, OverflowError, RecursionError):
            continue
    return value


def _read_as(kind: str, text: str) -> Any:
    """Read text as a value of a JSON type; not as a string, so that text becomes another type if it fits one."""
    if kind == "integer":
        try:
            return int(text)
        except ValueError:
            number = float(text)
            if not number.is_integer():
                raise
            return int(number)
    if kind == "number":
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("JSON has no such number")
        return int(number) if "." not in text and number.is_integer() else number
    if kind == "boolean":
        return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
    if kind == "null" and text.strip() in ("null", "None"):
        return None
    if kind in ("object", "array"):
        value = json.loads(text)
        if isinstance(value, dict if kind == "object" else list):
            return value
    raise ValueError(f"not of type {kind}")


_THINK = Region("reasoning_content", "<think>", r"</think>\s*", lambda mark, body: body.strip())
_PARAMETER = re.compile(r"<parameter=([^>\n]{1,256})>")


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _tagged_call(found: re.Match[str], body: str) -> Any:
    arguments: dict[str, Any] = {}
    position = 0
    while (opened := _PARAMETER.search(body, position)) and (end := body.find("</parameter>", opened.end())) >= 0:
        arguments[opened[1]] = body[opened.end() : end].strip()
        position = end
    return _call(found["name"], arguments)


_TAGGED_CALL = Region(
    "tool_calls", r"<tool_call>\s*<function=(?P<name>[^\n>]{1,256})>", r"</tool_call>\s*", _tagged_call
)
_TAGGED_CALLS = TurnGrammar(_TAGGED_CALL, end=r"<\|im_end\|>\s*")

# Qwen2.5 and Qwen3: `<think>`, content, and calls as JSON in `<tool_call>` tags.
HERMES = TurnGrammar(
    _THINK,
    Region(
        "tool_calls",
        "<tool_call>",
        r"</tool_call>\s*",
        lambda mark, body: {"type": "function", "function": read_json(body)},
    ),
    end=r"<\|im_end\|>\s*",
)

# Qwen3.5: `<think>`, content, and calls as `<function=..>` with `<parameter=..>` tags of text.
TAGGED = TurnGrammar(_THINK, _TAGGED_CALL, end=r"<\|im_end\|>\s*")

# Llama 3.1 and 3.2: content, or one call as JSON with `name` and `parameters`.
LLAMA = TurnGrammar(
    Region(
        "tool_calls",
        r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*',
        r"\}<\|eot_id\|>\s*",
        lambda mark, body: _call(mark["name"], read_json(body)),
    ),
    end=r"<\|eot_id\|>\s*",
)


def parse_nemotron(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of Nemotron 3: calls as in Qwen3.5; the prompt opens a `<think>`, which the model may close."""
    text = text.removeprefix("</think>")  # a prompt without reasoning closes it too
    thought, closed, rest = text.partition("</think>")
    message = _TAGGED_CALLS.read(rest.lstrip() if closed else text)
    return {**message, "reasoning_content": thought.strip()} if closed else message


def parse_plain(text: str, tools: Sequence[Schema] = ()) -> Message:
    """Parse a turn of the built-in tasks' format; see `templates/plain.jinja`."""
    written, end, _ = text.partition("<end>")
    content, *calls = written.split("<call>")
    message: Message = {"role": "assistant", "content": content.strip()}
    if calls and not end:
        raise MalformedTurnError("a call is cut off")
    schemas = {schema.get("name"): schema for schema in (tool.get("function", tool) for tool in reversed(tools))}
    for call in calls:
        name, _, rest = call.strip().partition(" ")
        if not name:
            raise MalformedTurnError("a call has no name")
        schema = schemas.get(name)
        parameters = schema.get("parameters", {}).get("properties", {}) if schema else {"input": {}}
        values = rest.split(" ", max(len(parameters) - 1, 0)) if rest else []
        places = parameters or {"input": {}}  # a tool without parameters also gets an argument, and rejects it
        message.setdefault("tool_calls", []).append(_call(name, dict(zip(places, values, strict=False))))
    return message


_LLAMA_HEADER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_IM_HEADER = "<|im_start|>assistant\n"
_PARSERS: list[ToolParser] = [
    ToolParser("plain", ("<call>", "<result>"), "<assistant>", parse_plain),
    ToolParser("llama3", ("<|start_header_id|>", '"parameters'), _LLAMA_HEADER, LLAMA.read),
    ToolParser("qwen3", ("<|im_start|>", "<tool_call>", '"arguments'), _IM_HEADER, HERMES.read),
    ToolParser("qwen3_5", ("<|im_start|>", "<tool_call>", "<function="), _IM_HEADER, TAGGED.read),
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


LIMIT = 2.0
"""Seconds that parsing a turn may take; it usually takes milliseconds."""


class TemplateParser:
    """Parses turns by transformers' `parse_response`, in a process, since a pattern that backtracks must be stopped.

    Only one thread may call it.

    Args:
        template: The tokenizer's `response_template`.

    Raises:
        ValueError: If the template is malformed, or the system cannot stop it.
    """

    def __init__(self, template: Mapping[str, Any]) -> None:
        from transformers.utils.chat_parsing.response_templates import load_response_template

        why, instead = "a pattern that backtracks could not be stopped", "set it to None"
        require_system(hasattr(signal, "setitimer"), "tokenizer.response_template", why, instead)
        load_response_template(dict(template))
        reaper = Reaper()
        self._process = WorkerProcess("response parser", _serve, (template, LIMIT), len, reaper, imports_main=False)
        self._has_warned = False
        # Runs at exit, before multiprocessing waits for its processes.
        self.close = Finalize(self, _end_worker, (self._process, reaper), exitpriority=100)

    def parse(self, text: str, prefix: str, tools: Sequence[Schema]) -> Any:
        """Parse a turn.

        Args:
            text: The turn, special tokens included.
            prefix: All text before it.
            tools: Schemas of the tools, for the types of arguments.

        Raises:
            MalformedTurnError: If it cannot be parsed, or that takes too long.
        """
        try:
            answer = json.loads(self._process.ask(json.dumps([text, prefix, list(tools)]).encode(), 30 * LIMIT))
        except (WorkerTimeoutError, WorkerExitError) as error:
            answer = {"stopped": f"the process {error}"}
        if "stopped" in answer and not self._has_warned:
            self._has_warned = True
            log.warning(
                "tokenizer.response_template did not parse a turn of %d characters: %s. Such turns count as text "
                "without calls. Change its patterns so that they cannot backtrack, such as \\s*+ for \\s*, or set it "
                "to None if the chat template's family is built in.",
                len(text),
                answer["stopped"],
            )
        if "message" not in answer:
            raise MalformedTurnError(str(answer))
        return answer["message"]


def _serve(pipe: Connection, template: Mapping[str, Any], limit: float) -> None:
    """Parse turns until the pipe is closed."""
    lead_session()
    from transformers.utils.chat_parsing import parse_response
    from transformers.utils.chat_parsing.response_templates import load_response_template

    def stop(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, stop)  # the library `regex` lets a signal interrupt a search
    loaded = load_response_template(dict(template))
    pipe.send_bytes(b"ready")
    while True:
        try:
            text, prefix, tools = json.loads(pipe.recv_bytes())
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_REAL, limit)
        try:
            answer = json.dumps({"message": parse_response(text, loaded, prefix=prefix, tools=tools)})
        except TimeoutError:
            answer = json.dumps({"stopped": f"it took longer than {limit:g} seconds"})
        except Exception as error:  # templates may raise anything
            answer = json.dumps({"error": describe_error(error)})
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(answer.encode())


def _end_worker(process: WorkerProcess, reaper: Reaper) -> None:
    process.end()
    reaper.close()
