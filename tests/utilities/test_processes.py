"""Worker processes and event loops: what hangs is replaced or abandoned, and what was started ends."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from pl_grouprl.utilities.processes import (
    BackgroundLoop,
    OverTimeError,
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    lead_session,
    run_with_limit,
)
from pl_grouprl.utilities.reaper import is_running, kill_tree

GROUPS = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


def serve(pipe, ready):
    lead_session()
    pipe.send_bytes(ready)
    while True:
        message = pipe.recv_bytes()
        if message == b"hang":
            time.sleep(1000)
        if message == b"exit":
            os._exit(3)
        pipe.send_bytes(message + b"!")


@pytest.fixture
def make():
    made, reaper = [], Reaper()

    def make(ready=b"ready", check=lambda first: None):
        made.append(WorkerProcess("test worker", serve, (ready,), check, reaper))
        return made[-1]

    yield make
    for worker in made:
        worker.end()
    reaper.close()


def ended(process):
    os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


@GROUPS
def test_a_worker_that_hangs_or_ends_is_replaced(make):
    worker = make()
    assert worker.pid is None
    assert worker.ask(b"a", 60.0) == b"a!"
    first = worker.pid
    with pytest.raises(WorkerTimeoutError, match=r"took longer than 0\.1 seconds"):
        worker.ask(b"hang", 0.1)
    with pytest.raises(WorkerExitError, match="ended its process with exit code 3"):
        worker.ask(b"exit", 60.0)
    assert worker.ask(b"b", 60.0) == b"b!"
    assert worker.pid != first
    os.kill(worker.pid, signal.SIGKILL)
    ended(worker.pid)  # between two calls
    assert worker.ask(b"c", 60.0) == b"c!"
    worker.kill()
    ended(worker.pid)
    with pytest.raises(RuntimeError, match="the test workers are being closed"):
        worker.ask(b"a", 60.0)


@GROUPS
def test_the_first_message_of_a_worker_is_checked(make):
    def check(first):
        raise ValueError(first.decode())

    with pytest.raises(ValueError, match="not ready"):
        make(b"not ready", check).start()


@GROUPS
def test_the_reaper_kills_the_groups_that_are_left():
    reaper = Reaper()
    first, second = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    reaper.tell(f"+{first.pid}")
    reaper.tell(f"+{second.pid}")
    reaper.tell(f"-{first.pid}")
    reaper.close()
    assert second.wait() == -signal.SIGKILL
    root = psutil.Process(first.pid)
    root._ident = (first.pid, 0.0)  # started at another time: another process has the id, and is not killed
    kill_tree(root)
    assert is_running(psutil.Process(first.pid))
    assert psutil.Process(first.pid).status() != psutil.STATUS_STOPPED
    first.kill()
    assert first.wait() == -signal.SIGKILL


@GROUPS
def test_a_group_is_killed_even_if_its_leader_has_ended():
    """Nobody knows any more that its members descend from the leader."""
    code = "import subprocess; print(subprocess.Popen(['sleep', '600'], stdout=subprocess.DEVNULL).pid, flush=True)"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    leader = subprocess.Popen([sys.executable, "-c", code + "; input()"], start_new_session=True, **pipes)
    member, root = psutil.Process(int(leader.stdout.readline())), psutil.Process(leader.pid)
    leader.communicate(b"\n")
    assert not root.is_running()
    assert is_running(member)
    kill_tree(root)
    member.wait(60)


# Event loops in threads.


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
    future = loop.submit("sleep", run_with_limit(asyncio.sleep(1000), 1000))
    assert loop.answers(30)
    for _ in range(2):
        loop.close(30)  # cancels tasks
    assert future.cancelled()
