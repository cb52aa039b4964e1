"""Tools and environments: how they are described to the model, and what it reads for each outcome of a call."""

from __future__ import annotations

import functools
import math
from base64 import b64decode
from dataclasses import replace

import pytest
from helpers import worker_tools
from helpers.tool_calls import contents, misbehave, run
from helpers.worker_tools import AsyncRewards, Counter, Resets, Rewards

from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import MAX_RESULT_CHARACTERS, ToolCall
from pl_grouprl.media.rows import read_image
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


def test_a_tool_is_described_by_its_hints_and_docstring(make):
    properties = {
        "a": {"type": "integer", "description": "The one."},
        "b": {"type": "integer", "description": "The other."},
    }
    function = {
        "name": "multiply",
        "description": "Multiply two numbers.",
        "parameters": {"type": "object", "properties": properties, "required": ["a"]},
        "return": {"type": "integer", "description": "The product."},
    }
    assert make([multiply]).schemas() == [{"type": "function", "function": function}]


@pytest.mark.parametrize(
    ("function", "name", "parameters", "result"),
    [
        (multiply, "multiply", ["a", "b"], "14"),
        (functools.partial(multiply, b=3), "multiply", ["a"], "21"),
        (Multiplier().by, "by", ["a"], "21"),
        (Multiplier(), "Multiplier", ["a"], "28"),
        (AsyncMultiplier(), "AsyncMultiplier", ["a"], "35"),
        (functools.partial(worker_tools.async_multiply, b=6), "async_multiply", ["a"], "42"),
    ],
)
def test_anything_that_can_be_called_is_a_tool(make, function, name, parameters, result):
    runner = make([function])
    (schema,) = (own["function"] for own in runner.schemas())
    assert (schema["name"], list(schema["parameters"]["properties"])) == (name, parameters)
    assert schema["parameters"]["required"] == ["a"]
    assert contents(run(runner, ToolCall(name, {"a": 7}))) == [(name, result, None)]


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

    class NoReset:
        pass

    class NoDocstring:
        def reset(self):
            pass

        def act(self, how):
            pass

    class AsyncSteps:
        def reset(self):
            pass

        async def get_step_reward(self):
            pass

    for arguments, named in (
        *(([own], f"'{own.__name__}'") for own in (no_docstring, no_hint, no_description)),
        ([3], "'int'"),
        ([multiply, multiply], "'multiply'"),
    ):
        with pytest.raises(ValueError, match=named):
            ToolRunner(arguments)
    for factory, named in (
        *((NoReset, "NoReset"), (NoDocstring, r"NoDocstring.*'act'"), ({}, "environment_factory")),
        (AsyncSteps, "AsyncSteps.get_step_reward is async"),
    ):
        with pytest.raises(ValueError, match=named):
            ToolRunner([], factory)
    with pytest.raises(ValueError, match="add"):
        ToolRunner([Counter().add], Counter)


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
def test_wrong_arguments_have_their_kind(make, arguments, message):
    runner = make([multiply])
    called = run(runner, ToolCall("multiply", arguments), ToolCall("multiply", {"a": None, "b": 1.5}))
    assert (called[0].content, called[0].failure) == (str({"error": message}), "arguments")
    assert called[1].failure == "raised"  # a type error inside the tool


LIMIT = MAX_RESULT_CHARACTERS
TOO_LONG = "{'error': 'The result of tool misbehave has %d characters; at most %d are allowed.'}"
ENDED = "{'error': 'Tool misbehave tried to end the process.'}"
HARMS = {
    "raise": (str({"error": "'no such key'"}), "raised"),
    "type": (str({"error": "object of type 'int' has no len()"}), "raised"),
    "raise without text": ("{'error': '_NoTextError'}", "raised"),
    "raise exit text": ("{'error': '_ExitTextError'}", "raised"),
    "raise hard exit text": ("{'error': '_HardExitTextError'}", "raised"),
    "raise megabytes": (TOO_LONG % (2 * LIMIT, LIMIT), "too_long"),
    "recurse": (None, "raised"),
    "exit": (ENDED, "exited"),
    "hard exit": (ENDED, "exited"),
    "interrupt": ("{'error': ''}", "raised"),
    "cancel": ("{'error': ''}", "raised"),
    "long": (TOO_LONG % (LIMIT + 1, LIMIT), "too_long"),
    "almost long": ("x" * LIMIT, None),
    "no text": ("{'error': 'no text'}", "raised"),
    "coroutine": ("{'error': 'Tool misbehave returned a coroutine; define it with async def.'}", "unsupported"),
    "generator": ("{'error': 'Tool misbehave returned a generator; return text.'}", "unsupported"),
    "image": (None, "raised"),
    "picture": ("see this", None),
    "video": ("{'error': 'Tool misbehave returned media; only text and images are supported.'}", "unsupported"),
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
def test_the_model_reads_the_outcome_of_a_call(make, how):
    (result,) = run(make([worker_tools.misbehave]), misbehave(how))
    content, failure = HARMS[how]
    assert result.failure == failure
    assert content is None or result.content == content


@pytest.mark.parametrize("workers", [0, 1])
def test_images_stay_between_the_texts_around_them(make, workers):
    (result,) = run(make([worker_tools.misbehave], workers=workers), misbehave("picture"))
    ((place, png),) = result.images
    assert place == 3
    assert [*read_image(b64decode(png)).getdata()] == [(255, 0, 0)] * 6
    see, this = ({"type": "text", "text": text} for text in ("see", " this"))
    assert result.message == {"role": "tool", "name": "misbehave", "content": [see, {"type": "image"}, this]}
    assert replace(result, content="se").message["content"] == [{**see, "text": "se"}, {"type": "image"}]  # cut
    for_text = result.without_images()
    assert for_text.message["content"] == "{'error': 'Tool misbehave returned an image; only text is supported.'}"
    assert (for_text.failure, for_text.images) == ("unsupported", ())


def test_arguments_and_rows_are_copies(make):
    runner = make([worker_tools.change], Counter)
    row = {"start": 3, "prompt": [{"role": "user", "content": "p"}]}
    (session,) = runner.begin([row])
    session.environment.row["prompt"][0]["content"] = "changed"
    assert row["prompt"] == [{"role": "user", "content": "p"}]
    arguments = {"values": [0], "options": {}}
    assert run(runner, ToolCall("change", arguments), session=session)[0].content == "changed"
    assert arguments == {"values": [0], "options": {}}


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "Resets cannot begin an episode with the row {'how': 'raise'}: KeyError: 'no such key'"),
        ("exit", "Resets cannot begin an episode with the row {'how': 'exit'}: SystemExit: 3"),
        ("raise without text", "_NoTextError: _NoTextError"),
        ("numbers", "Resets.reset returned a list for the row {'how': 'numbers'}"),
        ("long", "Resets.reset returned 1048577 characters"),
    ],
)
def test_a_reset_that_fails_names_class_and_row(make, how, message):
    runner = make([], Resets)
    with pytest.raises(RuntimeError) as caught:
        runner.begin([{"how": "none"}, {"how": how}])
    assert message in str(caught.value)
    assert (how == "raise") == isinstance(caught.value.__cause__, KeyError)
    none, text = runner.begin([{"how": "none"}, {"how": "surrogate"}])
    assert (none.observation, text.observation) == (None, "a?b")


@pytest.mark.parametrize("factory", [Rewards, AsyncRewards])
def test_a_failing_reward_affects_only_its_episode(make, factory, caplog):
    runner = make([], factory, timeout=60)
    with caplog.at_level("WARNING"):
        sessions = runner.begin([{"reward": own} for own in (0.5, True, 2, "raise", "exit", "none", "long")])
        runner.finish(sessions)
    assert [session.reward for session in sessions[:3]] == [0.5, 1.0, 2.0]
    assert all(math.isnan(session.reward) for session in sessions[3:])
    assert f"{factory.__name__}.get_reward raised KeyError: 'no such key'" in caplog.text
    runner.finish(sessions)  # again: nothing happens
    assert sessions[0].reward == 0.5


def test_an_environment_belongs_to_one_episode(make):
    only = Counter()
    runner = make([], lambda: only)
    runner.finish(runner.begin([{}]))
    with pytest.raises(RuntimeError, match="another episode uses"):
        runner.begin([{}, {}])


def test_the_text_of_an_error_is_cut():
    assert describe_error(ValueError("x" * 3000)) == "x" * 2000
    assert describe_error(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert describe_error(worker_tools._NoTextError()) == "_NoTextError"
