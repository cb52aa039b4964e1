"""Rounds of calls: order of results, what the model reads, environments that are reused, calls that hang."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import ToolCall

NEVER = 1000.0


def multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: The one.
        b: The other.
    """
    return a * b


async def async_multiply(a: int, b: int) -> int:
    """Multiply.

    Args:
        a: The one.
        b: The other.
    """
    await asyncio.sleep(0)
    return a * b


class Counter:
    made = 0

    def __init__(self):
        Counter.made += 1
        self.thread = threading.current_thread()

    def reset(self, start=0, **row):
        self.row = row
        self.count = start
        return f"It is {start}." if start else None

    def add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: How much.
        """
        assert threading.current_thread() is self.thread
        self.count += number
        return self.count

    async def async_add(self, number: int) -> int:
        """Add to the count.

        Args:
            number: How much.
        """
        self.count += number
        return self.count

    def get_reward(self):
        return self.count


@pytest.fixture(autouse=True)
def _fresh_counter():
    Counter.made = 0


@pytest.fixture
def make():
    runners = []

    def make(*args, **kwargs):
        runners.append(ToolRunner(*args, **kwargs))
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def run(runner, *calls, session=None):
    (results,) = runner.call([(session or runner.begin([{}])[0], calls)])
    return results


def contents(results):
    return [(result.name, result.content, result.failure) for result in results]


def test_results_of_async_tools_follow_those_of_plain_ones(make):
    calls = [
        ToolCall("async_multiply", {"a": 1, "b": 2}),
        ToolCall("multiply", {"a": 3, "b": 4}),
        ToolCall("async_multiply", {}),
        ToolCall("divide", {}),
        ToolCall("async_multiply", {"a": 5, "b": 6}),
        ToolCall("page", {}, "web"),
        ToolCall("multiply", {"a": 7, "b": 8}),
    ]
    missing = "async_multiply() missing 2 required positional arguments: 'a' and 'b'"
    assert contents(run(make([multiply, async_multiply]), *calls)) == [
        ("multiply", "12", None),
        ("async_multiply", str({"error": missing}), "arguments"),
        ("divide", "{'error': 'Tool divide not found.'}", "unknown"),
        ("page", "{'error': 'Unsupported tool call type: web'}", "unsupported"),
        ("multiply", "56", None),
        ("async_multiply", "2", None),
        ("async_multiply", "30", None),
    ]


def test_an_episode_uses_its_environment(make):
    runner = make([multiply], Counter)
    first, second = runner.begin([{"start": 1, "prompt": "p"}, {"prompt": "q"}])
    assert (first.observation, second.observation) == ("It is 1.", None)
    assert first.environment.row == {"prompt": "p"}
    add = ToolCall("add", {"number": 2})
    both = runner.call([(first, [add, add]), (second, [ToolCall("async_add", {"number": 5}), add])])
    assert [[result.content for result in results] for results in both] == [["3", "5"], ["2", "7"]]
    runner.finish([first, second])
    assert (first.reward, second.reward) == (5.0, 7.0)
    assert (first.reward_name, runner.reward_names) == ("Counter", ["Counter"])


def test_environments_are_made_once(make):
    runner = make([], Counter)
    assert Counter.made == 1
    for rows, made in ((1, 1), (3, 3), (2, 3)):
        sessions = runner.begin([{}] * rows)
        runner.finish(sessions)
        assert Counter.made == made


def test_a_tool_that_hangs_is_abandoned_and_the_episode_goes_on(make):
    gate = threading.Event()

    def hang() -> None:
        """Wait."""
        gate.wait(NEVER)

    runner = make([hang, multiply], timeout=0.1)
    session = runner.begin([{}])[0]
    try:
        results = run(runner, ToolCall("hang", {}), ToolCall("multiply", {"a": 2, "b": 3}), session=session)
        assert contents(results) == [
            ("hang", "{'error': 'Tool hang took longer than 0.1 seconds.'}", "timeout"),
            ("multiply", "6", None),
        ]
        assert run(runner, ToolCall("multiply", {"a": 2, "b": 2}), session=session)[0].content == "4"
    finally:
        gate.set()


def test_an_environment_that_hangs_is_lost_and_replaced(make):
    gate = threading.Event()

    class Hangs(Counter):
        def hang(self) -> None:
            """Wait."""
            gate.wait(NEVER)

    runner = make([], Hangs, timeout=0.1)
    session, other = runner.begin([{}, {}])
    try:
        results = run(runner, ToolCall("hang", {}), ToolCall("add", {"number": 1}), session=session)
        assert [result.failure for result in results] == ["timeout", "timeout"]
        assert results[1].content == "{'error': 'The environment of this episode was lost.'}"
        runner.finish([session, other])
        assert math.isnan(session.reward)
        assert other.reward == 0.0
        assert runner.begin([{}])[0].environment is not session.environment
    finally:
        gate.set()
