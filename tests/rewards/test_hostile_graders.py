"""A grader may do what it likes in a worker: its call fails in time, is counted, and the run goes on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from helpers.hostile_graders import ATTACKS, FAILS, Heavy, Hostile, NoException
from helpers.watched_processes import runs, until, zombies

from pl_grouprl.rewards import (
    RewardConfigurationError,
    RewardWorkers,
    apply_rewards,
    prepare_rewards,
)
from pl_grouprl.types import Rollout, RolloutGroup

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")

MEMORY = 1024
"""MiB for a worker: its imports reserve some of it."""


def grade(reward, texts, workers):
    group = RolloutGroup([1], [Rollout([7], text=text) for text in texts], columns={"answer": "one"}, prompt="p")
    metrics = apply_rewards([group], reward, workers=workers, retries=0, max_failed_share=1.0)
    return [rollout.reward for rollout in group.rollouts], metrics["rewards/Hostile/invalid"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_costs_its_own_call_alone(name, tmp_path, capfd):
    reward = Hostile(tmp_path, [name])
    workers = RewardWorkers(prepare_rewards(reward), 1, timeout=5.0, memory_limit_mb=MEMORY)
    before = os.getcwd(), dict(os.environ)
    try:
        rewards, invalid = grade(reward, ["aa", "b", "ccc", "d"], workers)
    finally:
        workers.close()
    fails = ATTACKS[name] in FAILS
    assert rewards == [None if fails else 2.0, 1.0, 3.0, 1.0]
    assert invalid == fails
    assert (os.getcwd(), dict(os.environ)) == before
    assert "handle is closed" not in capfd.readouterr().err  # a forked child that answers, too
    worker = int((tmp_path / name).read_text())
    until(lambda: not runs(worker) and zombies() == [])


def test_an_end_without_a_time_limit_is_seen_although_a_child_lives(tmp_path):
    reward = Hostile(tmp_path, ["fork_and_die"])
    workers = RewardWorkers(prepare_rewards(reward), 1)
    try:
        assert grade(reward, ["aa", "b"], workers) == ([None, 1.0], 1.0)
    finally:
        workers.close()


def test_memory_beyond_the_limit_is_named_and_given_back(tmp_path, caplog):
    reward = Hostile(tmp_path, ["keep_all_memory"])
    workers = RewardWorkers(prepare_rewards(reward), 1, memory_limit_mb=MEMORY)
    try:
        assert grade(reward, ["aa", "b"], workers) == ([None, 1.0], 1.0)
        assert f"'Hostile' raised MemoryError:  (reward_calls.memory_limit_mb={MEMORY})" in caplog.text
        (worker,) = workers.process_ids
        assert worker != int((tmp_path / "keep_all_memory").read_text())
    finally:
        workers.close()


def test_memory_that_a_start_needs_beyond_the_limit_is_named():
    message = rf"could not be loaded in a worker with reward_calls.memory_limit_mb={MEMORY} \(MemoryError"
    with pytest.raises(RewardConfigurationError, match=message):
        RewardWorkers(prepare_rewards(Heavy()), 1, memory_limit_mb=MEMORY)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_out_of_range_is_refused(limit):
    with pytest.raises(ValueError, match=rf"reward_calls.memory_limit_mb is {limit}; it must be at least 1"):
        RewardWorkers(prepare_rewards(Hostile("", [])), 1, memory_limit_mb=limit)


def test_in_this_process_what_is_no_exception_is_a_failure_too():
    def grade(solution_str, ground_truth):
        if solution_str == "bad":
            raise NoException
        return 1.0

    group = RolloutGroup([1], [Rollout([7], text=text) for text in ("good", "bad")], columns={"answer": "a"})
    assert apply_rewards([group], grade)["rewards/grade/invalid"] == 1.0

    async def slow_grade(solution_str, ground_truth):
        return grade(solution_str, ground_truth)

    assert apply_rewards([group], slow_grade)["rewards/slow_grade/invalid"] == 1.0
