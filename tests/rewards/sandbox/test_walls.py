"""The walls themselves: what the kernel refuses, and where there can be no sandbox."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sandboxes import make_sandbox

from pl_grouprl.rewards import RewardConfigurationError, Sandbox, SandboxLimits
from pl_grouprl.rewards.sandbox import sandbox as view
from pl_grouprl.rewards.sandbox.seccomp import CLONE, CLONE3, REFUSED, SOCKET, seccomp_filter


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
        ("platform", "machine", lambda: "riscv64", "no system call filter for 'riscv64'"),
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
    "options", [{"timeout": 0}, {"timeout": math.inf}, {"timeout": math.nan}, {"max_processes": 0}], ids=str
)
def test_limits_out_of_range_are_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=f"{name} is "):
        SandboxLimits(**options)


def test_the_filter_is_known_for_two_machines():
    assert len(seccomp_filter("aarch64")) == len(seccomp_filter("x86_64")) - 2 * 8
