"""Programs that attack the sandbox: contained, ended in time, and gone afterwards."""

from __future__ import annotations

import ast
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pl_grouprl.rewards import RewardConfigurationError, Sandbox, SandboxLimits
from pl_grouprl.rewards.guard import children
from pl_grouprl.rewards.sandbox import SandboxUnavailableError, view
from pl_grouprl.rewards.sandbox.seccomp import CLONE, CLONE3, REFUSED, SOCKET, seccomp_filter

PROCESSES = 6
LIMITS = SandboxLimits(timeout=20.0, memory_limit_mb=256, max_processes=PROCESSES, disk_limit_mb=8)


def make_sandbox(**limits):
    sandbox = Sandbox(SandboxLimits(**{**vars(LIMITS), **limits}))
    try:
        sandbox.check()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return sandbox


@pytest.fixture(scope="module")
def sandbox():
    return make_sandbox()


@pytest.fixture
def marker():
    """A word in the command lines of what a program starts, by which survivors are found."""
    return f"marked-{os.getpid()}-{time.monotonic_ns()}"


def survivors(marker):
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if marker.encode() in file.read_bytes():
                found.append(int(file.parent.name))
        except OSError:
            continue
    return found


def until(condition):
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


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


# Processes.


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
    [
        SLEEPER + ")",
        SLEEPER + ", start_new_session=True)",
        DOUBLE_FORK,
    ],
    ids=["child that holds stdout", "setsid", "double fork"],
)
def test_nothing_survives_a_program(sandbox, marker, program, record_property):
    result = sandbox.run(program.replace("{marker}", marker))
    assert (result.ending, result.exit_code) == ("exit", 0), result.stderr
    alive = survivors(marker)
    assert alive == []
    record_property("figure", f"survivors {len(alive)}")


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


# Memory, files, output, time.


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


# Network.


def test_no_socket_reaches_anything(sandbox):
    abstract = f"\0sandbox-{os.getpid()}"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(socket.AF_UNIX) as local:
        local.bind(abstract)
        local.listen()
        program = f"""
import os, socket
for family, address in (
    (socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]})),
    (socket.AF_INET6, ("::1", 1)),
    (socket.AF_UNIX, {abstract!r}),
    (socket.AF_VSOCK, (2, 1)),
    (socket.AF_NETLINK, (0, 0)),
    (socket.AF_PACKET, ("lo", 0)),
):
    try:
        with socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM) as own:
            own.connect(address)
        print("reached", family)
    except OSError as error:
        print(type(error).__name__)
"""
        result = sandbox.run(program)
    assert result.stdout.split() == [
        "PermissionError",
        "PermissionError",
        "ConnectionRefusedError",
        *["PermissionError"] * 3,
    ]


# Secrets.


def test_no_secret_of_ours_is_in_reach(sandbox, monkeypatch, tmp_path):
    monkeypatch.setenv("PLANTED_SECRET", "planted-in-environment")
    (tmp_path / "secret").write_text("planted-in-file")
    (tmp_path / "secret").chmod(0o666)
    program = f"""
import gc, os
places = ["/proc/self/environ", "/proc/1/environ", "/proc/{os.getpid()}/environ", {str(tmp_path / "secret")!r}]
places += ["/etc/passwd", "/etc/shadow", os.path.expanduser("~root/.ssh"), {os.path.expanduser("~")!r} + "/.netrc"]
for place in places:
    try:
        print(open(place).read())
    except OSError as error:
        print(type(error).__name__)
print(sorted(os.environ))
print(sorted(os.listdir("/")))
"""
    result = sandbox.run(program)
    assert "planted" not in result.stdout
    lines = result.stdout.splitlines()
    assert set(lines[:-2]) <= {"FileNotFoundError", "PermissionError", "IsADirectoryError"}
    names = set(ast.literal_eval(lines[-2]))
    assert names <= {"PATH", "LANG", "HOME", "TMPDIR", "OMP_NUM_THREADS", "LC_CTYPE"}
    assert "proc" not in lines[-1]
    assert "home" not in lines[-1]


def test_no_open_file_of_ours_is_in_reach(sandbox, tmp_path):
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        result = sandbox.run(
            "import os\nfor number in range(64):\n    try:\n        os.fstat(number); print(number)\n"
            "    except OSError:\n        pass"
        )
    assert result.stdout.split() == ["0", "1", "2"]


def test_links_lead_nowhere(sandbox, tmp_path):
    (tmp_path / "target").write_text("planted-in-file")
    program = f"""
import os
targets = {str(tmp_path / "target")!r}, "/etc/shadow", "/proc/1/root", "../../../../etc/passwd"
for number, target in enumerate(targets):
    os.symlink(target, str(number))
    try:
        print(open(str(number)).read())
    except OSError as error:
        print(type(error).__name__)
os.symlink("/", "root")
try:
    open("root/program.py", "w")
except OSError as error:
    print(type(error).__name__)
"""
    assert sandbox.run(program).stdout.split() == ["FileNotFoundError"] * 4 + ["OSError"]


def test_nothing_but_its_own_folder_is_writable(sandbox, marker):
    program = f"""
import os, sys, json
open("{marker}", "w").write("x")
for path in ("/program.py", "/stdin", "/x", "/usr/x", "/dev/x", json.__file__, sys.prefix + "/x", sys.executable):
    try:
        open(path, "a").write("x")
        print("written", path)
    except OSError as error:
        pass
print(os.listdir("."))
"""
    assert sandbox.run(program).stdout == f"['{marker}']\n"
    assert sandbox.run("import os; print(os.listdir('.'))").stdout == "[]\n"
    assert not Path("/tmp", marker).exists()
    assert not Path("/sandbox").exists()


# The walls themselves.


def test_calls_into_the_kernel_are_refused(sandbox):
    program = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    "ptrace": lambda: libc.ptrace(16, 1, 0, 0),
    "unshare": lambda: libc.unshare(0x10000000),
    "mount": lambda: libc.mount(b"none", b"/tmp", b"tmpfs", 0, None),
    "umount": lambda: libc.umount2(b"/tmp", 2),
    "setns": lambda: libc.setns(0, 0),
    "bpf": lambda: libc.syscall(321, 0, 0, 0),
    "keyctl": lambda: libc.syscall(250, 0, 0, 0),
    "setuid": lambda: libc.setuid(0),
    "chroot": lambda: libc.chroot(b"/tmp"),
    "clone": lambda: libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0),
    "clone3": lambda: libc.syscall(435, 0, 0),
}
for name, call in calls.items():
    print(name, call(), ctypes.get_errno())
print(open("/usr/bin/env", "rb").read(4))
"""
    result = sandbox.run(program)
    *rows, last = result.stdout.splitlines()
    outcomes = {row.split()[0]: row.split()[1:] for row in rows}
    assert all(value == "-1" for value, _ in outcomes.values()), outcomes
    assert outcomes["clone3"][1] == "38"
    assert last == repr(b"\x7fELF")


def test_it_has_no_rights(sandbox):
    program = """
import ctypes, os
print(os.getresuid(), os.getresgid(), os.getgroups())
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
ctypes.CDLL(None).capget(header, data)
print(list(data), ctypes.CDLL(None).prctl(39, 0, 0, 0, 0))
"""
    users, rights = sandbox.run(program).stdout.splitlines()
    assert users.startswith("(65534, 65534, 65534) (65534, 65534, 65534) [")
    assert "(0" not in users
    assert rights == "[0, 0, 0, 0, 0, 0] 1"


def test_numbers_of_system_calls_are_those_of_the_kernel():
    headers = {0: "/usr/include/x86_64-linux-gnu/asm/unistd_64.h", 1: "/usr/include/asm-generic/unistd.h"}
    ours = {**REFUSED, "clone": CLONE, "clone3": CLONE3, "socket": SOCKET}
    for column, header in headers.items():
        if not Path(header).exists():
            pytest.skip(f"no {header}")
        words = [
            line.split()[1:3] for line in Path(header).read_text().splitlines() if line.startswith("#define __NR_")
        ]
        known = {own[0]: own[1] for own in words if len(own) == 2}
        assert {name: str(numbers[column]) for name, numbers in ours.items()} == {
            name: known[f"__NR_{name}"] for name in ours
        }


def test_a_program_that_closes_its_streams_ends_too(sandbox):
    result = sandbox.run("import os; os.closerange(0, 64); os._exit(5)")
    assert (result.ending, result.exit_code, result.stdout) == ("exit", 5, "")


def first_processes():
    """The parents of running programs: the first processes of their namespaces."""
    launchers = children(os.getpid())
    inner = [process for launcher in launchers for process in children(launcher)]
    return [process for process in inner if any(is_program(child) for child in children(process))]


def is_program(process):
    try:
        return b"/program.py" in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


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


# Where it cannot be had.

NO_NAMESPACES = """
from pl_grouprl.rewards import CodeTests, RewardConfigurationError
try:
    CodeTests().set_up()
except RewardConfigurationError as error:
    print(error)
"""


def test_a_system_without_namespaces_is_refused_with_the_reason():
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    nested = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    if subprocess.run([*nested, "true"], capture_output=True).returncode:
        pytest.skip("unshare(1) makes no user namespace here, in which to forbid further ones")
    done = subprocess.run([*nested, forbid, sys.executable, NO_NAMESPACES], capture_output=True, text=True)
    assert "this system does not allow a sandbox for programs: [Errno 28] new namespaces" in done.stdout, done.stderr
    assert "without them no program is run" in done.stdout


@pytest.mark.parametrize(
    ("where", "name", "value", "message"),
    [
        (sys, "platform", "darwin", "needs Linux, and this is darwin"),
        (view.sys, "base_prefix", "/root", r"this Python is installed in \['/root'\]"),
        ("platform", "machine", lambda: "riscv64", "no filter of system calls for 'riscv64'"),
    ],
    ids=["system", "python in a home folder", "machine"],
)
def test_what_cannot_be_walled_is_refused(monkeypatch, where, name, value, message):
    if where == "platform":
        import platform as where
    if value == "/root" and not os.access("/root", os.R_OK):
        pytest.skip("needs a readable /root")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, value)
        with pytest.raises(RewardConfigurationError, match=message):
            Sandbox().run("print(1)")


def test_a_trial_that_does_not_run_is_refused():
    make_sandbox()
    with pytest.raises(RewardConfigurationError, match=r"do not run in the sandbox: .*memory_limit_mb=1"):
        Sandbox(SandboxLimits(memory_limit_mb=1)).check()


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"max_processes": 0},
        {"max_output_mb": 1.5},
    ],
    ids=str,
)
def test_limits_out_of_range_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is .*; it must be a"):
        SandboxLimits(**options)


def test_the_filter_is_known_for_two_machines():
    assert len(seccomp_filter("aarch64")) == len(seccomp_filter("x86_64")) - 2 * 8
