"""Coroutine functions that block their event loop: stopped being waited for, named, and without harm to the others."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time

import pytest

from pl_grouprl.rewards import RewardWorkers, Weighted, apply_rewards, prepare_rewards, start_rewards
from pl_grouprl.rewards import calls as async_calls
from pl_grouprl.types import Rollout, RolloutGroup

NEVER = 1000.0


@pytest.fixture
def gate():
    """Blocks until the test is over."""
    gate = threading.Event()
    yield gate
    gate.set()
    for thread in loops():
        if thread is not current_loop():
            thread.join()


def loops():
    """The threads of event loops."""
    return [thread for thread in threading.enumerate() if thread.name == "reward-functions"]


def current_loop():
    loop = async_calls._loops.get(os.getpid())
    return loop and loop.thread


def make_group(*texts):
    return RolloutGroup([1], [Rollout([7], text=text) for text in texts], columns={"answer": "a"}, prompt="p")


def in_thread(function):
    """Run a function where a hang does not take the test with it."""
    found = []

    def run():
        try:
            found.append(function())
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
    group = make_group("fine", "block")
    rewards = [patient, Weighted(blocks_on(gate), 0.0)]
    metrics = in_thread(lambda: apply_rewards([group], rewards, timeout=0.3, max_failed_share=1.0))
    assert metrics["rewards/blocks/invalid"] >= 1.0
    assert [rollout.rewards["patient"] for rollout in group.rollouts] == [2.0, 2.0]
    assert group.rollouts[1].rewards["blocks"] is None
    assert "Reward function 'blocks' blocks its event loop; its thread is abandoned." in caplog.text
    assert (
        "'blocks' took longer than reward_calls.timeout=0.3 seconds and blocked its event loop; await whatever takes "
        "time" in caplog.text
    )
    group = make_group("fine")  # on a fresh loop
    assert in_thread(lambda: apply_rewards([group], rewards, timeout=0.3))["rewards/blocks/mean"] == 1.0


def test_it_ends_the_run_where_too_much_failed(gate):
    error = in_thread(lambda: apply_rewards([make_group("block")], blocks_on(gate), timeout=0.2))
    assert isinstance(error, RuntimeError)
    assert (
        "Reward function 'blocks' took longer than reward_calls.timeout=0.2 seconds and blocked its event loop"
        in str(error)
    )


def test_workers_hand_their_time_limit_on(gate):
    function = blocks_on(gate)
    workers = RewardWorkers(prepare_rewards(function), 1, timeout=0.2)
    try:
        error = in_thread(lambda: apply_rewards([make_group("block")], function, workers=workers))
    finally:
        workers.close()
    assert "'blocks' took longer than reward_calls.timeout=0.2 seconds" in str(error)


def test_a_task_of_the_function_that_blocks_is_named_too(gate):
    async def spawns(completions):
        async def inner():
            gate.wait(NEVER)

        await asyncio.gather(asyncio.create_task(inner(), name="patient"))

    error = in_thread(lambda: apply_rewards([make_group("a")], [patient, spawns], timeout=0.2))
    assert "'spawns' took longer" in str(error)


def test_one_that_blocks_for_a_while_has_failed_as_well():
    """What it returned came too late, whether or not somebody waited meanwhile."""

    async def slow(completions):
        time.sleep(0.3)
        return [1.0 for _ in completions]

    group = make_group("a")
    pending = start_rewards([group], slow, timeout=0.1, max_failed_share=1.0)
    time.sleep(0.5)
    assert pending.wait()["rewards/slow/invalid"] == 1.0


def test_one_that_waits_on_a_loop_that_ends_begins_anew():
    async def blocks(completions):
        time.sleep(1.0)

    group = make_group("a")
    pending = start_rewards([group], [Weighted(blocks, 0.0), patient], timeout=0.1, max_failed_share=1.0)
    wait = pending._waiters[1]

    def wait_late():
        for thread in loops():
            if thread is not current_loop():
                thread.join(30)
        return wait()

    pending._waiters[1] = wait_late
    in_thread(pending.wait)
    assert group.rollouts[0].rewards == {"blocks": None, "patient": 2.0}


def test_a_thread_ends_once_nothing_blocks_it(gate):
    function = blocks_on(gate)
    in_thread(lambda: apply_rewards([make_group("block")], function, timeout=0.1, max_failed_share=1.0))
    (thread,) = [thread for thread in loops() if thread is not current_loop()]
    assert thread.is_alive()
    gate.set()
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("timeout", [None, 5.0])
@pytest.mark.parametrize("retries", [0, 1])
def test_one_that_raises_a_cancellation_has_failed(timeout, retries):
    calls = []

    async def gives_up(solution_str, ground_truth):
        calls.append(solution_str)
        if solution_str == "cancel":
            raise asyncio.CancelledError
        return 1.0

    group = make_group("cancel", "b", "c")
    in_thread(lambda: apply_rewards([group], gives_up, timeout=timeout, retries=retries))
    assert [rollout.reward for rollout in group.rollouts] == [None, 1.0, 1.0]
    assert calls.count("cancel") == 1 + retries


def test_a_timeout_out_of_range_is_refused():
    with pytest.raises(ValueError, match="timeout is 0; it must be larger than 0"):
        start_rewards([make_group("a")], patient, timeout=0)


async def swallows(solution_str, ground_truth):
    while solution_str == "never":
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(NEVER)
    return 1.0


async def cleans_up_slowly(solution_str, ground_truth):
    try:
        if solution_str == "never":
            await asyncio.sleep(NEVER)
    finally:
        if solution_str == "never":
            await asyncio.sleep(NEVER)
    return 1.0


@pytest.mark.parametrize("function", [swallows, cleans_up_slowly])
@pytest.mark.parametrize("in_worker", [False, True])
def test_one_that_does_not_end_when_cancelled_is_abandoned(function, in_worker, monkeypatch, caplog):
    monkeypatch.setattr("pl_grouprl.utilities.processes.GRACE_SECONDS", 0.05)
    group = make_group("fine", "never")
    workers = RewardWorkers(prepare_rewards(function), 1, timeout=0.3) if in_worker else None
    try:
        options = {"workers": workers} if workers else {"timeout": 0.3}
        metrics = in_thread(lambda: apply_rewards([group], function, max_failed_share=1.0, **options))
    finally:
        if workers:
            workers.close()
    assert metrics[f"rewards/{function.__name__}/invalid"] >= 1.0
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None]
    assert (
        in_worker
        or f"{function.__name__!r} is still running after it was cancelled; the call is abandoned" in caplog.text
    )
