"""Running reward functions: retries, functions side by side, failures kept to the rollouts they concern.

Functions run in one of three places: coroutine functions on an event loop in a thread of its own (so a loop that
already runs here, a notebook's, does not matter); plain ones in worker processes where there are any; otherwise plain
ones run here, one after another, on the thread that waits for the scores: graders that use signals work on the main
thread only.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from pl_grouprl.rewards.base import RewardConfigurationError, RewardFunction
from pl_grouprl.rewards.conventions import (
    PreparedReward,
    RewardInputs,
    Score,
    call_arguments,
    call_units,
    read_result,
    smaller_units,
)
from pl_grouprl.utilities.copying import private_copy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """One call of a function.

    Attributes:
        unit: The rollouts that it is about.
        group_of: Which group each of them is from.
        kwargs: What the function is called with: the originals.
    """

    unit: list[int]
    group_of: list[int]
    kwargs: dict[str, Any]

    def make(self, function: RewardFunction) -> Any:
        """Call a function with copies, so that it changes neither what is trained nor the arguments of other calls."""
        return function(**private_copy(self.kwargs))


@dataclass(frozen=True)
class Failure:
    """Stands for the scores of a call that gave none.

    Attributes:
        what: What the function did, to follow its name in a message.
        error: What it raised, or what tells of it.
    """

    what: str
    error: BaseException | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure of a call that raised."""
        return cls(f"raised {type(error).__name__}: {error}", error)


Outcome = list[Score] | Failure


class CallRunner(Protocol):
    """What runs calls elsewhere: `pl_grouprl.rewards.workers.RewardWorkers`."""

    timeout: float | None

    def submit(self, name: str, call: Call, retries: int) -> Future[Outcome]:
        """Run a call of the function of that name."""
        ...


class PendingScores:
    """The calls of all functions, begun where they run beside this thread.

    A call that raises (`sys.exit()` too, which would end the run or its event loop) is repeated `retries` times, one
    that took too long is not. A call for many groups is then made once per group. What still fails is marked so.

    Args:
        rewards: The functions.
        inputs: The rollouts.
        retries: How often a call that raised is repeated.
        max_failed_share: Share of rollouts on which a function may fail.
        workers: Runs the functions that are not `in_process`, a group or a rollout per call; None runs them here.

    Raises:
        ValueError: If a function needs a column that the data lacks.
    """

    def __init__(
        self,
        rewards: Sequence[PreparedReward],
        inputs: RewardInputs,
        *,
        retries: int,
        max_failed_share: float,
        workers: CallRunner | None = None,
    ) -> None:
        self._rewards = rewards
        self._inputs = inputs
        self._max_failed_share = max_failed_share
        self._workers = workers
        self._futures: list[Future[Any]] = []
        units = [call_units(reward, inputs, by_group=self._runs_in_workers(reward)) for reward in rewards]
        self._calls = [self._make_calls(reward, own) for reward, own in zip(rewards, units, strict=True)]
        self._begun = [self._begin(reward, own, retries) for reward, own in zip(rewards, self._calls, strict=True)]

    def wait(self) -> list[list[Score]]:
        """Run what runs here, and return every function's score of every rollout: a list of length B per function.

        Raises:
            RuntimeError: If a function raised or gave no finite number on more than `max_failed_share` of the
                rollouts.
            RewardConfigurationError: If a function says that it cannot work as it is configured.
            ValueError: If a function returned the wrong type or length.
        """
        try:
            outcomes = self._finish(self._begun)
            parts = [
                [
                    part
                    for call, outcome in zip(calls, own, strict=True)
                    if isinstance(outcome, Failure)
                    for part in self._make_calls(reward, smaller_units(reward, call.unit, self._inputs))
                ]
                for reward, calls, own in zip(self._rewards, self._calls, outcomes, strict=True)
            ]
            again = [self._begin(reward, own, retries=0) for reward, own in zip(self._rewards, parts, strict=True)]
            outcomes_again = self._finish(again)
        finally:
            for future in self._futures:
                future.cancel()
        return [
            self._join(reward, [*zip(*first, strict=True), *zip(*second, strict=True)])
            for reward, first, second in zip(
                self._rewards,
                zip(self._calls, outcomes, strict=True),
                zip(parts, outcomes_again, strict=True),
                strict=True,
            )
        ]

    def _make_calls(self, reward: PreparedReward, units: Sequence[list[int]]) -> list[Call]:
        groups = self._inputs.groups
        return [
            Call(unit, [groups[index] for index in unit], call_arguments(reward, self._inputs, unit)) for unit in units
        ]

    def _runs_in_workers(self, reward: PreparedReward) -> bool:
        return self._workers is not None and not reward.in_process

    def _begin(self, reward: PreparedReward, calls: list[Call], retries: int) -> Callable[[], list[Outcome]]:
        """Start calls, or put them off where they run here; returns what waits for their outcomes."""
        if reward.is_async:
            timeout = None if self._workers is None else self._workers.timeout
            future = _submit(_run_async(reward, calls, retries, timeout))
            self._futures.append(future)
            return future.result
        if self._workers is not None and not reward.in_process:
            futures = [self._workers.submit(reward.name, call, retries) for call in calls]
            self._futures += futures
            return lambda: [future.result() for future in futures]
        return lambda: [attempt(reward, call, retries) for call in calls]

    def _finish(self, begun: Sequence[Callable[[], list[Outcome]]]) -> list[list[Outcome]]:
        """Wait for the outcomes of each function; what runs here goes first, while the others run."""
        here = [
            index
            for index, reward in enumerate(self._rewards)
            if not (reward.is_async or self._runs_in_workers(reward))
        ]
        outcomes = {index: begun[index]() for index in here}
        return [outcomes[index] if index in outcomes else own() for index, own in enumerate(begun)]

    def _join(self, reward: PreparedReward, outcomes: Sequence[tuple[Call, Outcome]]) -> list[Score]:
        """Put the scores of a function's calls in the order of the rollouts, and check how much failed."""
        scores = [Score(failed=True)] * len(self._inputs.texts)
        failure: Failure | None = None
        for call, outcome in outcomes:
            if isinstance(outcome, Failure):
                failure = outcome
                continue
            for index, score in zip(call.unit, outcome, strict=True):
                scores[index] = score
        _judge_failures(reward, scores, failure, self._max_failed_share)
        return scores


def score_all(
    rewards: Sequence[PreparedReward], inputs: RewardInputs, *, retries: int, max_failed_share: float
) -> list[list[Score]]:
    """Call every function in this process, and return its score of every rollout; see `PendingScores`."""
    return PendingScores(rewards, inputs, retries=retries, max_failed_share=max_failed_share).wait()


def _judge_failures(
    reward: PreparedReward, scores: list[Score], failure: Failure | None, max_failed_share: float
) -> None:
    failed, total = sum(score.invalid for score in scores), len(scores)
    if failed == 0 and failure is None:
        return
    did = "gave NaN, infinity, or a number beyond float32" if failure is None else failure.what
    what = f"Reward function {reward.name!r} {did}"
    if failed > max_failed_share * total:
        raise RuntimeError(
            f"{what}. It failed for {failed} of {total} rollouts, more than max_failed_share={max_failed_share} "
            "allows; mend the function (the cause is above), or let it return None where it does not apply."
        ) from (None if failure is None else failure.error)
    log.warning("%s. %d of %d rollouts are left without a reward.", what, failed, total)


def attempt(reward: PreparedReward, call: Call, retries: int = 0) -> Outcome:
    """Call a plain function here.

    Raises:
        RewardConfigurationError: If it says that it cannot work as it is configured.
        ValueError: If it returned the wrong type or length.
    """
    failure = Failure("was not called")
    for _ in range(retries + 1):
        try:
            result = call.make(reward.function)
        except RewardConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            failure = Failure.of(error)
        else:
            return read_result(reward, result, call.group_of)
    return failure


async def _run_async(
    reward: PreparedReward, calls: Sequence[Call], retries: int, timeout: float | None
) -> list[Outcome]:
    return list(await asyncio.gather(*(_attempt_in_time(reward, call, retries, timeout) for call in calls)))


async def _attempt_in_time(reward: PreparedReward, call: Call, retries: int, timeout: float | None) -> Outcome:
    failure = Failure("was not called")
    for _ in range(retries + 1):
        try:
            outcome = await asyncio.wait_for(_attempt_async(reward, call), timeout)
        except asyncio.TimeoutError:
            return too_slow(timeout)
        if not isinstance(outcome, Failure):
            return outcome
        failure = outcome
    return failure


async def _attempt_async(reward: PreparedReward, call: Call) -> Outcome:
    try:
        result = await call.make(reward.function)
    except RewardConfigurationError:
        raise
    except (Exception, SystemExit) as error:  # what leaves a task as SystemExit would end the event loop
        return Failure.of(error)
    return read_result(reward, result, call.group_of)


def too_slow(timeout: float | None) -> Failure:
    """The failure of a call that was stopped. It is not repeated: the same call would as a rule take the time again."""
    return Failure(f"took longer than reward_timeout={timeout} seconds")


def _submit(coroutine: Coroutine[Any, Any, list[Outcome]]) -> Future[list[Outcome]]:
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop(os.getpid()))


@functools.cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Start an event loop in a thread, once per process (a fork does not inherit threads).

    The loop lives as long as the process: HTTP clients that a reward function keeps between calls belong to it.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop
