"""Runs reward functions: with retries, in parallel, and with failures confined to the rollouts concerned.

Coroutine functions run on an event loop in a separate thread. Plain functions run in worker processes if there are any;
otherwise one after another on the thread that waits for the scores, because graders that use signals work only on the
main thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from pl_grouprl.rewards.async_calls import AsyncCalls
from pl_grouprl.rewards.call import Call, Failure, Outcome, attempt
from pl_grouprl.rewards.conventions import (
    PreparedReward,
    RewardInputs,
    call_arguments,
    call_units,
    check_environments,
    smaller_units,
)
from pl_grouprl.rewards.process_state import left_as_found
from pl_grouprl.rewards.results import Score

log = logging.getLogger(__name__)


class CallRunner(Protocol):
    """Runs calls elsewhere; see `pl_grouprl.rewards.workers.RewardWorkers`."""

    timeout: float | None

    def submit(self, name: str, call: Call, retries: int) -> Future[Outcome]:
        """Start a call of the function with this name."""
        ...


class PendingScores:
    """The calls of all functions; those that run outside this thread start on construction.

    A call that raises (including `sys.exit()`, which would end the run or its event loop) is retried `retries` times;
    one that took too long is not. A failed call for many groups is then repeated group by group. What still fails is
    marked as failed.

    Args:
        rewards: The functions.
        inputs: The rollouts.
        retries: Retries of a call that raised.
        max_failed_share: Share of rollouts on which a function may fail.
        workers: Runs the functions that are not `in_process`, one group or rollout per call; None runs them here.
        timeout: Seconds that a call of a coroutine function may take; None uses the workers' limit.

    Raises:
        ValueError: If a function needs a column that the data lacks, or would need environments in a worker.
    """

    def __init__(
        self,
        rewards: Sequence[PreparedReward],
        inputs: RewardInputs,
        *,
        retries: int,
        max_failed_share: float,
        workers: CallRunner | None = None,
        timeout: float | None = None,
    ) -> None:
        self._timeout = workers.timeout if timeout is None and workers is not None else timeout
        self._rewards = rewards
        self._inputs = inputs
        self._max_failed_share = max_failed_share
        self._workers = workers
        self._begun_elsewhere: list[AsyncCalls | Future[Any]] = []
        if workers is not None and inputs.environments is not None:
            check_environments(rewards)
        units = [call_units(reward, inputs, by_group=self._runs_in_workers(reward)) for reward in rewards]
        self._calls = [self._make_calls(reward, per_call) for reward, per_call in zip(rewards, units, strict=True)]
        self._waiters = [
            self._begin(reward, calls, retries) for reward, calls in zip(rewards, self._calls, strict=True)
        ]

    def wait(self) -> list[list[Score]]:
        """Run what runs on this thread, and return each function's scores of all rollouts: a list of length B each.

        Raises:
            RuntimeError: If a function raised or returned no finite number on more than `max_failed_share` of the
                rollouts.
            RewardConfigurationError: If a function raises it.
            ValueError: If a function returned the wrong type or length.
        """
        try:
            outcomes = self._finish(self._waiters)
            done = [list(zip(*pair, strict=True)) for pair in zip(self._calls, outcomes, strict=True)]
            smaller = [self._calls_by_group(*pair) for pair in zip(self._rewards, done, strict=True)]
            again = [self._begin(*pair, retries=0) for pair in zip(self._rewards, smaller, strict=True)]
            for of_function, calls, repeated in zip(done, smaller, self._finish(again), strict=True):
                of_function += zip(calls, repeated, strict=True)
        finally:
            for begun in self._begun_elsewhere:
                begun.cancel()
        scores = [self._join(*pair) for pair in zip(self._rewards, done, strict=True)]
        for failure in (outcome for of_function in done for _, outcome in of_function if isinstance(outcome, Failure)):
            failure.release()  # it has not ended the run, so nobody looks at it again
        return scores

    def _calls_by_group(self, reward: PreparedReward, done: Sequence[tuple[Call, Outcome]]) -> list[Call]:
        """One call per group for each failed call that covered several groups."""
        failed = [call for call, outcome in done if isinstance(outcome, Failure)]
        units = [unit for call in failed for unit in smaller_units(reward, call.unit, self._inputs)]
        return self._make_calls(reward, units)

    def _make_calls(self, reward: PreparedReward, units: Sequence[list[int]]) -> list[Call]:
        completions = self._inputs.completion_ids
        inputs = replace(self._inputs, environments=None) if self._runs_in_workers(reward) else self._inputs
        return [
            Call(unit, [len(completions[index]) for index in unit], call_arguments(reward, inputs, unit))
            for unit in units
        ]

    def _runs_in_workers(self, reward: PreparedReward) -> bool:
        return self._workers is not None and not reward.in_process

    def _begin(self, reward: PreparedReward, calls: list[Call], retries: int) -> Callable[[], list[Outcome]]:
        """Start calls, or postpone those that run on this thread; returns a function that waits for the outcomes."""
        if reward.is_async:
            pending = AsyncCalls(reward, calls, retries, self._timeout)
            self._begun_elsewhere.append(pending)
            return pending.wait
        if self._workers is not None and not reward.in_process:
            futures = [self._workers.submit(reward.name, call, retries) for call in calls]
            self._begun_elsewhere += futures
            return lambda: [future.result() for future in futures]
        # Without `self`: a reference cycle would hold the rollouts until Python collects garbage.
        return partial(_attempt_here, reward, calls, retries, has_workers=self._workers is not None)

    def _finish(self, begun: Sequence[Callable[[], list[Outcome]]]) -> list[list[Outcome]]:
        """Wait for the outcomes of each function; what runs on this thread goes first, while the others run."""
        here = [
            index
            for index, reward in enumerate(self._rewards)
            if not (reward.is_async or self._runs_in_workers(reward))
        ]
        outcomes = {index: begun[index]() for index in here}
        return [outcomes[index] if index in outcomes else wait() for index, wait in enumerate(begun)]

    def _join(self, reward: PreparedReward, outcomes: Sequence[tuple[Call, Outcome]]) -> list[Score]:
        """Put a function's scores in the order of the rollouts, and check how many failed."""
        scores = [Score(failed=True)] * len(self._inputs.texts)
        failure: Failure | None = None
        for call, outcome in outcomes:
            if isinstance(outcome, Failure):
                failure = outcome
                continue
            for index, score in zip(call.unit, outcome, strict=True):
                scores[index] = score
        _check_failures(reward, scores, failure, self._max_failed_share)
        return scores


def _attempt_here(reward: PreparedReward, calls: Sequence[Call], retries: int, *, has_workers: bool) -> list[Outcome]:
    if not calls:
        return []
    with left_as_found(reward.name, children=not has_workers):  # with workers, processes come and go anyway
        return [attempt(reward, call, retries) for call in calls]


def score_all(
    rewards: Sequence[PreparedReward], inputs: RewardInputs, *, retries: int, max_failed_share: float
) -> list[list[Score]]:
    """Call all functions in this process, and return each one's score of each rollout; see `PendingScores`."""
    return PendingScores(rewards, inputs, retries=retries, max_failed_share=max_failed_share).wait()


def _check_failures(
    reward: PreparedReward, scores: list[Score], failure: Failure | None, max_failed_share: float
) -> None:
    failed, total = sum([score.failed for score in scores]), len(scores)
    if failed == 0 and failure is None:
        return
    did = "gave NaN, infinity, or a number beyond float32" if failure is None else failure.what
    what = f"Reward function {reward.name!r} {did}"
    if failed > max_failed_share * total:
        error = None if failure is None else failure.error
        above = "" if error is None else " (the cause is above)"
        raise RuntimeError(
            f"{what}. It failed for {failed} of {total} rollouts, more than max_failed_share={max_failed_share} "
            f"allows; fix the function{above}, or let it return None where it does not apply."
        ) from error
    if failed:
        log.warning("%s. %d of %d rollouts are left without a reward.", what, failed, total)
    else:
        log.warning("%s. Called again group by group, it rewarded all %d rollouts.", what, total)
