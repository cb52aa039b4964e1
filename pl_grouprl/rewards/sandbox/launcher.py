"""Isolates one program, runs it, and kills everything that it leaves behind.

Runs as a script, by its path, so it imports only the standard library. A line of JSON on standard input says
what to run; another byte, or the end of the input, kills the program. Its status is written to a pipe that the program
cannot reach.

Three processes take part: this one, outside the sandbox, which waits for the end or for that byte; the first process of
a new process namespace, whose death kills everything in it; and the program.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

NOBODY = 65534

_CLONE_NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "process": 0x20000000,
    "network": 0x40000000,
    "ipc": 0x08000000,
    "host name": 0x04000000,
    "cgroup": 0x02000000,
}
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE, _MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID = -100, 0x8000, 1, 2
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2

_libc = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def main() -> NoReturn:
    """Serve one request."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1 << 20)
        if not part:
            os._exit(1)
        line += part
    request = json.loads(line)
    status = request["status"]
    os.set_inheritable(status, False)
    try:
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")
        drops_to_nobody = os.geteuid() == 0
        _enter_namespaces(drops_to_nobody)
        stdin = _build_file_system(request)
        init = os.fork()
    except OSError as error:
        _say(status, {"refused": str(error)})
        os._exit(1)
    if init == 0:
        _run_first_process(request, stdin, drops_to_nobody)
    os.close(status)
    _watch(init)


def _say(status: int, message: Mapping[str, Any]) -> None:
    os.write(status, json.dumps(message).encode() + b"\n")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


# Isolation.


def _enter_namespaces(is_root: bool) -> None:
    """Enter new namespaces. Root is mapped together with nobody; any other user becomes nobody."""
    user, group = os.geteuid(), os.getegid()
    begin, begun = os.pipe()
    mapper = os.fork() if is_root else None
    if mapper == 0:  # root's map of two lines can only be written from outside
        os.close(begun)
        os.read(begin, 1)
        os._exit(_map_users(os.getppid(), f"0 0 1\n{NOBODY} {NOBODY} 1", f"0 0 1\n{NOBODY} {NOBODY} 1"))
    names = ", ".join(_CLONE_NAMESPACES)
    _check(_libc.unshare(sum(_CLONE_NAMESPACES.values())), f"new namespaces ({names})")
    os.close(begun)
    if mapper is None:
        failure = _map_users(os.getpid(), f"{NOBODY} {user} 1", f"{NOBODY} {group} 1", deny_groups=True)
    else:
        failure = os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1])
    if failure:
        raise OSError(failure, f"users of the new namespace: {os.strerror(failure)}")
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")  # the change of user reset it


def _map_users(process: int, users: str, groups: str, *, deny_groups: bool = False) -> int:
    """Write a process's user and group id maps; returns the errno of a failure, or 0."""
    texts = {"setgroups": "deny"} if deny_groups else {}
    try:
        for name, text in {**texts, "uid_map": users, "gid_map": groups}.items():
            with open(f"/proc/{process}/{name}", "w") as file:
                file.write(text)
    except OSError as error:
        return error.errno or 1
    return 0


def _build_file_system(request: Mapping[str, Any]) -> int:
    """Build an in-memory root with the files that the program sees; only its working directory is writable.

    Returns:
        File descriptor of the program's standard input.
    """
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # if memory runs out, the kernel kills the program first
    os.umask(0o022)
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("tmpfs", "/usr", "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    os.mkdir("/usr/old")
    os.chdir("/usr")
    _check(_libc.syscall(request["pivot_root"], b".", b"old"), "pivot_root")
    os.chdir("/")
    for path, target in request["links"].items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for path in request["mounts"]:  # files and folders of the machine, at the same path
        folder = os.path.isdir("/old" + path)
        os.makedirs(path if folder else os.path.dirname(path), exist_ok=True)
        if not folder:
            os.close(os.open(path, os.O_CREAT, 0o644))
        _mount("/old" + path, path, None, _MS_BIND | _MS_REC)
    for path, text in {**request["files"], "/stdin": request["stdin"]}.items():
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)
    _check(_libc.umount2(b"/old", _MNT_DETACH), "umount of the machine's files")
    os.rmdir("/old")
    directory = request["directory"]
    os.mkdir(directory)
    with contextlib.suppress(FileExistsError):
        os.symlink(directory, "/tmp")  # noqa: S108 (the program's own)
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    read_only = (request["mount_setattr"], _AT_FDCWD, b"/", _AT_RECURSIVE, ctypes.byref(attributes))
    _check(_libc.syscall(*read_only, ctypes.sizeof(attributes)), "mount_setattr (Linux 5.12 or later)")
    options = f"mode=777,size={request['disk']},nr_inodes=4096"
    _mount("tmpfs", directory, "tmpfs", _MS_NOSUID | _MS_NODEV, options)
    os.chdir(directory)
    return os.open("/stdin", os.O_RDONLY)


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    words = [None if word is None else word.encode() for word in (source, target, kind, options)]
    _check(_libc.mount(*words[:3], ctypes.c_ulong(flags), words[3]), f"mount of {target}")


# Processes.


def _watch(init: int) -> NoReturn:
    """Wait for the first process to end; when told to, kill it and thereby all others."""
    ends = select.poll()
    ends.register(os.pidfd_open(init), select.POLLIN)
    ends.register(0, select.POLLIN)
    if any(file == 0 for file, _ in ends.poll()):
        os.kill(init, signal.SIGKILL)
    os.waitpid(init, 0)  # returns when everything in its namespace is gone
    os._exit(0)


def _run_first_process(request: Mapping[str, Any], stdin: int, drops_to_nobody: bool) -> NoReturn:
    """Start the program, reap orphans, and end with it."""
    status = request["status"]
    try:
        if drops_to_nobody:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
        _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL), "prctl(PR_SET_PDEATHSIG)")
        _check(_libc.prctl(_PR_SET_DUMPABLE, 0), "prctl(PR_SET_DUMPABLE)")
        program = os.fork()
        if program == 0:
            _become_program(request, stdin, others=1 if drops_to_nobody else 2)
    except OSError as error:
        _say(status, {"refused": str(error)})
        os._exit(1)
    while True:
        process, code = os.wait()
        if process == program:
            break
    _say(status, {"exit": os.waitstatus_to_exitcode(code)})
    os._exit(0)


def _become_program(request: Mapping[str, Any], stdin: int, others: int) -> NoReturn:
    """Apply the limits, and replace this process by the program."""
    status = request["status"]
    try:
        os.setsid()
        os.dup2(stdin, 0)
        for name, limit in request["rlimits"].items():
            # The kernel counts processes per user and namespace, so the launcher's count too.
            limit += others if name == "RLIMIT_NPROC" else 0
            kind = getattr(resource, name)
            highest = resource.getrlimit(kind)[1]
            limit = limit if highest == resource.RLIM_INFINITY else min(limit, highest)
            resource.setrlimit(kind, (limit, limit))
        _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        code = bytes.fromhex(request["filter"])
        filter_ = _Filter(len(code) // 8, code)
        _say(status, {"started": True})
        installed = _libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(filter_))
        _check(installed, "filter of system calls (seccomp)")
        os.execve(request["command"][0], request["command"], request["environment"])  # noqa: S606
    except BaseException as error:
        _say(status, {"refused": str(error)})
    os._exit(1)


if __name__ == "__main__":
    sys.dont_write_bytecode = True
    main()
