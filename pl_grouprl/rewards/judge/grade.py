"""Reads the grade in a judge's reply."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

ReplyFormat = Literal["text", "json", "json_schema"]

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)"
_LINE = re.compile(
    rf"^[ \t*_#>`-]*grade[\s*_`:=]*({_NUMBER})(?:\s*(?:/|out of)\s*({_NUMBER}))?[\s*_`.]*$",
    re.IGNORECASE | re.MULTILINE,
)
_BARE = re.compile(_NUMBER)
_FLAT_OBJECT = re.compile(r"\{[^{}]*\}")


def read_grade(reply: str, reply_format: ReplyFormat, scale: tuple[float, float]) -> float:
    """Return the grade in a reply.

    In text, it is in the last line `Grade: N` (or `Grade: N/MAX`), or the reply is just a number. In JSON, it is the
    `score` of an object: the whole reply, the last fenced block, or the last object without nested braces.

    Args:
        reply: The reply.
        reply_format: Its format.
        scale: The lowest and the highest grade.

    Raises:
        ValueError: If there is no grade, or it is outside the scale; grades are never clamped.
    """
    grade = _grade_of_text(reply, scale[1]) if reply_format == "text" else _grade_of_json(reply)
    if not scale[0] <= grade <= scale[1]:  # compared as it is: an integer in JSON may be too large for a float
        raise ValueError(f"the grade {grade} is not between {format_number(scale[0])} and {format_number(scale[1])}")
    return float(grade)


def response_format(scale: tuple[float, float]) -> dict[str, Any]:
    """The `response_format` of a request for structured output."""
    schema = {
        "type": "object",
        "properties": {
            "reason": {"type": "string"},
            "score": {"type": "number", "minimum": scale[0], "maximum": scale[1]},
        },
        "required": ["reason", "score"],
        "additionalProperties": False,
    }
    return {"type": "json_schema", "json_schema": {"name": "grade", "strict": True, "schema": schema}}


def format_number(number: float) -> str:
    """Write whole numbers without a decimal point."""
    return str(int(number)) if number == int(number) else str(number)


def _grade_of_text(reply: str, highest: float) -> float:
    if _BARE.fullmatch(reply.strip()):
        return float(reply)
    lines = list(_LINE.finditer(reply))
    if not lines:
        raise ValueError("there is no line `Grade: N`")
    grade, maximum = lines[-1].groups()
    if maximum is not None and float(maximum) != highest:
        raise ValueError(f"the grade is out of {maximum} rather than {format_number(highest)}")
    return float(grade)


def _grade_of_json(reply: str) -> float:
    fenced = reply.split("```")[1:-1:2]  # between an opening and a closing fence
    candidates = [reply, *(block.removeprefix("json") for block in fenced[-1:]), *_FLAT_OBJECT.findall(reply)[-1:]]
    for candidate in candidates:
        try:
            found = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        score = found.get("score") if isinstance(found, dict) else None
        if isinstance(score, int | float) and not isinstance(score, bool):
            return score
    raise ValueError('there is no JSON object with a number as "score"')
