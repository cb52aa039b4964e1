"""Memory, files, output and time have limits, which a program meets and cannot raise."""

from __future__ import annotations

import signal

import pytest
from helpers.sandboxes import LIMITS, make_sandbox


def test_a_memory_bomb_meets_its_limit(sandbox, record_property):
    program = """
import resource
held = []
try:
    while len(held) < 2000:
        held.append(bytearray(1 << 20))
except MemoryError:
    print(len(held), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
"""
    blocks, resident = map(int, sandbox.run(program).stdout.split())
    assert blocks < resident < LIMITS.memory_limit_mb
    record_property("figure", f"memory_limit_mb=256: {blocks} MiB taken, {resident} MiB resident")


@pytest.mark.parametrize(
    "call",
    ["os.memfd_create('x')", "libc.shmget(0, 1 << 20, 0o1600)", "libc.mlockall(3)", "os.mkfifo('/x')"],
    ids=lambda call: call.split("(")[0],
)
def test_memory_that_no_limit_counts_is_refused(sandbox, call):
    program = f"import ctypes, os; libc = ctypes.CDLL(None); r = {call}; print('refused' if r == -1 else r)"
    result = sandbox.run(program)
    assert "refused" in result.stdout or "Error" in result.stderr


@pytest.mark.parametrize(
    "writes",
    [
        "open('big', 'wb').write(bytes(9 << 20))",
        "[open(str(n), 'wb').write(bytes(1 << 20)) for n in range(10)]",
        "open('big', 'wb').truncate(10 << 30)",
        "[os.mkdir(str(n)) for n in range(10000)]",
    ],
    ids=["one file", "many files", "10 GiB with holes", "many folders"],
)
def test_files_meet_their_limit(sandbox, writes):
    result = sandbox.run(f"import os\n{writes}")
    assert result.exit_code != 0
    assert "OSError" in result.stderr or result.exit_code == -signal.SIGXFSZ


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_flood_of_output_ends_it(sandbox, stream, record_property):
    result = sandbox.run(f"import sys\nwhile True:\n    sys.{stream}.write('x' * 100000)")
    assert result.ending == "output"
    assert len(getattr(result, stream)) == 1 << 20
    record_property("figure", f"{stream}: 1.0 MiB kept of an endless stream")


@pytest.mark.parametrize(
    "program", ["while True: pass", "import time; time.sleep(1000)", "input(); input()"], ids=["loop", "sleep", "input"]
)
def test_what_takes_too_long_is_ended(program):
    result = make_sandbox(timeout=1.0).run(program, "one line\n")
    assert result.ending == "timeout" or "EOFError" in result.stderr


def test_limits_cannot_be_raised(sandbox):
    program = """
import resource
for name in ("AS", "CPU", "NPROC", "FSIZE", "NOFILE", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print(name)
    except ValueError:
        pass
"""
    assert sandbox.run(program).stdout == ""
