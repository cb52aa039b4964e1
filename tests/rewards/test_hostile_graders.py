"""A grader may do what it likes in a worker: its call fails in time, is counted, and the run goes on."""

import os
from pathlib import Path

import pytest
from helpers.hostile_graders import ATTACKS, FAILS, Heavy, Hostile
from helpers.rewards import group_of, rewards_of
from helpers.watched_processes import runs, until, zombies

from pl_grouprl.rewards import RewardConfigurationError, apply_rewards

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux")

MEMORY = 1024
"""MiB for a worker: its imports reserve some of it."""


def grade(reward, texts, workers):
    group = group_of(*texts)
    metrics = apply_rewards([group], reward, workers=workers, retries=0, max_failed_share=1.0)
    return rewards_of(group), metrics["rewards/Hostile/invalid"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(ATTACKS))
def test_an_attack_costs_its_own_call_alone(name, make_workers, tmp_path, capfd):
    reward = Hostile(tmp_path, [name])
    workers = make_workers(reward, timeout=5.0, memory_limit_mb=MEMORY)
    before = os.getcwd(), dict(os.environ)
    rewards, invalid = grade(reward, ["aa", "b", "ccc", "d"], workers)
    workers.close()
    fails = ATTACKS[name] in FAILS
    assert rewards == [None if fails else 2.0, 1.0, 3.0, 1.0]
    assert invalid == fails
    assert (os.getcwd(), dict(os.environ)) == before
    assert "handle is closed" not in capfd.readouterr().err  # a forked child that answers, too
    worker = int((tmp_path / name).read_text())
    until(lambda: not runs(worker) and zombies() == [])


def test_an_end_without_a_time_limit_is_seen_although_a_child_lives(make_workers, tmp_path):
    reward = Hostile(tmp_path, ["fork_and_die"])
    assert grade(reward, ["aa", "b"], make_workers(reward)) == ([None, 1.0], 1.0)


def test_memory_beyond_the_limit_is_named_and_given_back(make_workers, tmp_path, caplog):
    reward = Hostile(tmp_path, ["keep_all_memory"])
    workers = make_workers(reward, memory_limit_mb=MEMORY)
    assert grade(reward, ["aa", "b"], workers) == ([None, 1.0], 1.0)
    assert f"'Hostile' raised MemoryError:  (reward_calls.memory_limit_mb={MEMORY})" in caplog.text
    (worker,) = workers.process_ids
    assert worker != int((tmp_path / "keep_all_memory").read_text())


def test_memory_that_a_start_needs_beyond_the_limit_is_named(make_workers):
    with pytest.raises(RewardConfigurationError, match=rf"reward_calls.memory_limit_mb={MEMORY} \(MemoryError"):
        make_workers(Heavy(), memory_limit_mb=MEMORY)
