"""Rounds of calls in this process: the order of results, environments that are reused, calls that hang."""

from __future__ import annotations

import asyncio
import copy
import gc
import math
import os
import pickle
import threading

import pytest
from helpers.tool_calls import add, contents, multiplied, run
from helpers.worker_tools import HARMS, Counter, Echo, Stepped, async_multiply, multiply

from pl_grouprl.episodes import runner as runner_module
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import ToolCall
from pl_grouprl.training.sampler import EpisodeOptions

NEVER = 1000.0
SOON = 0.3
"""Time limit of calls, in seconds: for those that hang, and enough for the others."""


@pytest.fixture
def gate():
    """Blocks until the test is over."""
    gate = threading.Event()
    before = set(threading.enumerate())
    yield gate
    gate.set()
    for thread in set(threading.enumerate()) - before:
        thread.join(30)


@pytest.fixture
def make(gate, make):
    return make


@pytest.fixture
def hang(gate):
    def hang() -> None:
        """Wait."""
        gate.wait(NEVER)

    return hang


def counting(factory=Counter):
    """A factory, and the environments that it has made."""
    made = []

    def make():
        made.append(factory())
        return made[-1]

    return make, made


def test_results_of_async_tools_follow_those_of_plain_ones(make):
    """As in TRL: a call that could not begin is among the plain ones."""
    calls = [
        multiplied(1, 2, "async_multiply"),
        ToolCall("multiply", {"a": 3, "b": 4}),
        ToolCall("async_multiply", {}),
        ToolCall("divide", {}),
        ToolCall("async_multiply", {"a": 5, "b": 6}),
        ToolCall("page", {}, "web"),
        ToolCall("multiply", {"a": 7, "b": 8}),
        ToolCall("async_multiply", {"a": "a", "b": "b"}),
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
        ("async_multiply", str({"error": "can't multiply sequence by non-int of type 'str'"}), "raised"),
    ]


@pytest.mark.parametrize("call", [ToolCall("", {}), ToolCall(None, {}), ToolCall(["a"], {}), ToolCall("reset", {})])
def test_other_names_are_unknown(make, call):
    (result,) = run(make([], Counter), call)
    assert (result.content, result.failure) == (str({"error": f"Tool {call.name} not found."}), "unknown")


def test_calls_without_calls(make):
    runner = make([multiply])
    sessions = runner.begin([{}, {}])
    assert runner.call([]) == []
    assert runner.call([(session, []) for session in sessions]) == [[], []]
    runner.finish(sessions)
    assert [session.reward for session in sessions] == [None, None]
    assert not runner.has_environments


def test_calls_of_all_sessions_run_at_the_same_time(make):
    meeting = threading.Barrier(6)

    def meet() -> int:
        """Wait for five others."""
        return meeting.wait(30) * 0

    runner = make([meet])
    sessions = runner.begin([{}] * 3)
    results = runner.call([(session, [ToolCall("meet", {})] * 2) for session in sessions])
    assert [[result.content for result in own] for own in results] == [["0", "0"]] * 3


def test_async_calls_share_one_loop_between_rounds(make):
    loops, events = [], []

    async def meet(number: int) -> None:
        """Wait for the other.

        Args:
            number: Who this is.
        """
        loops.append(asyncio.get_running_loop())
        events.append(events[0] if events else asyncio.Event())
        if len(events) == 2:
            events[0].set()
        await events[0].wait()

    runner = make([meet])
    session = runner.begin([{}])[0]
    run(runner, ToolCall("meet", {"number": 0}), ToolCall("meet", {"number": 1}), session=session)
    run(runner, ToolCall("meet", {"number": 2}), session=session)
    assert len(loops) == 3
    assert len(set(loops)) == 1


def test_an_episode_uses_its_environment(make):
    runner = make([multiply], Counter)
    first, second = runner.begin([{"start": 1, "prompt": "p"}, {"prompt": "q"}])
    assert (first.observation, second.observation) == ("It is 1.", None)
    assert first.environment.row == {"prompt": "p"}
    add_later = ToolCall("async_add", {"number": 5})
    both = runner.call([(first, [add(2), add(2)]), (second, [add_later, add(2)])])
    assert [[result.content for result in results] for results in both] == [["3", "5"], ["2", "7"]]
    runner.finish([first, second])
    assert (first.reward, second.reward) == (5.0, 7.0)
    assert (first.reward_name, runner.reward_names) == ("Counter", ["Counter"])
    names = [schema["function"]["name"] for schema in runner.schemas()]
    assert names == ["multiply", "add", "async_add", "misbehave", "process_id"]


def test_environments_are_made_once_and_stay_in_their_threads(make):
    factory, made = counting()
    runner = make([], factory)
    assert len(made) == 1
    for rows, so_far in ((1, 1), (3, 3), (2, 3)):
        sessions = runner.begin([{}] * rows)
        assert [session.environment for session in sessions] == made[:rows]
        results = runner.call([(session, [add(1)]) for session in sessions])
        assert [own[0].content for own in results] == ["1"] * rows  # it checks the thread
        runner.finish(sessions)
        assert len(made) == so_far


def test_abandoned_episodes_give_back_their_environments(make):
    factory, made = counting()
    runner = make([], factory)
    for _ in range(3):
        sessions = runner.begin([{}] * 2)
        runner.release(sessions)
        runner.release(sessions)
        assert [session.reward for session in sessions] == [None, None]
    runner.finish(runner.begin([{}] * 2))
    assert len(made) == 2


def test_a_row_chooses_its_environment(make):
    runner = make([multiply], {"counter": Counter, "echo": Echo})
    assert runner.environment_names == ["counter", "echo"]
    assert runner.reward_names == ["Counter"]
    assert [schema["function"]["name"] for schema in runner.schemas("echo")] == ["multiply", "say"]
    counter, echo = runner.begin([{"environment": "counter", "start": 2}, {"environment": "echo", "column": 3}])
    assert echo.environment.row == {"column": 3}
    assert (counter.kind, echo.kind, runner.kind_of({"environment": "echo"})) == ("counter", "echo", "echo")
    say = ToolCall("say", {"text": "t"})
    assert runner.call([(counter, [say]), (echo, [say])])[0][0].failure == "unknown"
    runner.finish([counter, echo])
    assert (counter.reward, counter.reward_name) == (2.0, "Counter")
    assert (echo.reward, echo.reward_name) == (None, None)
    for row in ({}, {"environment": "chess"}, {"environment": ["echo"]}):
        with pytest.raises(ValueError, match="environment="):
            runner.begin([row])
    assert make([], Counter).kind_of({"environment": "what a column says"}) is None
    assert make([], {"a": Counter, "b": Counter}).reward_names == ["Counter"]


def test_environments_are_made_and_reset_in_the_order_of_the_rows(make):
    events = []

    class Notes(Echo):
        def __init__(self):
            events.append("made")

        def reset(self, name):
            events.append(name)
            if name == "bad":
                raise ValueError(name)

    runner = make([], Notes)
    runner.finish(runner.begin([{"name": name} for name in "abcd"]))
    assert events == ["made", "a", "made", "b", "made", "c", "made", "d"]
    with pytest.raises(RuntimeError, match="ValueError: bad"):
        runner.begin([{"name": name} for name in ("e", "bad", "f")])
    assert events[8:] == ["e", "bad"]


def test_a_tool_that_hangs_is_abandoned_and_the_episode_goes_on(make, hang):
    runner = make([hang, multiply], Echo, timeout=SOON)
    session = runner.begin([{}])[0]
    say = ToolCall("say", {"text": "still here"})
    results = run(runner, ToolCall("hang", {}), multiplied(2, 3), say, session=session)
    assert contents(results) == [
        ("hang", f"{{'error': 'Tool hang took longer than {SOON} seconds.'}}", "timeout"),
        ("multiply", "6", None),
        ("say", "still here", None),
    ]
    assert results[0].seconds == SOON
    assert run(runner, multiplied(2, 2), session=session)[0].content == "4"


def test_an_environment_that_hangs_is_lost_and_replaced(make, hang):
    class Hangs(Counter):
        def hang(self) -> None:
            """Wait."""
            hang()

    runner = make([], Hangs, timeout=SOON)
    session, other = runner.begin([{}, {}])
    lost = session.environment
    results = run(runner, ToolCall("hang", {}), add(1), session=session)
    assert [result.failure for result in results] == ["timeout", "exited"]
    assert results[1].content == "{'error': 'The environment of this episode was lost.'}"
    runner.finish([session, other])
    assert math.isnan(session.reward)
    assert other.reward == 0.0
    fresh = runner.begin([{}, {}])
    assert [fresh[0].environment is lost, fresh[1].environment is other.environment] == [False, True]


def test_an_async_tool_is_cancelled(make):
    cancelled = []

    async def sleep() -> None:
        """Wait."""
        try:
            await asyncio.sleep(NEVER)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    class Sleeps(Counter):
        async def sleep(self) -> None:
            """Wait."""
            await sleep()

    runner = make([], Sleeps, timeout=SOON)
    session = runner.begin([{}])[0]
    results = run(runner, ToolCall("sleep", {}), ToolCall("async_add", {"number": 1}), session=session)
    assert [result.failure for result in results] == ["timeout", None]
    assert cancelled == [True]
    assert run(runner, add(1), session=session)[0].content == "2"


def test_an_async_tool_that_ignores_cancellation_is_abandoned(make, monkeypatch):
    monkeypatch.setattr("pl_grouprl.utilities.processes.GRACE_SECONDS", 0.05)

    class Stays(Counter):
        async def stay(self) -> None:
            """Wait, whatever happens."""
            for _ in range(2):
                try:
                    await asyncio.sleep(NEVER)
                except asyncio.CancelledError:
                    continue

    runner = make([], Stays, timeout=SOON)
    session = runner.begin([{}])[0]
    assert run(runner, ToolCall("stay", {}), session=session)[0].failure == "timeout"
    assert run(runner, ToolCall("async_add", {"number": 1}), session=session)[0].failure == "exited"


def test_an_async_tool_that_blocks_its_loop_is_abandoned(make, gate, monkeypatch):
    monkeypatch.setattr("pl_grouprl.utilities.processes.GRACE_SECONDS", SOON)

    async def block() -> None:
        """Block."""
        gate.wait(NEVER)

    runner = make([block, async_multiply], timeout=SOON)
    session = runner.begin([{}])[0]
    blocked = "{'error': 'Tool block did not end, because its event loop was blocked.'}"
    assert contents(run(runner, ToolCall("block", {}), session=session)) == [("block", blocked, "timeout")]
    assert run(runner, multiplied(2, 3, "async_multiply"), session=session)[0].content == "6"


def test_an_async_tool_may_raise_anything(make):
    async def leave(how: str) -> None:
        """Raise.

        Args:
            how: What.
        """
        HARMS[how]()

    results = run(
        make([leave]), *(ToolCall("leave", {"how": how}) for how in ("exit", "hard exit", "interrupt", "cancel"))
    )
    assert [result.failure for result in results] == ["exited", "exited", "raised", "raised"]
    assert results[3].content == "{'error': 'Tool leave raised CancelledError.'}"


def test_an_interrupt_ends_the_run(make, gate, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    class Waits(Echo):
        def wait(self) -> None:
            """Wait."""
            gate.wait(NEVER)

    runner = make([], Waits, timeout=60)
    session = runner.begin([{}])[0]
    with monkeypatch.context() as patch:
        patch.setattr(runner_module, "wait_for_futures", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run(runner, ToolCall("wait", {}), session=session)
    gate.set()
    assert run(runner, ToolCall("say", {"text": "a"}), session=session)[0].failure == "exited"


def test_no_thread_is_left(make):
    before = set(threading.enumerate())
    runner = make([multiply, async_multiply], Counter, timeout=60)
    calls = [multiplied(1, 2), multiplied(1, 2, "async_multiply")]
    for _ in range(20):
        sessions = runner.begin([{}] * 4)
        runner.call([(session, calls) for session in sessions])
        runner.finish(sessions)
    runner.close()
    runner.close()
    assert set(threading.enumerate()) == before
    runner.open()  # again
    assert run(runner, *calls)[0].content == "2"


def test_threads_end_with_a_runner_that_was_not_closed():
    before = set(threading.enumerate())
    runner = ToolRunner([async_multiply], Counter)
    run(runner, multiplied(1, 2, "async_multiply"))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del runner
    gc.collect()
    for thread in threads:
        thread.join(30)
    assert set(threading.enumerate()) == before


def test_a_copy_is_closed(make):
    runner = make([multiply], Counter)
    session = runner.begin([{"start": 1}])[0]
    for other in (copy.deepcopy(runner), pickle.loads(pickle.dumps(runner))):
        fresh = other.begin([{"start": 3}])[0]
        assert fresh.environment is not session.environment
        assert run(other, add(1), session=fresh)[0].content == "4"
        other.close()
    assert run(runner, add(1), session=session)[0].content == "2"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_starts_its_own_threads(make):
    runner = make([multiply], Counter)
    session = runner.begin([{}])[0]
    run(runner, multiplied(1, 1), session=session)
    child = os.fork()
    if child == 0:
        good = run(runner, multiplied(3, 2), session=runner.begin([{}])[0])[0].content == "6"
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_options_out_of_range_are_refused():
    for timeout in (0, -1.0, math.nan):
        with pytest.raises(ValueError, match=rf"episodes.tool_timeout is {timeout}"):
            EpisodeOptions(tool_timeout=timeout)
    with pytest.raises(ValueError, match=r"episodes.tool_workers is -1"):
        EpisodeOptions(tool_workers=-1)
    with pytest.raises(ValueError, match=r"episodes.tool_workers is 2"):
        ToolRunner([async_multiply], workers=2)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_environment_rewards_steps(make, workers, caplog):
    runner = make([multiply], Stepped, workers=workers)
    assert (runner.reward_names, runner.step_reward_names) == ([], ["Stepped"])
    assert [schema["function"]["name"] for schema in runner.schemas()] == ["multiply", "async_step", "step"]
    (session,) = runner.begin([{}])
    calls = [ToolCall("step", {"number": number}) for number in (3, 0, -1, 9)]
    calls += [multiplied(1, 2), ToolCall("step", {}), ToolCall("async_step", {"number": 4})]
    results = run(runner, *calls, session=session)
    rewards = [result.reward for result in results]
    assert rewards[:3] == [3.0, None, -1.0]  # also after a call that raised
    assert math.isnan(rewards[3])
    assert rewards[4:] == [None, None, 4.0]  # no environment, no step, the async call last
    assert results[2].failure == "raised"
    runner.finish([session])
    assert (session.reward, session.reward_name) == (None, "Stepped")
