"""What a grader may do to the process that runs it, as worker processes can import it."""

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path


def hang():
    while True:
        time.sleep(1)


def hang_with_the_lock():
    """A regular expression that backtracks for ages, inside one call that never releases the interpreter's lock."""
    re.match(r"(a+)+$", "a" * 64 + "b")


def hang_deaf():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    hang()


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def take_all_memory():
    taken = []
    while True:
        taken.append(bytearray(1 << 24))


def keep_all_memory():
    sys.kept = []
    while True:
        sys.kept.append(bytearray(1 << 24))


def overflow():
    """Runs out of stack in C: the process dies of a signal."""
    ctypes.string_at(0)


def leave_a_child():
    subprocess.Popen(["sleep", "1000"])


def fork_and_return_twice():
    os.fork()


def fork_and_die():
    if os.fork() == 0:
        hang()
    os._exit(0)


def flood():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # `close_streams` may have been called in the same worker
            stream.write("noise\n" * 20_000)
            stream.flush()


def close_streams():
    for number in (0, 1, 2):
        with contextlib.suppress(OSError):
            os.close(number)


def leave():
    sys.exit(0)


def leave_at_once():
    os._exit(0)


class NoException(BaseException):
    """As math-verify's own time limit."""


def raise_no_exception():
    raise NoException


def interrupt():
    raise KeyboardInterrupt


def leave_an_alarm():
    """Goes off in a later call, unless it is cancelled."""
    signal.setitimer(signal.ITIMER_REAL, 0.5)  # not so soon that it goes off in this call


def kill_itself():
    os.kill(os.getpid(), signal.SIGKILL)


def signal_in_a_thread():
    """As math-verify fails in a thread."""
    raised = []

    def work():
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    raise raised[0]


def change_everything():
    os.chdir("/")
    os.environ.clear()


FAILS = {
    hang, hang_with_the_lock, hang_deaf, stop, take_all_memory, keep_all_memory, overflow, fork_and_die, leave,
    leave_at_once, raise_no_exception, interrupt, kill_itself, signal_in_a_thread,
}  # fmt: skip
GRADES = {leave_a_child, fork_and_return_twice, flood, close_streams, leave_an_alarm, change_everything}
ATTACKS = {attack.__name__: attack for attack in FAILS | GRADES}


class Heavy:
    """Needs a GiB to start. Has verl's signature."""

    def set_up(self):
        self.taken = bytearray(1 << 30)

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        return 0.0


class Hostile:
    """Counts the letters of a completion, but attacks in its first calls: once in each way. Has verl's signature.

    Args:
        folder: Has a file for each attack that has been made.
        attacks: Names in `ATTACKS`.
    """

    def __init__(self, folder, attacks):
        self.folder = str(folder)
        self.attacks = list(attacks)

    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
        for name in self.attacks:
            with contextlib.suppress(FileExistsError):
                Path(self.folder, name).touch(exist_ok=False)
                Path(self.folder, name).write_text(str(os.getpid()))
                ATTACKS[name]()
                return float(len(solution_str))
        time.sleep(0.05)  # for alarms and children of earlier calls
        return float(len(solution_str))
