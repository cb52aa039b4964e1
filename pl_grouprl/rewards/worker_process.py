"""The main function of a reward worker: calls arrive on a pipe, scores go back as JSON.

The training process sends pickles of its own objects. What comes back is never unpickled: completions could make a
reward function return anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from pl_grouprl.rewards.base import RewardConfigurationError, hook_of
from pl_grouprl.rewards.call import Call, Failure, Outcome, attempt
from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.rewards.process_state import put_back
from pl_grouprl.rewards.results import Score
from pl_grouprl.utilities.worker_process import lead_session, limit_memory

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
