"""Makes a process on Linux lack what macOS or Windows lacks, as far as Python code can tell.

It stands for neither: paths, `os.name`, file locks and the packages' own code remain those of Linux.
"""

from __future__ import annotations

import builtins
import errno
import io
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

LINUX_FOLDERS = ("/proc", "/dev/shm", "/sys")
LINUX_NAMES = ("sched_getaffinity", "sched_setaffinity", "memfd_create", "pidfd_open", "eventfd", "setns", "unshare")
PATH_MODULES = ("pathlib", "posixpath", "genericpath", "os", "shutil", "io")
UNIX_MODULES = ("resource", "fcntl", "pwd", "grp", "termios", "tty", "pty", "syslog")
UNIX_NAMES = (
    *("fork", "forkpty", "register_at_fork", "killpg", "getpgid", "getpgrp", "setpgid", "setpgrp", "setsid", "getsid"),
    *("getuid", "geteuid", "getgid", "getegid", "setuid", "setgid", "wait", "waitid", "WNOHANG", "mkfifo", "uname"),
    *("nice", "getloadavg", "sysconf", "statvfs", "chown", "posix_spawn", "ctermid", "fchmod", "O_DIRECTORY"),
)
WINDOWS_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM", "SIG_DFL", "SIG_IGN")


def become(system: str) -> None:
    """Turn this process into one of `darwin` or `win32`, for good; everything but the package is imported by now."""
    for name in [name for name in sys.modules if name.split(".")[0] == "pl_grouprl"]:
        del sys.modules[name]
    sys.platform = system
    multiprocessing.set_start_method("spawn", force=True)
    _remove(os, LINUX_NAMES)
    for owner in (builtins, io, os):
        for name in ("open", "listdir", "scandir", "stat", "lstat", "readlink"):
            if hasattr(owner, name):
                setattr(owner, name, _without_linux_folders(getattr(owner, name)))
    if system == "win32":
        _become_windows()


def _become_windows() -> None:
    access_mode = _access_mode()
    for name in UNIX_MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    _remove(os, UNIX_NAMES)
    _remove(signal, [name for name in vars(signal) if name.startswith("SIG") and name not in WINDOWS_SIGNALS])
    signal.valid_signals = lambda: {number for number in signal.Signals if number.name in WINDOWS_SIGNALS}
    _remove(signal, ["setitimer", "getitimer", "alarm", "pause", "ITIMER_REAL", "pthread_kill", "pthread_sigmask"])
    real_open, real_fsync = os.open, os.fsync

    def open_file(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).is_dir():
            raise PermissionError(errno.EACCES, "Permission denied: a folder", str(path))
        return real_open(path, *arguments, **options)

    def fsync(handle: int) -> None:
        if access_mode(handle) == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor: not open for writing")
        real_fsync(handle)

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.EPERM, "A required privilege is not held by the client")

    def kill(process: int, number: int) -> None:
        raise AssertionError(f"on Windows, this would end process {process}")

    os.open, os.fsync, os.symlink, os.kill = open_file, fsync, refuse, kill


def _access_mode() -> Callable[[int], int]:
    from fcntl import F_GETFL, fcntl

    return lambda handle: fcntl(handle, F_GETFL) & os.O_ACCMODE


def _remove(module: Any, names: Any) -> None:
    for name in names:
        vars(module).pop(name, None)


def _without_linux_folders(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **options: Any) -> Any:
        path = arguments[0] if arguments else options.get("path")
        linux = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(LINUX_FOLDERS)
        if linux and _asks_for_package():
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        return function(*arguments, **options)

    return wrapped


def _asks_for_package() -> bool:
    """Whether the package is the caller. Others, such as psutil, look up files of the system that they run on."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") in PATH_MODULES:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith("pl_grouprl")
