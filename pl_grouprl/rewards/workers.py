"""Runs reward functions in worker processes: in parallel, and killed if they take too long.

The training process sends pickles of its own objects through a pipe; scores come back as JSON. What comes back is never
unpickled, because completions could make a reward function return anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any

from pl_grouprl.rewards.apply import Call, Failure, Outcome, attempt
from pl_grouprl.rewards.base import PreparedReward, RewardConfigurationError, Score, hook_of
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    check_process_groups,
    lead_session,
    limit_memory,
    require_system,
)
from pl_grouprl.utilities.progress import tick


class RewardWorkers:
    """Worker processes for the calls of reward functions; pass it to `PendingRewards` or `apply_rewards`.

    Each worker serves one call at a time on its main thread, in its own session. If a call takes too long, the worker
    is killed together with the processes that it started (on Linux including those in other sessions), and replaced,
    as is a dead worker. All end with this process, even if it is killed.

    Functions are sent to the workers once, by pickle. State that they keep between calls is separate in each worker.
    Workers are started by "spawn", so a script needs the usual `if __name__ == "__main__":`.

    Args:
        rewards: Results of `prepare_rewards`. Async functions, and those with a true `stays_in_process` (such as
            `ModelReward`), are not sent.
        count: Number of workers.
        timeout: Seconds that a call may take, which is for one group or, with verl's signature, one rollout; no limit
            if None.
        memory_limit_mb: MiB of address space of each worker, its imports included, and of each process that it starts.
            A call that needs more fails with a MemoryError, and its worker is replaced. No limit if None; if the
            system runs out of memory, it kills workers first.

    Raises:
        ValueError: If an option is out of range, a function cannot be pickled, or all stay in the process.
        RewardConfigurationError: If a worker could not load a function.
        RuntimeError: If a worker does not start.
    """

    def __init__(
        self,
        rewards: Sequence[PreparedReward],
        count: int,
        timeout: float | None = None,
        memory_limit_mb: int | None = None,
    ) -> None:
        check_options(
            {
                "reward_calls.workers": (count, count >= 1, "at least 1, or 0 for rewards in this process"),
                "reward_calls.timeout": (
                    timeout,
                    timeout is None or timeout > 0,
                    "larger than 0, or None for no limit",
                ),
                "reward_calls.memory_limit_mb": (
                    memory_limit_mb,
                    memory_limit_mb is None or memory_limit_mb >= 1,
                    "at least 1, or None for no limit",
                ),
            }
        )
        check_process_groups("reward_calls.workers", count)
        if memory_limit_mb is not None:  # macOS accepts a limit, and does not enforce it
            why = "only Linux limits the address space of a process"
            name = f"reward_calls.memory_limit_mb={memory_limit_mb}"
            require_system(sys.platform == "linux", name, why, "set it to None")
        self.timeout = timeout
        pickled: dict[str, bytes] = {}
        for reward in rewards:
            if not reward.in_process:
                try:
                    pickled[reward.name] = pickle.dumps(reward)
                except Exception as error:
                    raise ValueError(
                        f"Reward function {reward.name!r} cannot be sent to a worker ({error!r}); define it at the top "
                        "level of a module or of a file (FunctionFromFile), or set reward_calls.workers to 0."
                    ) from error
        if not pickled and timeout is None:
            raise ValueError(
                f"reward_calls.workers is {count}, but each of {[reward.name for reward in rewards]} stays in this "
                "process: they are async, or hold a model. Set workers to 0, or give async ones a timeout."
            )
        self._tasks: _Tasks = queue.SimpleQueue()
        reaper = Reaper()
        options = (pickled, self._tasks, timeout, memory_limit_mb, reaper)
        self._workers = [_Worker(*options) for _ in range(count if pickled else 0)]
        # Runs at exit, before multiprocessing waits for its processes.
        self.close = Finalize(self, _close, (self._workers, self._tasks, reaper), exitpriority=100)
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
            raise RuntimeError("these RewardWorkers are closed; create new ones.")
        try:
            message = pickle.dumps((name, call))
        except Exception as error:
            raise ValueError(
                f"Reward function {name!r} cannot run in a worker, because its arguments cannot be pickled "
                f"({type(error).__name__}: {error}); remove such columns, have it name only the columns that it "
                "needs, or set reward_calls.workers to 0."
            ) from error
        future: Future[Outcome] = Future()
        self._tasks.put((future, message, retries))
        return future

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the running workers."""
        return [pid for worker in self._workers if (pid := worker.process.pid) is not None]


_Tasks = queue.SimpleQueue["tuple[Future[Outcome], bytes, int] | None"]
"""Messages to workers, with the futures of their outcomes and the number of retries; None ends a worker."""


class _Worker(threading.Thread):
    """A thread that manages one worker process at a time; `started` is done when the first one is ready."""

    def __init__(
        self,
        pickled: Mapping[str, bytes],
        tasks: _Tasks,
        timeout: float | None,
        memory_limit_mb: int | None,
        reaper: Reaper,
    ) -> None:
        super().__init__(name="reward-worker", daemon=True)
        self._tasks = tasks
        self._timeout = timeout
        self._memory_limit_mb = memory_limit_mb
        self.started: Future[None] = Future()
        self.process = WorkerProcess("reward worker", run_worker, (pickled, memory_limit_mb), read_answer, reaper)

    def run(self) -> None:
        """Serve tasks until it gets None."""
        try:
            self.process.start()
            self.started.set_result(None)
        except BaseException as error:
            self.started.set_exception(error)
        while (task := self._tasks.get()) is not None:
            future, message, retries = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._attempt(message, retries))
            except BaseException as error:  # raised by whoever waits for the scores
                future.set_exception(error)
        self.process.end()

    def _attempt(self, message: bytes, retries: int) -> Outcome:
        tick()
        outcome: Outcome = Failure("was not called")
        for _ in range(retries + 1):
            try:
                outcome = read_answer(self.process.ask(message, self._timeout))
            except WorkerTimeoutError:
                return Failure.too_slow(self._timeout)
            except WorkerExitError as error:
                outcome = Failure(str(error))
            if not isinstance(outcome, Failure):
                break
            if outcome.out_of_memory:
                limit = f"reward_calls.memory_limit_mb={self._memory_limit_mb}"
                outcome = replace(outcome, what=f"{outcome.what} ({limit})")
                self.process.end()  # the function may still hold what it allocated
        return outcome


def _close(workers: Sequence[_Worker], tasks: _Tasks, reaper: Reaper) -> None:
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()
    reaper.close()


# What runs in a worker, and the reader of its answers.


class RemoteError(RuntimeError):
    """An error of a worker, with its traceback as the text."""


def read_answer(message: bytes) -> Outcome:
    """Turn a worker's message into the outcome of the call.

    Raises:
        RewardConfigurationError: If the function raised it, or could not be loaded.
        ValueError: If it returned the wrong type or length.
    """
    answer = json.loads(message)
    if "scores" in answer:
        return [Score(**fields) for fields in answer["scores"]]
    cause = RemoteError(f"in a reward worker:\n{answer['trace']}")
    if "raised" in answer:
        return Failure(answer["raised"], cause, answer["out_of_memory"])
    if "configuration" in answer:
        raise RewardConfigurationError(answer["configuration"]) from cause
    raise ValueError(answer["result"]) from cause


def run_worker(pipe: Connection, pickled: Mapping[str, bytes], memory_limit_mb: int | None = None) -> None:
    """Serve calls until the pipe is closed, on the main thread, where graders that use signals work.

    Args:
        pipe: Receives calls and sends scores.
        pickled: The functions by name.
        memory_limit_mb: MiB of address space of this process, and of each that a function starts; no limit if None.
    """
    lead_session()
    limit_memory(memory_limit_mb)
    process = os.getpid()
    os.register_at_fork(after_in_child=pipe.close)  # a child that held it open would hide that this process is gone

    rewards: dict[str, PreparedReward] = {}
    for name, data in pickled.items():
        try:
            rewards[name] = pickle.loads(data)  # noqa: S301 (from the training process)
            if set_up := hook_of(rewards[name].function, "set_up"):
                set_up()
        except Exception as error:
            what = str(error)
            if not isinstance(error, RewardConfigurationError):
                what = (
                    f"Reward function {name!r} could not be loaded in a worker with reward_calls.memory_limit_mb="
                    f"{memory_limit_mb} ({type(error).__name__}: {error}); define it at the top level of a module that "
                    "can be imported, or of a file (FunctionFromFile), or set reward_calls.workers to 0."
                )
            pipe.send_bytes(json.dumps({"configuration": what, "trace": traceback.format_exc()}).encode())
            return
    pipe.send_bytes(b'{"scores": []}')
    answer: dict[str, Any]
    while True:
        try:
            name, call = pickle.loads(pipe.recv_bytes())  # noqa: S301 (likewise)
        except EOFError:
            return
        try:
            try:
                outcome = attempt(rewards[name], call)
            finally:
                signal.alarm(0)  # one that the function left would end a later call, or the report of this one
            if isinstance(outcome, Failure):
                assert outcome.error is not None
                if outcome.out_of_memory:
                    traceback.clear_frames(outcome.error.__traceback__)  # frames hold what was allocated
                trace = "".join(traceback.format_exception(outcome.error))
                answer = {"raised": outcome.what, "trace": trace, "out_of_memory": outcome.out_of_memory}
            else:
                answer = {"scores": [dataclasses.asdict(score) for score in outcome]}
        except RewardConfigurationError as error:
            answer = {"configuration": str(error), "trace": traceback.format_exc()}
        except ValueError as error:  # wrong type or length
            answer = {"result": str(error), "trace": traceback.format_exc()}
        if os.getpid() != process:  # a child forked by the function also returned
            os._exit(0)
        pipe.send_bytes(json.dumps(answer).encode())


def check_calls(
    rewards: Sequence[PreparedReward], workers: int, timeout: float | None, *, environments: bool = False
) -> None:
    """Reject functions that cannot run as a run's options say, before its first rollout.

    Args:
        rewards: Results of `prepare_rewards`.
        workers: Number of worker processes; 0 runs all functions in this process.
        timeout: Seconds that a call may take; no limit if None.
        environments: Whether rollouts have environments, which live in this process.

    Raises:
        ValueError: Names the functions that could not be stopped, might never end, or would need environments in a
            worker.
    """
    plain = [reward.name for reward in rewards if not reward.is_async]
    unstoppable = len(plain) == len(rewards) or not all(reward.in_process for reward in rewards)
    if timeout is not None and not workers and unstoppable:
        raise ValueError(
            f"reward_calls.timeout is {timeout} with reward_calls.workers=0, and {plain} run in this process, where "
            "they cannot be stopped; set workers to 1 or more, or omit the timeout."
        )
    endless = [reward.name for reward in rewards if reward.needs_time_limit]
    if endless and (not workers or timeout is None):
        raise ValueError(
            f"the reward functions {endless} may take forever on some completions, and reward_calls.workers is "
            f"{workers} with timeout {timeout}; set workers to 1 or more and timeout to seconds per call."
        )
    stranded = [reward.name for reward in rewards if reward.names_environments and not reward.in_process]
    if environments and workers and stranded:
        raise ValueError(
            f"the reward functions {stranded} take `environments`, which live in this process, and "
            "reward_calls.workers would run them in another; set it to 0, or set `stays_in_process = True` on each."
        )
