"""The processes that this one has started."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time

from pl_grouprl.utilities.reaper import own_children, process_status


def sleeper():
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_own_children_are_those_that_run():
    before = own_children()
    started = [sleeper()]
    thread = threading.Thread(target=lambda: started.append(sleeper()))  # the kernel lists them by thread
    thread.start()
    thread.join()
    try:
        assert own_children() - before == {process.pid for process in started}
        started[0].kill()
        started[0].wait()
        assert own_children() - before == {started[1].pid}
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert own_children() == before


def test_a_process_without_children_has_none():
    code = "import os; from pl_grouprl.utilities.reaper import own_children; print(own_children())"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["set()"]


def test_zombies_neither_count_nor_are_reaped():
    process = sleeper()
    process.kill()
    while process_status(process.pid):
        time.sleep(0.01)
    assert process.pid not in own_children()
    assert process.wait() == -signal.SIGKILL  # its exit code is still there
