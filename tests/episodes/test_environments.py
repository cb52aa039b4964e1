"""Environments: which methods are tools, how one is chosen by a row, and what `reset` and `get_reward` may do."""

from __future__ import annotations

import asyncio
import math

import pytest
from helpers.worker_tools import AsyncRewards, Counter, Echo, Resets, Rewards

from pl_grouprl.episodes.tools import EnvironmentHost, EnvironmentKind


def host_of(factory):
    return EnvironmentHost({}, {None: EnvironmentKind.of(factory, factory())})


def run(coroutine):
    return asyncio.run(coroutine)


def test_public_methods_are_tools():
    kind = EnvironmentKind.of(Counter, Counter())
    assert {name: method.is_async for name, method in kind.methods.items()} == {
        "add": False,
        "async_add": True,
        "misbehave": False,
        "process_id": False,
    }
    assert (kind.class_name, kind.async_reset, kind.async_reward) == ("Counter", False, False)
    assert EnvironmentKind.of(Echo, Echo()).async_reward is None
    kind = EnvironmentKind.of(AsyncRewards, AsyncRewards())
    assert (kind.async_reset, kind.async_reward, kind.methods) == (True, True, {})


def test_objects_that_are_not_environments_are_refused():
    class NoReset:
        pass

    class NoDocstring:
        def reset(self):
            pass

        def act(self, how):
            pass

    with pytest.raises(ValueError, match="NoReset"):
        EnvironmentKind.of(NoReset, NoReset())
    with pytest.raises(ValueError, match=r"NoDocstring.*'act'"):
        EnvironmentKind.of(NoDocstring, NoDocstring())


def test_reset_gets_a_copy_of_the_row():
    host = host_of(Counter)
    row = {"start": 3, "prompt": [{"role": "user", "content": "p"}]}
    assert run(host.reset(0, None, row)) == "It is 3."
    host.instances[0].row["prompt"][0]["content"] = "changed"
    assert row["prompt"] == [{"role": "user", "content": "p"}]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "raise",
            "The environment Resets cannot begin an episode with the row {'how': 'raise'}: KeyError: 'no such key'",
        ),
        ("exit", "The environment Resets cannot begin an episode with the row {'how': 'exit'}: SystemExit: 3"),
        ("raise without text", "_NoTextError: _NoTextError"),
        ("numbers", "Resets.reset returned a list for the row {'how': 'numbers'}; it must return None, or text"),
        ("long", "Resets.reset returned 1048577 characters"),
    ],
)
def test_a_reset_that_fails_names_class_and_row(how, message):
    with pytest.raises(RuntimeError) as caught:
        run(host_of(Resets).reset(0, None, {"how": how}))
    assert message in str(caught.value)


def test_a_reset_may_return_text_or_none():
    assert run(host_of(Resets).reset(0, None, {"how": "none"})) is None
    assert run(host_of(Resets).reset(0, None, {"how": "surrogate"})) == "a?b"


@pytest.mark.parametrize("factory", [Rewards, AsyncRewards])
def test_rewards_are_numbers(factory):
    host = host_of(factory)

    def reward(value):
        run(host.reset(0, None, {"reward": value}))
        return run(host.reward(0, None))

    assert [reward(0.5), reward(True), reward(2)] == [0.5, 1.0, 2.0]
    assert math.isnan(reward("none"))
    with pytest.raises(RuntimeError, match="raised KeyError: 'no such key'"):
        reward("raise")
    with pytest.raises(RuntimeError, match="raised ValueError: could not convert"):
        reward("long")


def test_reset_replaces_a_lost_environment():
    host = host_of(Counter)
    run(host.reset(0, None, {}))
    host.drop(0)
    lost = run(host.call(0, None, "add", {"number": 1}))
    assert (lost.content, lost.failure) == ("{'error': 'The environment of this episode was lost.'}", "exited")
    with pytest.raises(RuntimeError, match="was not called, because the environment was lost"):
        run(host.reward(0, None))
    run(host.reset(0, None, {"start": 5}))
    assert run(host.reward(0, None)) == 5.0


def test_an_environment_belongs_to_one_episode():
    only = Counter()
    host = host_of(lambda: only)
    run(host.reset(0, None, {}))
    run(host.reset(0, None, {}))  # the next episode
    with pytest.raises(RuntimeError, match=r"cannot begin an episode.*an instance that another episode uses"):
        run(host.reset(1, None, {}))
