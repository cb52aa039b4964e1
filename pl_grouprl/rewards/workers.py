"""Reward functions in processes of their own: side by side, and killed where they take too long."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import connection
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

from pl_grouprl.rewards.call import Call, Failure, Outcome, too_slow
from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.rewards.guard import kill_tree
from pl_grouprl.rewards.worker_process import read_answer, run_worker
from pl_grouprl.utilities.progress import tick

START_SECONDS = 600.0
"""How long a worker may take to start: it imports the program, and everything that the functions import."""


class RewardWorkers:
    """Worker processes for the calls of reward functions; pass it to `start_rewards` or `apply_rewards`.

    Each worker serves one call at a time on its main thread, in a session of its own. One that takes too long is killed
    together with the processes that it started (on Linux including those in other sessions), and replaced, as is one
    that dies. All end with this process, even if it is killed.

    Functions are sent to the workers once, by pickle. They keep what they remember between calls in each worker apart.
    Workers are started afresh ("spawn"), so a script needs the usual `if __name__ == "__main__":`.

    Args:
        rewards: The functions, as `prepare_rewards` gives them. Async ones, and those that say that they stay in the
            process (`ModelReward`), are not sent.
        count: How many workers.
        timeout: Seconds that a call may take: of one group, or of one rollout with verl's signature. None: any time.

    Raises:
        ValueError: If an option is out of range, a function cannot be pickled, or all stay in the process.
        RewardConfigurationError: If a worker could not load a function.
        RuntimeError: If a worker does not start.
    """

    def __init__(self, rewards: Sequence[PreparedReward], count: int, timeout: float | None = None) -> None:
        _check(count, timeout)
        self.timeout = timeout
        pickled = {reward.name: _pickle(reward) for reward in rewards if not reward.in_process}
        if not pickled and timeout is None:
            raise ValueError(
                f"reward_workers is {count}, but each of {[reward.name for reward in rewards]} stays in the process: "
                "they are async, or hold a model. Set reward_workers to 0, or give async ones a reward_timeout."
            )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        guard = _start_guard()
        self._workers = [_Worker(pickled, self._tasks, timeout, guard) for _ in range(count if pickled else 0)]
        # Before multiprocessing waits for its processes at the end of the program.
        self.close = Finalize(self, _close, (self._workers, self._tasks, guard), exitpriority=100)
        for worker in self._workers:
            worker.start()
        try:
            for worker in self._workers:
                worker.started.result()
        except BaseException:
            self.close()
            raise

    def submit(self, name: str, call: Call, retries: int) -> Future[Outcome]:
        """Run a call as soon as a worker is free; see `apply_rewards` for what failures mean."""
        if not self.close.still_active():
            raise RuntimeError("these RewardWorkers are closed; make new ones.")
        try:
            message = pickle.dumps((name, call))
        except Exception as error:
            raise ValueError(
                f"Reward function {name!r} cannot run in a worker, because what it is called with cannot be pickled "
                f"({type(error).__name__}: {error}); leave out such columns, let it name those that it needs, or set "
                "reward_workers to 0."
            ) from error
        future: Future[Outcome] = Future()
        self._tasks.put(_Task(future, message, retries))
        return future

    @property
    def process_ids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.process.pid for worker in self._workers if worker.process is not None]


class _Task(NamedTuple):
    future: Future[Outcome]
    message: bytes
    retries: int


class _Worker(threading.Thread):
    """A thread that looks after one worker process at a time.

    Attributes:
        started: Done when the first process is ready.
        process: The present one.
    """

    # multiprocessing's list of children is not made for several threads; a collected pool closes on any of them.
    _forking = threading.RLock()

    def __init__(
        self,
        pickled: Mapping[str, bytes],
        tasks: queue.SimpleQueue[_Task | None],
        timeout: float | None,
        guard: subprocess.Popen[bytes],
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._pickled = pickled
        self._tasks = tasks
        self._timeout = timeout
        self._guard = guard
        self._closing = False
        self.started: Future[None] = Future()
        self.process: Any = None
        self._pipe: Any = None

    def run(self) -> None:
        """Serve tasks until there is a None among them."""
        try:
            self._start_process()
            self.started.set_result(None)
        except BaseException as error:
            self.started.set_exception(error)
        while (task := self._tasks.get()) is not None:
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                task.future.set_result(self._attempt(task))
            except BaseException as error:  # whoever waits for the scores deals with it
                task.future.set_exception(error)
        self._end_process()

    def kill(self) -> None:
        """Kill the process and all that it started. What waits for its answer then sees that it is dead."""
        with self._forking:
            self._closing = True
            if self.process is not None:
                kill_tree(self.process.pid)

    def _attempt(self, task: _Task) -> Outcome:
        tick()
        outcome: Outcome = Failure("was not called")
        for _ in range(task.retries + 1):
            if self.process is not None and connection.wait([self.process.sentinel], 0):
                self._end_process()  # it died between two calls
            if self.process is None:
                self._start_process()
            with contextlib.suppress(OSError):  # where it dies just now, there will be no answer either
                self._pipe.send_bytes(task.message)
            outcome, repeatable = self._receive(self._timeout)
            if not (isinstance(outcome, Failure) and repeatable):
                break
        return outcome

    def _start_process(self) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        with self._forking:
            if self._closing:
                raise RuntimeError("the reward workers are being closed.")
            process = context.Process(target=run_worker, args=(theirs, self._pickled), name="reward-worker")
            process.start()
            self.process, self._pipe = process, ours
            self._tell_guard(f"+{process.pid}")
        theirs.close()
        outcome, _ = self._receive(START_SECONDS)
        if isinstance(outcome, Failure):
            raise RuntimeError(f"A reward worker did not start: it {outcome.what}; its error output says more.")

    def _receive(self, timeout: float | None) -> tuple[Outcome, bool]:
        """Wait for the answer; returns it, and whether a failure may be tried again. Kills what does not answer."""
        ready = connection.wait([self._pipe, self.process.sentinel], timeout)
        if not ready:
            self._end_process()
            return too_slow(timeout), False
        try:
            return read_answer(self._pipe.recv_bytes()), True
        except (EOFError, OSError):
            connection.wait([self.process.sentinel], 1.0)  # for its own exit code
            code = self._end_process()
            return Failure(f"ended its process with exit code {code}"), True

    def _end_process(self) -> int | None:
        process, pipe = self.process, self._pipe
        if process is None:
            return None
        with self._forking:
            kill_tree(process.pid)
            self._tell_guard(f"-{process.pid}")
            process.join()
            self.process = None
        pipe.close()
        return process.exitcode

    def _tell_guard(self, line: str) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.write(f"{line}\n".encode())  # unbuffered, and whole lines


def _check(count: int, timeout: float | None) -> None:
    if count < 1:
        raise ValueError(f"reward_workers is {count}; it must be at least 1, or 0 for rewards in this process.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"reward_timeout is {timeout}; it must be larger than 0, or None for any time.")
    if not hasattr(os, "killpg"):
        raise ValueError(f"reward_workers is {count}, but this system has no process groups; set it to 0.")


def _pickle(reward: PreparedReward) -> bytes:
    try:
        return pickle.dumps(reward)
    except Exception as error:
        raise ValueError(
            f"Reward function {reward.name!r} cannot be sent to a worker ({type(error).__name__}: {error}); define it "
            "at the top level of a module or of a file (FunctionFromFile), or set reward_workers to 0."
        ) from error


def _start_guard() -> subprocess.Popen[bytes]:
    script = str(Path(__file__).with_name("guard.py"))
    command = [sys.executable, "-I", "-S", script]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0, start_new_session=True)  # noqa: S603 (our own)


def _close(workers: Sequence[_Worker], tasks: queue.SimpleQueue[_Task | None], guard: subprocess.Popen[bytes]) -> None:
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.kill()
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()
    guard.communicate()
