"""Event loops in threads: what tasks do to them, and how they end."""

import asyncio
import threading

import pytest

from pl_grouprl.utilities.background_loop import BackgroundLoop


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


def test_closing_cancels_tasks(loop):
    future = loop.submit("sleep", asyncio.sleep(1000))
    assert loop.answers(30)
    loop.close(30)
    assert future.cancelled()
    loop.close(30)
