"""Coroutine functions that block their event loop: stopped being waited for, named, and without harm to the others."""

import asyncio
import contextlib
import threading
import time

import pytest
from helpers import worker_rewards
from helpers.rewards import group_of, rewards_of
from helpers.watched_processes import until

from pl_grouprl.rewards import PendingRewards, Weighted, apply_rewards
from pl_grouprl.utilities.processes import BackgroundLoop

NEVER = 1000.0


def loops():
    """The threads of event loops."""
    return [thread for thread in threading.enumerate() if thread.name == "reward-functions"]


@pytest.fixture
def gate():
    """Blocks until the test is over."""
    gate = threading.Event()
    yield gate
    gate.set()
    until(lambda: len(loops()) <= 1)


def in_thread(function, *arguments, **options):
    """Run a function where a hang does not take the test with it."""
    found = []

    def run():
        try:
            found.append(function(*arguments, **options))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive(), "it hangs"
    return found[0]


async def patient(completions):
    await asyncio.sleep(0.05)
    return [2.0 for _ in completions]


def blocks_on(gate):
    async def blocks(solution_str, ground_truth):
        if solution_str == "block":
            gate.wait(NEVER)
        return 1.0

    return blocks


def test_one_that_blocks_is_named_and_the_others_go_on(gate, caplog):
    group = group_of("fine", "block")
    rewards = [patient, Weighted(blocks_on(gate), 0.0)]
    metrics = in_thread(apply_rewards, [group], rewards, timeout=0.3, max_failed_share=1.0)
    assert metrics["rewards/blocks/invalid"] >= 1.0
    assert [rollout.rewards["patient"] for rollout in group.rollouts] == [2.0, 2.0]
    assert group.rollouts[1].rewards["blocks"] is None
    assert "'blocks' blocks its event loop" in caplog.text
    assert "'blocks' took longer than reward_calls.timeout=0.3 seconds and blocked its event loop" in caplog.text
    group = group_of("fine")  # on a fresh loop
    assert in_thread(apply_rewards, [group], rewards, timeout=0.3)["rewards/blocks/mean"] == 1.0
    assert len(loops()) == 2
    gate.set()
    until(lambda: len(loops()) == 1)  # the thread ends once nothing blocks it


@pytest.mark.parametrize("in_workers", [False, True])
def test_it_ends_the_run_where_too_much_failed(gate, make_workers, in_workers):
    function = blocks_on(gate)
    limit = {"workers": make_workers(function, timeout=0.2)} if in_workers else {"timeout": 0.2}
    error = in_thread(apply_rewards, [group_of("block")], function, **limit)
    assert isinstance(error, RuntimeError)
    assert "'blocks' took longer than reward_calls.timeout=0.2 seconds and blocked its event loop" in str(error)


def test_a_task_of_the_function_that_blocks_is_named_too(gate):
    async def spawns(completions):
        async def inner():
            gate.wait(NEVER)

        await asyncio.gather(asyncio.create_task(inner(), name="patient"))

    error = in_thread(apply_rewards, [group_of("a")], [patient, spawns], timeout=0.2)
    assert "'spawns' took longer" in str(error)


def test_one_that_blocks_for_a_while_has_failed_as_well():
    """What it returned came too late, whether or not somebody waited meanwhile."""

    async def slow(completions):
        time.sleep(0.3)
        return [1.0 for _ in completions]

    pending = PendingRewards([group_of("a")], slow, timeout=0.1, max_failed_share=1.0)
    time.sleep(0.5)
    assert pending.wait()["rewards/slow/invalid"] == 1.0


def test_one_that_waits_on_a_loop_that_ends_begins_anew(gate, monkeypatch):
    abandon = BackgroundLoop.abandon

    def abandon_and_end(loop):
        label = abandon(loop)
        gate.set()
        loop.thread.join(30)
        return label

    monkeypatch.setattr(BackgroundLoop, "abandon", abandon_and_end)
    group = group_of("block")
    rewards = [Weighted(blocks_on(gate), 0.0), patient]
    in_thread(apply_rewards, [group], rewards, timeout=0.1, max_failed_share=1.0)
    assert group.rollouts[0].rewards == {"blocks": None, "patient": 2.0}


@pytest.mark.parametrize(("timeout", "retries"), [(None, 0), (5.0, 1)])
def test_one_that_raises_a_cancellation_has_failed(timeout, retries):
    calls = []

    async def gives_up(solution_str, ground_truth):
        calls.append(solution_str)
        if solution_str == "cancel":
            raise asyncio.CancelledError
        return 1.0

    group = group_of("cancel", "b", "c")
    in_thread(apply_rewards, [group], gives_up, timeout=timeout, retries=retries)
    assert rewards_of(group) == [None, 1.0, 1.0]
    assert calls.count("cancel") == 1 + retries


async def swallows(solution_str, ground_truth):
    while solution_str == "never":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(NEVER)
    return 1.0


@pytest.mark.parametrize("in_workers", [False, True])
def test_one_that_does_not_end_when_cancelled_is_abandoned(in_workers, make_workers, monkeypatch, caplog):
    monkeypatch.setattr("pl_grouprl.utilities.processes.GRACE_SECONDS", 0.05)
    group = group_of("fine", "never")
    limit = {"workers": make_workers(swallows, timeout=0.3)} if in_workers else {"timeout": 0.3}
    metrics = in_thread(apply_rewards, [group], swallows, max_failed_share=1.0, **limit)
    assert metrics["rewards/swallows/invalid"] == 1.0
    assert rewards_of(group) == [1.0, None]
    assert "'swallows' is still running after it was cancelled" in caplog.text


def test_async_functions_beside_workers_have_their_time_limit(make_workers):
    rewards = [Weighted(worker_rewards.never, 0.0), worker_rewards.length]
    group = group_of("ab")
    metrics = apply_rewards([group], rewards, workers=make_workers(rewards, timeout=0.5), max_failed_share=1.0)
    assert group.rollouts[0].rewards == {"never": None, "length": 2.0}
    assert metrics["rewards/never/invalid"] == 1.0
