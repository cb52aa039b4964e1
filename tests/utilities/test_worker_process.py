"""Worker processes die with what they started, and are replaced."""

import os
import signal
import subprocess
import time

import pytest

from pl_grouprl.utilities.processes import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    lead_session,
)

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")


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


def test_one_that_hangs_or_ends_is_replaced(make):
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
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)  # it died between two calls
    assert worker.ask(b"c", 60.0) == b"c!"


def test_its_first_message_is_checked(make):
    def check(first):
        raise ValueError(first.decode())

    with pytest.raises(ValueError, match="not ready"):
        make(b"not ready", check).start()


def test_none_is_started_once_they_are_killed(make):
    worker = make()
    worker.start()
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(RuntimeError, match="the test workers are being closed"):
        worker.ask(b"a", 60.0)


def test_the_reaper_kills_the_groups_that_are_left():
    reaper = Reaper()
    first, second = (subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(2))
    reaper.tell(f"+{first.pid}")
    reaper.tell(f"+{second.pid}")
    reaper.tell(f"-{first.pid}")
    reaper.close()
    assert second.wait() == -signal.SIGKILL
    assert first.poll() is None
    first.kill()
    first.wait()
