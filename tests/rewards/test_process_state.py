"""Reward functions that change the process that trains: put back where it can be, and named."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import re
import resource
import signal
import subprocess
import sys

import pytest

from pl_grouprl.rewards import apply_rewards
from pl_grouprl.rewards import calls as process_state
from pl_grouprl.types import Rollout, RolloutGroup


@pytest.fixture(autouse=True)
def _forgotten():
    process_state._warned.clear()


def make_group():
    return RolloutGroup([1], [Rollout([7], text="a")], columns={"answer": "a"}, prompt="p")


def state():
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    return os.getcwd(), limits, handlers, signal.getitimer(signal.ITIMER_REAL)[0], os._exit


def lower_a_limit():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))


CHANGES = {
    "directory": (lambda: os.chdir("/"), r"changed the working directory to '/' \(put back\)"),
    "handler": (
        lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN),
        r"changed signal handlers of \['SIGTERM'\] \(put back\)",
    ),
    "alarm": (lambda: signal.alarm(100), r"left an alarm \(cancelled\)"),
    "limit": (lower_a_limit, r"changed the limits of the process: \['RLIMIT_N?OFILE \(put back\)'\]"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_it_is_put_back_and_named_once(caplog, change, message):
    def grade(completions, **columns):
        change()
        return [1.0 for _ in completions]

    before = state()
    for _ in range(2):
        apply_rewards([make_group()], grade)
        assert state() == before
    (warning,) = caplog.messages
    expected = f"Reward function 'grade' {message}; make it leave the process as it was, or run it .*reward_workers"
    assert re.search(expected, warning), warning


def test_one_that_raises_leaves_nothing_either(caplog):
    def grade(completions, **columns):
        os.chdir("/")
        raise OSError("no")

    before = state()
    apply_rewards([make_group()], grade, max_failed_share=1.0)
    assert state() == before


def test_a_changed_environment_is_named_without_its_values(caplog, monkeypatch):
    monkeypatch.setenv("PLANTED", "old")

    def grade(completions, **columns):
        os.environ["PLANTED"] = "a-secret"
        return [1.0 for _ in completions]

    apply_rewards([make_group()], grade)
    assert "'grade' changed the environment: ['PLANTED']" in caplog.text
    assert "a-secret" not in caplog.text


def test_a_directory_that_is_gone_cannot_be_put_back(caplog, tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")

    def grade(completions, **columns):
        os.chdir(tmp_path)
        (tmp_path / "gone").rmdir()
        return [1.0 for _ in completions]

    apply_rewards([make_group()], grade)
    assert f"changed the working directory to '{tmp_path}' (which cannot be put back: " in caplog.text


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_processes_that_it_leaves_are_named(caplog):
    left = []

    def grade(completions, **columns):
        left.append(subprocess.Popen(["sleep", "1000"], start_new_session=True))
        return [1.0 for _ in completions]

    try:
        apply_rewards([make_group()], grade)
        assert f"'grade' left processes: [{left[0].pid}]" in caplog.text
    finally:
        for process in left:
            process.kill()
            process.wait()


def test_one_that_leaves_all_as_it_is_is_not_warned_about(caplog):
    def grade(completions, **columns):
        subprocess.run(["true"])
        return [1.0 for _ in completions]

    apply_rewards([make_group()], grade)
    assert caplog.messages == []


def leaves(code):
    """A plain function and an async one that end the process."""

    def grade(completions, **columns):
        os._exit(code)

    async def grade_async(completions, **columns):
        await asyncio.sleep(0)
        os._exit(code)

    return [grade, grade_async]


@pytest.mark.parametrize("which", [0, 1], ids=["plain", "async"])
def test_an_exit_without_a_word_is_a_failure_of_the_function(which):
    real = os._exit
    function = leaves(0)[which]
    with pytest.raises(RuntimeError, match=r"raised SystemExit: os._exit\(0\), which would have ended the run"):
        apply_rewards([make_group()], function)
    assert os._exit is real


SCRIPT = """
import os
from pl_grouprl.rewards import apply_rewards
from pl_grouprl.types import Rollout, RolloutGroup

def ends_the_run(completions, **columns):
    os._exit(0)

apply_rewards([RolloutGroup([1], [Rollout([7], text="a")])], ends_the_run)
"""


def test_a_run_that_a_reward_ends_has_not_succeeded():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Reward function 'ends_the_run' raised SystemExit: os._exit(0)" in done.stderr


def forked(pipe):
    pipe.send("child")


def test_forked_children_of_a_function_end_as_always():
    def grade(completions, **columns):
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe()
        child = context.Process(target=forked, args=(theirs,))
        child.start()
        said = ours.recv()
        child.join()
        return [float(said == "child" and child.exitcode == 0) for _ in completions]

    group = make_group()
    apply_rewards([group], grade)
    assert group.rollouts[0].reward == 1.0
