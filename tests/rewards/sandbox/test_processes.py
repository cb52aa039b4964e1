"""What a program starts is counted, ended with it, and never outlives it or its sandbox."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from helpers.sandboxes import PROCESSES, make_sandbox, survivors
from helpers.watched_processes import until

SLEEPER = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', '{marker}']"


DOUBLE_FORK = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {SLEEPER}, stdin=-3, stdout=-3, stderr=-3)
        open("started", "w").close()
        time.sleep(1000)
    os._exit(0)
while not os.path.exists("started"):
    time.sleep(0.01)
"""


def test_a_program_reads_its_input_and_writes(sandbox):
    result = sandbox.run("import sys; print(input()); print('e', file=sys.stderr); sys.exit(3)", "hallo ü\n")
    assert (result.ending, result.exit_code, result.stdout, result.stderr) == ("exit", 3, "hallo ü\n", "e\n")


def test_a_fork_bomb_meets_its_limit(sandbox, marker, record_property):
    # 60 at most, should the limit not hold.
    program = f"""
import os, time
made = 0
for _ in range(60):
    try:
        if os.fork() == 0:
            os.execv({sys.executable!r}, ["python", "-c", "import time; time.sleep(1000)", {marker!r}])
    except BlockingIOError:
        break
    made += 1
print(made)
"""
    result = sandbox.run(program)
    assert int(result.stdout) == PROCESSES - 1
    assert survivors(marker) == []
    record_property("figure", f"a fork bomb made {result.stdout.strip()} processes; survivors 0")


def test_threads_count_as_processes(sandbox):
    program = """
import threading, time
made = 0
try:
    for _ in range(60):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        made += 1
except RuntimeError:
    print(made)
"""
    assert int(sandbox.run(program).stdout) == PROCESSES - 1


@pytest.mark.parametrize(
    "program",
    [SLEEPER + ")", SLEEPER + ", start_new_session=True)", DOUBLE_FORK],
    ids=["child that holds stdout", "setsid", "double fork"],
)
def test_nothing_survives_a_program(sandbox, marker, program, record_property):
    result = sandbox.run(program.replace("{marker}", marker))
    assert (result.ending, result.exit_code) == ("exit", 0), result.stderr
    assert survivors(marker) == []
    record_property("figure", "survivors 0")


def test_nothing_survives_a_timeout(marker, record_property):
    sandbox = make_sandbox(timeout=1.5)
    program = SLEEPER.replace("{marker}", marker) + ", start_new_session=True)\nwhile True:\n    pass"
    result = sandbox.run(program)
    assert (result.ending, result.exit_code) == ("timeout", None)
    assert survivors(marker) == []
    record_property("figure", f"timeout=1.5: ended after {result.seconds:.2f} s; survivors 0")


def test_it_signals_nobody_outside(sandbox):
    program = """
import os, signal
for target in (os.getppid(), 1, 0, -1, *range(1, 40)):
    if target not in (os.getpid(), 0):
        try:
            os.kill(target, signal.SIGKILL)
        except OSError:
            pass
print(os.getpid(), os.getppid())
"""
    assert sandbox.run(program).stdout == "2 1\n"


def test_one_that_stops_itself_ends_in_time():
    result = make_sandbox(timeout=1.0).run("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)")
    assert result.ending == "timeout"


SCRIPT = """
import sys
from pl_grouprl.rewards import Sandbox
print("runs", flush=True)
Sandbox().run(sys.argv[1])
"""


def test_everything_ends_with_a_killed_parent(sandbox, marker):
    program = SLEEPER.replace("{marker}", marker) + ", start_new_session=True)\nimport time; time.sleep(1000)"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, program], start_new_session=True)
    until(lambda: any(pid != process.pid for pid in survivors(marker)))
    process.kill()
    process.wait()
    until(lambda: survivors(marker) == [])


def test_a_program_that_closes_its_streams_ends_too(sandbox):
    result = sandbox.run("import os; os.closerange(0, 64); os._exit(5)")
    assert (result.ending, result.exit_code, result.stdout) == ("exit", 5, "")


def children(process):
    try:
        return [child.pid for child in psutil.Process(process).children() if child.status() != psutil.STATUS_ZOMBIE]
    except psutil.NoSuchProcess:
        return []


def first_processes():
    """The parents of running programs: the first processes of their namespaces."""
    inner = [process for launcher in children(os.getpid()) for process in children(launcher)]
    return [process for process in inner if set(children(process)) & set(survivors("/program.py"))]


def test_walls_that_are_killed_from_outside_are_no_success(sandbox):
    with ThreadPoolExecutor(1) as executor:
        pending = executor.submit(sandbox.run, "import time; time.sleep(1000)")
        until(first_processes)
        os.kill(*first_processes(), signal.SIGKILL)
        result = pending.result()
    assert (result.ending, result.exit_code) == ("killed", None)


def test_runs_leave_nothing_here(sandbox, record_property):
    sandbox.run("pass")
    gc.collect()

    def counts():
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(children(os.getpid()))

    before = counts()
    for _ in range(5):
        sandbox.run("import os; os.fork(); open('x', 'w').write('x' * 1000)")
    after = counts()
    assert after == before
    record_property("figure", f"open files, threads, children: {before} before 5 runs, {after} after them")


def test_threads_run_programs_side_by_side(sandbox, record_property):
    program = "import os, time; time.sleep(0.5); print(input(), os.getpid())"
    start = time.perf_counter()
    with ThreadPoolExecutor(8) as executor:
        results = list(executor.map(lambda number: sandbox.run(program, str(number)), range(8)))
    assert [result.stdout for result in results] == [f"{number} 2\n" for number in range(8)]
    record_property("figure", f"8 programs of 0.5 s in {time.perf_counter() - start:.2f} s, 8 threads")
