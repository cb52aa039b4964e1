"""A reward function that calls `os._exit` in the process that trains: its call fails, and the run goes on."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys

import pytest

from pl_grouprl.rewards import apply_rewards
from pl_grouprl.types import Rollout, RolloutGroup


def make_group():
    return RolloutGroup([1], [Rollout([7], text="a")], columns={"answer": "a"}, prompt="p")


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
    function = leaves(0)[which]
    with pytest.raises(RuntimeError, match=r"raised SystemExit: os._exit\(0\), which would have ended the run"):
        apply_rewards([make_group()], function)
    child = multiprocessing.get_context("fork").Process(target=os._exit, args=(7,))
    child.start()
    child.join()
    assert child.exitcode == 7  # elsewhere it still exits


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
