"""Runs reward functions in worker processes: in parallel, and killed if they take too long."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import queue
import threading
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.util import Finalize
from typing import Any, NamedTuple

from pl_grouprl.rewards.base import PreparedReward, RewardConfigurationError, Score, hook_of
from pl_grouprl.rewards.calls import Call, Failure, Outcome, attempt, put_back, too_slow
from pl_grouprl.utilities.processes import (
    Reaper,
    WorkerExitError,
    WorkerProcess,
    WorkerTimeoutError,
    check_memory_limit,
    check_process_groups,
    lead_session,
    limit_memory,
)
from pl_grouprl.utilities.progress import tick

# The main function of a reward worker: calls arrive on a pipe, scores go back as JSON.
#
# The training process sends pickles of its own objects. What comes back is never unpickled: completions could make a
# reward function return anything.

_ADVICE = "make it restore the process for the calls that follow"


class RemoteError(RuntimeError):
    """An error of a worker, with its traceback as the text."""


def run_worker(pipe: Connection, pickled: Mapping[str, bytes], memory_limit_mb: int | None = None) -> None:
    """Serve calls until the pipe is closed, on the main thread, where graders that use signals work.

    Args:
        pipe: Receives calls and sends scores.
        pickled: The functions by name.
        memory_limit_mb: MiB of address space of this process, and of each that a function starts; None for no limit.
    """
    lead_session()
    limit_memory(memory_limit_mb)
    process = os.getpid()
    os.register_at_fork(
        after_in_child=pipe.close
    )  # if a child held it open, nobody would notice that this process is gone
    rewards: dict[str, PreparedReward] = {}
    for name, data in pickled.items():
        try:
            rewards[name] = pickle.loads(data)  # noqa: S301 (from the training process)
            if set_up := hook_of(rewards[name].function, "set_up"):
                set_up()
        except Exception as error:
            _send(pipe, {"configuration": _unloadable(name, error, memory_limit_mb), "trace": traceback.format_exc()})
            return
    _send(pipe, {"scores": []})
    while True:
        try:
            name, call = pickle.loads(pipe.recv_bytes())  # noqa: S301 (likewise)
        except EOFError:
            return
        answer = _serve(rewards[name], call)
        if os.getpid() != process:  # a child forked by the function also returned
            os._exit(0)
        _send(pipe, answer)


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


def _serve(reward: PreparedReward, call: Call) -> dict[str, Any]:
    try:
        with put_back(reward.name, _ADVICE):
            outcome = attempt(reward, call)
    except RewardConfigurationError as error:
        return {"configuration": str(error), "trace": traceback.format_exc()}
    except ValueError as error:  # wrong type or length
        return {"result": str(error), "trace": traceback.format_exc()}
    if isinstance(outcome, Failure):
        assert outcome.error is not None
        if outcome.out_of_memory:
            traceback.clear_frames(outcome.error.__traceback__)  # frames hold what was allocated
        trace = "".join(traceback.format_exception(outcome.error))
        return {"raised": outcome.what, "trace": trace, "out_of_memory": outcome.out_of_memory}
    return {"scores": [dataclasses.asdict(score) for score in outcome]}


def _unloadable(name: str, error: BaseException, memory_limit_mb: int | None) -> str:
    if isinstance(error, RewardConfigurationError):
        return str(error)
    limit = (
        ""
        if memory_limit_mb is None
        else f"raise reward_memory_limit_mb={memory_limit_mb} if its imports need more memory, "
    )
    return (
        f"Reward function {name!r} could not be loaded in a worker ({type(error).__name__}: {error}); {limit}define it "
        "at the top level of a module that can be imported, or of a file (FunctionFromFile), or set reward_workers to "
        "0."
    )


def _send(pipe: Connection, answer: Mapping[str, Any]) -> None:
    pipe.send_bytes(json.dumps(answer).encode())


# Runs reward functions in worker processes: in parallel, and killed if they take too long.


class RewardWorkers:
    """Worker processes for the calls of reward functions; pass it to `start_rewards` or `apply_rewards`.

    Each worker serves one call at a time on its main thread, in its own session. If a call takes too long, the worker
    is killed together with the processes that it started (on Linux including those in other sessions), and replaced,
    as is one that dies. All end with this process, even if it is killed.

    Functions are sent to the workers once, by pickle. State that they keep between calls is separate in each worker.
    Workers are started by "spawn", so a script needs the usual `if __name__ == "__main__":`.

    Args:
        rewards: Results of `prepare_rewards`. Async functions, and those with a true `stays_in_process` (such as
            `ModelReward`), are not sent.
        count: Number of workers.
        timeout: Seconds that a call may take, which is for one group or, with verl's signature, one rollout; None for
            no limit.
        memory_limit_mb: MiB of address space of each worker, its imports included, and of each process that it starts.
            A call that needs more fails with a MemoryError, and its worker is replaced. None for no limit; if the
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
        _check(count, timeout, memory_limit_mb)
        self.timeout = timeout
        pickled = {reward.name: _pickle(reward) for reward in rewards if not reward.in_process}
        if not pickled and timeout is None:
            raise ValueError(
                f"reward_workers is {count}, but each of {[reward.name for reward in rewards]} stays in this process: "
                "they are async, or hold a model. Set reward_workers to 0, or give async ones a reward_timeout."
            )
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        reaper = Reaper()
        self._workers = [
            _Worker(pickled, self._tasks, timeout, memory_limit_mb, reaper) for _ in range(count if pickled else 0)
        ]
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
                f"({type(error).__name__}: {error}); leave out such columns, have it name only the columns that it "
                "needs, or set reward_workers to 0."
            ) from error
        future: Future[Outcome] = Future()
        self._tasks.put(_Task(future, message, retries))
        return future

    @property
    def process_ids(self) -> list[int]:
        """Process ids of the running workers."""
        return [pid for worker in self._workers if (pid := worker.process.pid) is not None]


class _Task(NamedTuple):
    future: Future[Outcome]
    message: bytes
    retries: int


class _Worker(threading.Thread):
    """A thread that manages one worker process at a time.

    Attributes:
        started: Done when the first process is ready.
        process: The process.
    """

    def __init__(
        self,
        pickled: Mapping[str, bytes],
        tasks: queue.SimpleQueue[_Task | None],
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
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                task.future.set_result(self._attempt(task))
            except BaseException as error:  # raised by whoever waits for the scores
                task.future.set_exception(error)
        self.process.end()

    def _attempt(self, task: _Task) -> Outcome:
        tick()
        outcome: Outcome = Failure("was not called")
        for _ in range(task.retries + 1):
            try:
                outcome = read_answer(self.process.ask(task.message, self._timeout))
            except WorkerTimeoutError:
                return too_slow(self._timeout)
            except WorkerExitError as error:
                outcome = Failure(str(error))
            if not isinstance(outcome, Failure):
                break
            if outcome.out_of_memory:
                outcome = replace(outcome, what=f"{outcome.what} (reward_memory_limit_mb={self._memory_limit_mb})")
                self.process.end()  # the function may still hold what it allocated
        return outcome


def _check(count: int, timeout: float | None, memory_limit_mb: int | None) -> None:
    if count < 1:
        raise ValueError(f"reward_workers is {count}; it must be at least 1, or 0 for rewards in this process.")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"reward_timeout is {timeout}; it must be larger than 0, or None for no limit.")
    if memory_limit_mb is not None and memory_limit_mb < 1:
        raise ValueError(f"reward_memory_limit_mb is {memory_limit_mb}; it must be at least 1, or None for no limit.")
    check_process_groups("reward_workers", count)
    check_memory_limit("reward_memory_limit_mb", memory_limit_mb)


def _pickle(reward: PreparedReward) -> bytes:
    try:
        return pickle.dumps(reward)
    except Exception as error:
        raise ValueError(
            f"Reward function {reward.name!r} cannot be sent to a worker ({type(error).__name__}: {error}); define it "
            "at the top level of a module or of a file (FunctionFromFile), or set reward_workers to 0."
        ) from error


def _close(workers: Sequence[_Worker], tasks: queue.SimpleQueue[_Task | None], reaper: Reaper) -> None:
    for _ in workers:
        tasks.put(None)
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        if worker is not threading.current_thread():
            worker.join()
    reaper.close()
