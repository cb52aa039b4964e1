"""Tools and environments in worker processes: the same texts, and nothing that misbehaves is left running."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from helpers import worker_tools as tools
from helpers.tool_calls import add, contents, misbehave, multiplied, run
from helpers.watched_processes import runs, until, zombies

import pl_grouprl
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import MAX_RESULT_CHARACTERS, ToolCall

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")

ROUNDS = [pytest.param(10, id="quick"), pytest.param(200, marks=pytest.mark.slow, id="long")]


FORGED = (
    *("no JSON", "no text at all", "no value", "no mapping", "no result", "result of other fields"),
    *("result without text", "error without text"),
)
"""Answers that a tool writes into the pipe of its worker."""


@pytest.fixture
def make(make):
    return lambda *args, workers=1, **kwargs: make(*args, workers=workers, **kwargs)


@pytest.fixture(scope="module")
def shared():
    """One worker for calls that leave it alive."""
    runner = ToolRunner([tools.multiply, tools.async_multiply, tools.misbehave, tools.change], workers=1, timeout=60)
    yield runner
    runner.close()


def test_results_are_the_same_as_without_workers(shared, make):
    harms = [how for how in tools.HARMS if how not in ("kill", "hang", "100 MB", "flood", "recurse")]
    calls = [multiplied(1, 2, "async_multiply"), ToolCall("multiply", {"a": 3}), ToolCall("multiply", "text")]
    calls += [ToolCall("async_multiply", {}), ToolCall("divide", {}), ToolCall("page", {}, "web")]
    calls += map(misbehave, harms)
    here = make([tools.multiply, tools.async_multiply, tools.misbehave], workers=0, timeout=60)
    assert contents(run(shared, *calls)) == contents(run(here, *calls))
    (result,) = run(shared, misbehave("100 MB"))  # stays in the worker
    assert result.failure == "too_long"
    assert f"has {10**8} characters; at most {MAX_RESULT_CHARACTERS} are allowed" in result.content
    assert contents(run(shared, misbehave("flood"))) == [("misbehave", "dry", None)]  # what is printed is no answer
    arguments = {"values": [0], "options": {}}
    assert run(shared, ToolCall("change", arguments))[0].content == "changed"
    assert arguments == {"values": [0], "options": {}}


def test_an_unreadable_answer_kills_the_worker(make):
    runner = make([tools.forge, tools.multiply], timeout=60)
    session = runner.begin([{}])[0]
    broken = ("forge", "{'error': 'Tool forge broke its worker, whose answer cannot be read.'}", "exited")
    for how in FORGED:
        assert contents(run(runner, ToolCall("forge", {"how": how}), session=session)) == [broken], how
    assert contents(run(runner, multiplied(2, 3), session=session)) == [("multiply", "6", None)]


def test_a_forked_child_sends_no_answer(make):
    runner = make([tools.forge, tools.multiply], timeout=60)
    results = run(runner, ToolCall("forge", {"how": "fork"}), *(multiplied(2, n) for n in range(3)))
    time.sleep(0.5)  # for the child
    results += run(runner, multiplied(5, 5))
    assert [result.content for result in results] == ["parent", "0", "2", "4", "25"]


def test_a_worker_that_is_killed_is_replaced(make, tmp_path):
    runner = make([tools.hang_with_child, tools.misbehave, tools.multiply, tools.process_id], timeout=3.0)
    session = runner.begin([{}])[0]
    (before,) = run(runner, ToolCall("process_id", {}), session=session)
    hang = ToolCall("hang_with_child", {"file": str(tmp_path / "ids")})
    results = run(runner, hang, multiplied(2, 3), session=session)
    assert contents(results) == [
        ("hang_with_child", "{'error': 'Tool hang_with_child took longer than 3.0 seconds.'}", "timeout"),
        ("multiply", "6", None),
    ]
    worker, child = (tmp_path / "ids").read_text().split()
    assert worker == before.content
    assert not runs(worker)
    until(lambda: not runs(child))
    (killed,) = run(runner, misbehave("kill"), session=session)
    assert killed.content == "{'error': 'Tool misbehave ended its process with exit code -9.'}"
    assert killed.failure == "exited"
    assert run(runner, multiplied(2, 2), session=session)[0].content == "4"
    assert zombies() == []


def test_environments_live_in_one_worker_each(make):
    runner = make([tools.multiply], tools.Counter, workers=2, timeout=60)
    sessions = runner.begin([{"start": number} for number in range(4)])
    assert [session.observation for session in sessions] == [None, "It is 1.", "It is 2.", "It is 3."]
    assert [session.environment for session in sessions] == [None] * 4
    where, calls = ToolCall("process_id", {}), [ToolCall("async_add", {"number": 1}), add(10)]
    places = []
    for _ in range(2):
        results = runner.call([(session, [where, *calls]) for session in sessions])
        places.append([own[0].content for own in results])
    assert places[0] == places[1]
    assert len(set(places[0])) == 2
    assert str(os.getpid()) not in places[0]
    # Results of plain calls first, as in TRL.
    assert [[result.content for result in own[1:]] for own in results] == [
        [str(start + 21), str(start + 22)] for start in range(4)
    ]
    runner.finish(sessions)
    assert [session.reward for session in sessions] == [22.0, 23.0, 24.0, 25.0]


def test_a_worker_that_is_killed_loses_its_environments(make):
    runner = make([tools.multiply], tools.Counter, workers=2, timeout=60)
    sessions = runner.begin([{}] * 4)
    kill = misbehave("kill")
    results = runner.call([(sessions[0], [kill, add(1), multiplied(2, 3)])])[0]
    assert contents(results) == [
        ("misbehave", "{'error': 'Tool misbehave ended its process with exit code -9.'}", "exited"),
        ("add", "{'error': 'The environment of this episode was lost.'}", "exited"),
        ("multiply", "6", None),
    ]
    others = runner.call([(session, [add(1)]) for session in sessions[1:]])
    assert [own[0].failure for own in others] == [None, "exited", None]  # the third one was in the same worker
    runner.finish(sessions)
    assert [session.reward for session in sessions[1::2]] == [1.0, 1.0]
    assert all(math.isnan(session.reward) for session in sessions[0::2])
    again = runner.begin([{"start": 5}] * 4)
    assert [own[0].content for own in runner.call([(session, [add(1)]) for session in again])] == ["6"] * 4


@pytest.mark.parametrize("factory", [tools.Rewards, tools.AsyncRewards])
def test_rewards(make, factory):
    runner = make([], factory, timeout=4.0)
    sessions = runner.begin([{"reward": reward} for reward in (0.5, "raise", "hard exit", "none", "nan")])
    runner.finish(sessions)
    assert sessions[0].reward == 0.5
    assert all(math.isnan(session.reward) for session in sessions[1:])


def test_resets_that_fail_end_the_run(make):
    runner = make([], tools.Resets, timeout=60)
    with pytest.raises(
        RuntimeError, match=r"Resets cannot begin an episode with the row {'how': 'raise'}: Key"
    ) as caught:
        runner.begin([{"how": "raise"}])
    assert 'KeyError("no such key")' in str(caught.value.__cause__)  # the worker's traceback
    with pytest.raises(RuntimeError, match=r"Resets.reset ended its process with exit code -9, for the row"):
        runner.begin([{"how": "kill"}])
    with pytest.raises(ValueError, match=r"Resets.reset"):
        runner.begin([{"how": lambda: 0}])
    assert runner.begin([{"how": "none"}])[0].observation is None


def test_what_cannot_be_sent_is_refused(make):
    def local() -> str:
        """Answer."""
        return "local"

    class Local(tools.Echo):
        pass

    for arguments, error, message in (
        (([local],), ValueError, "local.*episodes.tool_workers to 0"),
        (([], Local), ValueError, "Local.*episodes.tool_workers to 0"),
        (([tools.OnlyHere()],), RuntimeError, "not a number.*episodes.tool_workers to 0"),
    ):
        with pytest.raises(error, match=message):
            make(*arguments).open()
    assert zombies() == []


@pytest.mark.parametrize("rounds", ROUNDS)
def test_nothing_is_left_after_many_rounds(make, rounds):
    before = set(threading.enumerate())
    runner = make([tools.multiply, tools.async_multiply], tools.Counter, workers=2, timeout=60)
    calls = [add(1), multiplied(1, 2), multiplied(3, 4, "async_multiply")]
    for number in range(rounds):
        sessions = runner.begin([{}] * 3)
        harm = [misbehave("kill")] if number % 10 == 9 else []
        results = runner.call([(sessions[0], [*calls, *harm]), *((session, calls) for session in sessions[1:])])
        assert [result.content for result in results[1]] == ["1", "2", "12"]
        runner.finish(sessions)
        assert sessions[1].reward == 1.0
    assert zombies() == []
    runner.close()
    runner.close()
    assert set(threading.enumerate()) == before


def test_closing_ends_running_and_waiting_calls(make, tmp_path):
    runner = make([tools.hang_with_child, tools.multiply])
    file = tmp_path / "ids"
    session = runner.begin([{}])[0]
    calls = [ToolCall("hang_with_child", {"file": str(file)}), multiplied(1, 1)]
    found = []
    thread = threading.Thread(target=lambda: found.extend(run(runner, *calls, session=session)))
    thread.start()
    until(lambda: file.exists() and len(file.read_text().split()) == 2)
    runner.close()
    thread.join(30)
    assert [result.failure for result in found] == ["exited", "exited"]
    assert found[1].content == "{'error': 'Tool multiply was not called, because the tools were closed.'}"
    until(lambda: not any(map(runs, file.read_text().split())))
    assert zombies() == []


SCRIPT = """
import signal
import sys
from helpers import worker_tools as tools
from helpers.tool_calls import add, contents, misbehave, multiplied, run
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import ToolCall

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # programs that run in the background ignore it
    runner = ToolRunner([tools.hang_with_child, tools.process_id], workers=1)
    session = runner.begin([{}])[0]
    call = ToolCall("process_id", {}) if sys.argv[1] == "end" else ToolCall("hang_with_child", {"file": "ids"})
    print(runner.call([(session, [call])])[0][0].content, flush=True)
"""


@pytest.mark.parametrize("ending", ["end", "kill", pytest.param("interrupt", marks=pytest.mark.slow)])
def test_workers_end_with_the_program(tmp_path, ending):
    (tmp_path / "script.py").write_text(SCRIPT)
    folders = [str(Path(tools.__file__).parents[1]), str(Path(pl_grouprl.__file__).parents[1])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folders)}
    command = [sys.executable, "script.py", ending]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    file = tmp_path / "ids"
    if ending != "end":
        until(lambda: file.exists() and len(file.read_text().split()) == 2)
        process.send_signal(signal.SIGKILL if ending == "kill" else signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert ("KeyboardInterrupt" in err) == (ending == "interrupt")
    assert (process.returncode == 0) == (ending == "end")
    ids = out.split() if ending == "end" else file.read_text().split()
    until(lambda: not any(map(runs, ids)))
