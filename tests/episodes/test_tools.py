"""Tools: how they are described to the model, and what it reads for each outcome of a call."""

from __future__ import annotations

import asyncio
import functools
import re

import pytest
from helpers import worker_tools

from pl_grouprl.episodes.tools import MAX_RESULT_CHARACTERS, Tool, call_tool, prepare_tools, run_coroutine
from pl_grouprl.utilities.text import describe_error


def multiply(a: int, b: int = 2) -> int:
    """Multiply two numbers.

    Args:
        a: The one.
        b: The other.

    Returns:
        The product.
    """
    return a * b


async def async_multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: The one.
        b: The other.
    """
    return a * b


class Multiplier:
    """Multiplies."""

    def by(self, a: int) -> int:
        """Multiply by 3.

        Args:
            a: What.
        """
        return 3 * a

    def __call__(self, a: int) -> int:
        """Multiply by 4.

        Args:
            a: What.
        """
        return 4 * a


class AsyncMultiplier(Multiplier):
    async def __call__(self, a: int) -> int:
        """Multiply by 5.

        Args:
            a: What.
        """
        return 5 * a


def call(function, arguments):
    coroutine = call_tool(Tool.of(function), arguments)
    return asyncio.run(coroutine) if Tool.of(function).is_async else run_coroutine(coroutine)


def misbehave(how):
    result = call(worker_tools.misbehave, {"how": how})
    return result.content, result.failure


def test_a_tool_is_described_by_its_hints_and_docstring():
    assert Tool.of(multiply).schema == {
        "type": "function",
        "function": {
            "name": "multiply",
            "description": "Multiply two numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "The one."},
                    "b": {"type": "integer", "description": "The other."},
                },
                "required": ["a"],
            },
            "return": {"type": "integer", "description": "The product."},
        },
    }


@pytest.mark.parametrize(
    ("function", "name", "parameters", "result"),
    [
        (multiply, "multiply", ["a", "b"], "14"),
        (functools.partial(multiply, b=3), "multiply", ["a"], "21"),
        (Multiplier().by, "by", ["a"], "21"),
        (Multiplier(), "Multiplier", ["a"], "28"),
        (AsyncMultiplier(), "AsyncMultiplier", ["a"], "35"),
        (functools.partial(async_multiply, b=6), "async_multiply", ["a"], "42"),
    ],
)
def test_anything_that_can_be_called_is_a_tool(function, name, parameters, result):
    schema = Tool.of(function).schema["function"]
    assert (schema["name"], list(schema["parameters"]["properties"])) == (name, parameters)
    assert schema["parameters"]["required"] == ["a"]
    found = call(function, {"a": 7})
    assert (found.name, found.content, found.failure) == (name, result, None)


def test_what_the_model_could_not_call_is_refused():
    def no_docstring(a: int) -> int:
        return a

    def no_hint(a):
        """Something.

        Args:
            a: A number.
        """

    def no_description(a: int) -> int:
        """Something."""

    for function, message in (
        (no_docstring, "'no_docstring'"),
        (no_hint, "'no_hint'"),
        (no_description, "'no_description'"),
        (3, "'int'"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_tools([function])
    with pytest.raises(ValueError, match="'multiply'"):
        prepare_tools([multiply, multiply])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "multiply() missing 1 required positional argument: 'a'"),
        ({"a": 1, "c": 2}, "multiply() got an unexpected keyword argument 'c'"),
        ([1, 2], f"{__name__}.multiply() argument after ** must be a mapping, not list"),
        ("a", f"{__name__}.multiply() argument after ** must be a mapping, not str"),
        (None, f"{__name__}.multiply() argument after ** must be a mapping, not NoneType"),
        ({1: 2}, "keywords must be strings"),
    ],
)
def test_wrong_arguments_have_their_kind(arguments, message):
    result = call(multiply, arguments)
    assert (result.content, result.failure) == (str({"error": message}), "arguments")


def test_a_type_error_inside_a_tool_has_another_kind():
    assert misbehave("type") == (str({"error": "object of type 'int' has no len()"}), "raised")
    assert call(multiply, {"a": None, "b": 1.5}).failure == "raised"


def test_async_tools_fail_like_sync_ones():
    result = call(async_multiply, {"a": 1})
    message = "async_multiply() missing 1 required positional argument: 'b'"
    assert (result.content, result.failure) == (str({"error": message}), "arguments")


LIMIT = MAX_RESULT_CHARACTERS
HARMS = {
    "raise": (str({"error": "'no such key'"}), "raised"),
    "raise without text": ("{'error': '_NoTextError'}", "raised"),
    "raise exit text": ("{'error': '_ExitTextError'}", "raised"),
    "raise hard exit text": ("{'error': '_HardExitTextError'}", "raised"),
    "raise megabytes": (
        f"{{'error': 'The result of tool misbehave has {2 * LIMIT} characters; at most {LIMIT} are allowed.'}}",
        "too_long",
    ),
    "recurse": (None, "raised"),
    "exit": ("{'error': 'Tool misbehave tried to end the process.'}", "exited"),
    "hard exit": ("{'error': 'Tool misbehave tried to end the process.'}", "exited"),
    "interrupt": ("{'error': ''}", "raised"),
    "cancel": ("{'error': ''}", "raised"),
    "long": (
        f"{{'error': 'The result of tool misbehave has {LIMIT + 1} characters; at most {LIMIT} are allowed.'}}",
        "too_long",
    ),
    "almost long": ("x" * LIMIT, None),
    "no text": ("{'error': 'no text'}", "raised"),
    "coroutine": ("{'error': 'Tool misbehave returned a coroutine; define it with async def.'}", "unsupported"),
    "generator": ("{'error': 'Tool misbehave returned a generator; return text.'}", "unsupported"),
    "image": ("{'error': 'Tool misbehave returned media; only text is supported.'}", "unsupported"),
    "texts": ("ab", None),
    "numbers": ("[1, 2]", None),
    "mappings": ("[{'type': ['list']}]", None),
    "none": ("None", None),
    "bytes": (r"b'\xff'", None),
    "nan": ("nan", None),
    "surrogate": ("a?b", None),
    "big number": (None, "raised"),
}
"""What the model reads, where that is certain, and the kind of failure."""


@pytest.mark.parametrize("how", HARMS)
def test_the_model_reads_the_outcome_of_a_call(how):
    content, failure = misbehave(how)
    expected, kind = HARMS[how]
    assert failure == kind
    assert expected is None or content == expected


def test_arguments_are_copies():
    arguments = {"values": [0], "options": {}}
    assert call(worker_tools.change, arguments).content == "changed"
    assert arguments == {"values": [0], "options": {}}


def test_a_coroutine_that_waits_needs_a_loop():
    with pytest.raises(RuntimeError, match="the coroutine waits"):
        run_coroutine(asyncio.sleep(0))


def test_the_text_of_an_error_is_cut():
    assert describe_error(ValueError("x" * 3000)) == "x" * 2000
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert re.fullmatch("_NoTextError", describe_error(worker_tools._NoTextError()))
