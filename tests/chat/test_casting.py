"""Arguments that a model wrote as text become what the tool's schema asks for."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from helpers.versions import needs

from pl_grouprl.chat.parsing import cast_arguments

SCHEMAS: dict[str, Any] = {
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "string": {"type": "string"},
    "object": {"type": "object"},
    "array": {"type": "array", "items": {"type": "integer"}},
    "several": {"type": ["string", "integer"]},
    "any of": {"anyOf": [{"type": "boolean"}, {"oneOf": [{"type": "number"}]}]},
    "optional": {"type": "integer", "nullable": True},
    "unknown": {"type": "date"},
    "none": {},
    "malformed": 3,
}
TEXTS = (
    *("7", " 7 ", "-7", "7.0", "7.5", "1e3", "1_0", "nan", "inf", "true", "False", "0", "1", "None", "null", "", "x"),
    *('{"a": 1}', "[1]", "{", "9" * 5000, "1e999", "[" * 100_000),
)


def cast(value: Any, schema: Any) -> Any:
    call = {"type": "function", "function": {"name": "tool", "arguments": {"value": value}}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    cast_arguments(message, [described(schema)])
    return call["function"]["arguments"]["value"]


def described(schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "tool", "parameters": {"properties": {"value": schema}}}}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ("integer", "7", 7), ("integer", "7.0", 7), ("integer", "7.5", "7.5"), ("number", "7", 7),
        ("number", "7.5", 7.5), ("number", "nan", "nan"), ("boolean", "TRUE", True), ("boolean", "yes", "yes"),
        ("string", "7", "7"), ("object", '{"a": 1}', {"a": 1}), ("array", "[1]", [1]),
        ("array", '{"a": 1}', '{"a": 1}'), ("several", "7", 7), ("any of", "1", True), ("optional", "None", None),
        ("unknown", "7", "7"), ("malformed", "7", "7"),
    ],
)  # fmt: skip
def test_text_becomes_what_the_schema_asks_for(schema: str, text: str, expected: Any) -> None:
    found = cast(text, SCHEMAS[schema])
    assert (type(found), found) == (type(expected), expected)


def test_values_that_are_no_text_stay() -> None:
    for value in (7, 7.5, None, True, {"a": "1"}):
        assert cast(value, {"type": "string"}) is value
    assert cast(["1", 2, "x"], {"type": "integer"}) == [1, 2, "x"]
    assert cast(["1"], {"type": "array"}) == ["1"]


def test_what_no_schema_describes_stays() -> None:
    arguments = {"other": "7"}
    calls = [
        {"type": "function", "function": {"name": name, "arguments": values}}
        for name, values in (("tool", arguments), ("nowhere", {"value": "7"}), ("tool", "text"), ("tool", ["7"]))
    ]
    before = str(calls)
    cast_arguments({"role": "assistant", "content": "", "tool_calls": calls}, [described({"type": "integer"})])
    assert str(calls) == before
    assert cast_arguments({"role": "assistant", "content": "hi"}, []) == {"role": "assistant", "content": "hi"}
    assert cast_arguments(
        {"role": "assistant", "content": "", "tool_calls": calls}, [{}, {"function": {"name": "tool"}}]
    )


@needs("transformers", "5.21")
def test_the_rules_are_those_of_transformers() -> None:
    parser = pytest.importorskip("transformers.utils.chat_parsing.response_parser")
    for (name, schema), text in product(SCHEMAS.items(), TEXTS):
        types = parser._schema_types(schema)
        try:
            expected = parser._coerce(text, types) if types else text
        except RecursionError:
            expected = text
        found = cast(text, schema)
        assert (type(found), found) == (type(expected), expected), (name, text[:20])
