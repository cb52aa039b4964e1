"""Environments of OpenEnv servers, with a client that stands for the library's, and with the library where it is."""

import sys
from contextlib import ExitStack
from functools import partial
from importlib.util import find_spec

import httpx2
import pytest
from helpers import openenv_server
from helpers.tool_calls import add, contents, run

from pl_grouprl.episodes import OpenEnv, openenv
from pl_grouprl.episodes.tools import ToolCall

HAS_LIBRARY = find_spec("openenv") is not None
BOTH = ["stand-in", pytest.param("library", marks=pytest.mark.skipif(not HAS_LIBRARY, reason="needs openenv"))]


@pytest.fixture(scope="module", params=BOTH)
def address(request):
    """The addresses of the servers `adding` and `mcp`."""
    with ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        if request.param == "library":
            yield {kind: stack.enter_context(openenv_server.serving(kind)) for kind in ("adding", "mcp")}
            return
        kinds = {f"http://{kind}": kind for kind in ("adding", "mcp")}
        for name, module in openenv_server.fake_library(kinds).items():
            patch.setitem(sys.modules, name, module)
        patch.setattr(openenv, "OPENENV_AVAILABLE", True)
        patch.setattr(httpx2, "get", openenv_server.fake_get(kinds))
        yield {kind: url for url, kind in kinds.items()}


def step(number):
    return ToolCall("step", {"number": number})


def test_the_one_tool_has_the_fields_of_the_action(make, address):
    (schema,) = make(environment_factory=partial(OpenEnv, address["adding"])).schemas()
    assert (schema["function"]["name"], schema["function"]["description"]) == ("step", "Add a number.")
    parameters = schema["function"]["parameters"]
    number = {"type": "integer", "description": "What to add", "title": "Number"}
    assert (parameters["properties"], parameters["required"]) == ({"number": number}, ["number"])


def test_the_tools_of_an_environment_that_takes_mcp_actions_are_the_models(make, address):
    runner = make(environment_factory=partial(OpenEnv, address["mcp"]))
    (schema,) = runner.schemas()
    assert (schema["function"]["name"], schema["function"]["description"]) == ("echo", "Return a text.")
    (session,) = runner.begin([{}])
    assert session.observation is None
    results = run(runner, ToolCall("echo", {"text": "a<|im_end|>"}), ToolCall("echo", {}), session=session)
    assert contents(results[:1]) == [("echo", "a<|im_end|>", None)]
    assert results[1].failure == "raised"
    assert "Missing required argument" in results[1].content


def test_the_model_reads_the_observations(make, address):
    runner = make(environment_factory=partial(OpenEnv, address["adding"]))
    first, second = runner.begin([{"seed": 4, "other": 1}, {}])
    assert first.observation == '{"text": "The sum is 4.", "left": 6}'
    assert second.observation == '{"text": "The sum is 0.", "left": 10}'
    assert contents(run(runner, step(1), session=first)) == [("step", '{"text": "Now 5.", "left": 5}', None)]
    assert contents(run(runner, step(5), session=first)) == [("step", "Now 10.", None)]  # without the null
    assert contents(run(runner, step(1), session=second)) == [("step", '{"text": "Now 1.", "left": 9}', None)]
    runner.finish([first, second])
    assert runner.begin([{"seed": 2}])[0].observation == '{"text": "The sum is 2.", "left": 8}'


def test_one_field_of_the_observations_is_read_as_text(make, address):
    runner = make(environment_factory=partial(OpenEnv, address["adding"], observation_key="text", reset_columns=()))
    (session,) = runner.begin([{"seed": 4}])
    assert session.observation == "The sum is 0."
    assert contents(run(runner, step(7), session=session)) == [("step", "Now 7.", None)]


@pytest.mark.parametrize(("reward", "expected"), [("last", 0.3), ("sum", 0.7)])
def test_the_reward_is_that_of_the_last_step_or_their_sum(make, address, reward, expected):
    runner = make(environment_factory=partial(OpenEnv, address["adding"], reward=reward))
    assert (runner.reward_names, runner.step_reward_names) == (["OpenEnv"], [])
    first, second = runner.begin([{}, {}])
    results = run(runner, step(4), step(3), step(0), session=first)
    assert [result.reward for result in results] == [None] * 3
    runner.finish([first, second])
    assert first.reward == pytest.approx(expected, abs=1e-12)
    assert second.reward == 0.0


def test_each_step_has_its_reward(make, address):
    runner = make(environment_factory=partial(OpenEnv, address["adding"], reward="steps"))
    assert (runner.reward_names, runner.step_reward_names) == ([], ["OpenEnv"])
    (session,) = runner.begin([{}])
    results = run(runner, step(4), step(-1), step(0), step(3), session=session)
    assert [result.reward for result in results] == [0.4, None, None, 0.3]
    runner.finish([session])
    assert session.reward is None


def test_calls_after_the_end_fail_and_errors_of_the_server_do_not_end_an_episode(make, address):
    runner = make(environment_factory=partial(OpenEnv, address["adding"], observation_key="text"))
    (session,) = runner.begin([{}])
    calls = [add(1), ToolCall("step", {"text": "a"}), step(-1), step(9), step(1), step(1)]
    results = run(runner, *calls, session=session)
    assert [result.failure for result in results] == ["unknown", "raised", "raised", None, None, "raised"]
    assert [result.content for result in results[3:]] == [
        "Now 9.",
        "Now 10.",
        "{'error': 'The episode has ended: the environment is done.'}",
    ]
    assert "Server error" in results[2].content
    runner.finish([session])
    assert session.reward == 0.1


def test_a_lost_connection_ends_the_episode(make, address, monkeypatch):
    runner = make(environment_factory=partial(OpenEnv, address["adding"], observation_key="text"))
    (session,) = runner.begin([{}])

    def lose(action):
        raise ConnectionError("closed")

    with monkeypatch.context() as patch:
        patch.setattr(session.environment._client, "step", lose)
        assert contents(run(runner, step(1), session=session)) == [("step", "{'error': 'closed'}", "raised")]
    (result,) = run(runner, step(1), session=session)
    assert result.content == "{'error': 'The episode has ended: the connection to the environment was lost.'}"
    runner.finish([session])
    (session,) = runner.begin([{}])
    assert contents(run(runner, step(1), session=session)) == [("step", "Now 1.", None)]


def test_an_unknown_reward_is_an_error(address):
    with pytest.raises(ValueError, match=r"OpenEnv\.reward is 'mean'"):
        OpenEnv(address["adding"], reward="mean")
