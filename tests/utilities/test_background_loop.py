"""Event loops in threads: what tasks do to them, and how they end."""

import asyncio
import contextlib
import threading

import pytest

from pl_grouprl.utilities.processes import BackgroundLoop, OverTimeError, run_with_limit


@pytest.fixture
def loop():
    loop = BackgroundLoop("test loop")
    yield loop
    loop.close(30)
    assert not loop.thread.is_alive()


async def give(value):
    await asyncio.sleep(0)
    return value


def test_a_task_that_exits_does_not_end_the_loop(loop):
    async def leave():
        raise SystemExit(3)

    async def spawn():
        await asyncio.wait([asyncio.create_task(leave())], timeout=30)

    loop.submit("spawn", spawn()).result(30)
    assert loop.submit("give", give(2)).result(30) == 2


def test_what_blocks_an_abandoned_loop_is_named(loop):
    gate, begun = threading.Event(), threading.Event()

    async def block():
        begun.set()
        gate.wait(30)

    async def spawn():
        await asyncio.create_task(block())

    future = loop.submit("the label", spawn())
    begun.wait(30)
    assert not loop.answers(0.01)
    assert loop.abandon() == "the label"
    assert not loop.answers(0.01)
    gate.set()
    loop.thread.join(30)
    assert future.done()


async def stubborn():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


async def slow_to_clean_up():
    try:
        await asyncio.sleep(1000)
    finally:
        await asyncio.sleep(1000)


@pytest.mark.parametrize("coroutine", [stubborn, slow_to_clean_up])
def test_tasks_that_do_not_end_are_abandoned(loop, monkeypatch, coroutine):
    monkeypatch.setattr("pl_grouprl.utilities.processes.GRACE_SECONDS", 0.05)
    with pytest.raises(OverTimeError) as error:
        loop.submit("it", run_with_limit(coroutine(), 0.05)).result(30)
    assert error.value.task is not None
    assert loop.answers(30)
    loop.close(30)  # with the task still running


def test_tasks_that_end_when_they_are_cancelled_are_not(loop):
    with pytest.raises(OverTimeError) as error:
        loop.submit("it", run_with_limit(asyncio.sleep(1000), 0.05)).result(30)
    assert error.value.task is None
    assert loop.submit("it", run_with_limit(give(2), 30)).result(30).result() == 2


def test_closing_cancels_tasks(loop):
    future = loop.submit("sleep", asyncio.sleep(1000))
    assert loop.answers(30)
    loop.close(30)
    assert future.cancelled()
    loop.close(30)
