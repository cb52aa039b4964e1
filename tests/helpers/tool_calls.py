"""Calls of tools on a `ToolRunner`, and what came of them."""

from pl_grouprl.episodes.tools import ToolCall


def run(runner, *calls, session=None):
    """The results of the calls in an episode."""
    (results,) = runner.call([(session or runner.begin([{}])[0], calls)])
    return results


def contents(results):
    return [(result.name, result.content, result.failure) for result in results]


def misbehave(how):
    return ToolCall("misbehave", {"how": how})


def add(number):
    return ToolCall("add", {"number": number})


def multiplied(a, b, name="multiply"):
    return ToolCall(name, {"a": a, "b": b})
