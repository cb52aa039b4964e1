"""Running reward functions: retries, async functions side by side, failures kept to the rollouts they concern.

Every call of a user's function goes through `_attempt` or `_attempt_async`; a time limit or a worker process for
code that must not run in this one belongs there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.conventions import (
    PreparedReward,
    RewardInputs,
    Score,
    call_arguments,
    call_units,
    read_result,
    smaller_units,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Failure:
    """Stands for the result of a call that raised."""

    error: BaseException


def score_all(
    rewards: Sequence[PreparedReward], inputs: RewardInputs, *, retries: int, max_failed_share: float
) -> list[list[Score]]:
    """Call every function and return its score of every rollout: one list of length B per function.

    Coroutine functions run side by side on an event loop in a thread of its own, so a loop that already runs here
    (a notebook's) does not matter. Meanwhile plain functions run here, one after another: graders that use signals
    work on the main thread only.

    A call that raises (`sys.exit()` too, which would end the run or its event loop) is repeated `retries` times. A
    call for many groups is then made once per group. What still fails is marked so.

    Raises:
        RuntimeError: If a function raised or gave no finite number on more than `max_failed_share` of the rollouts.
        RewardConfigurationError: If a function says that it cannot work as it is configured.
        ValueError: If a function returned the wrong type or length, or needs a column that the data lacks.
    """
    pending: dict[int, Future[list[Any]]] = {}
    units = [call_units(reward, inputs) for reward in rewards]
    arguments = [
        [call_arguments(reward, inputs, unit) for unit in own] for reward, own in zip(rewards, units, strict=True)
    ]
    try:
        for number, reward in enumerate(rewards):
            if reward.is_async:
                pending[number] = _submit(_call_async(reward, arguments[number], retries))
        scores = []
        plain = {
            number: _call_plain(reward, arguments[number], retries)
            for number, reward in enumerate(rewards)
            if not reward.is_async
        }
        for number, reward in enumerate(rewards):
            results = pending[number].result() if reward.is_async else plain[number]
            scores.append(_read_results(reward, inputs, units[number], results, max_failed_share))
        return scores
    finally:
        for future in pending.values():
            future.cancel()


def _read_results(
    reward: PreparedReward, inputs: RewardInputs, units: list[list[int]], results: list[Any], max_failed_share: float
) -> list[Score]:
    """Read the results of a function's calls, divide the failed ones, and check how much failed."""
    scores = [Score(failed=True)] * len(inputs.texts)
    last_error: BaseException | None = None
    for unit, result in zip(units, results, strict=True):
        if isinstance(result, _Failure):
            last_error = result.error
            parts = smaller_units(reward, unit, inputs)
            calls = list(zip(parts, _call_again(reward, inputs, parts), strict=True))
        else:
            calls = [(unit, result)]
        for part, outcome in calls:
            if isinstance(outcome, _Failure):
                last_error = outcome.error
                continue
            for index, score in zip(part, read_result(reward, outcome, part, inputs), strict=True):
                scores[index] = score
    _judge_failures(reward, scores, last_error, max_failed_share)
    return scores


def _judge_failures(
    reward: PreparedReward, scores: list[Score], error: BaseException | None, max_failed_share: float
) -> None:
    failed, total = sum(score.invalid for score in scores), len(scores)
    if failed == 0 and error is None:
        return
    did = (
        "gave NaN, infinity, or a number beyond float32" if error is None else f"raised {type(error).__name__}: {error}"
    )
    what = f"Reward function {reward.name!r} {did}"
    if failed > max_failed_share * total:
        raise RuntimeError(
            f"{what}. It failed for {failed} of {total} rollouts, more than max_failed_share={max_failed_share} "
            "allows; mend the function (the cause is above), or let it return None where it does not apply."
        ) from error
    log.warning("%s. %d of %d rollouts are left without a reward.", what, failed, total)


def _call_again(reward: PreparedReward, inputs: RewardInputs, units: list[list[int]]) -> list[Any]:
    arguments = [call_arguments(reward, inputs, unit) for unit in units]
    if reward.is_async:
        return _submit(_call_async(reward, arguments, retries=0)).result()
    return _call_plain(reward, arguments, retries=0)


def _call_plain(reward: PreparedReward, arguments: list[dict[str, Any]], retries: int) -> list[Any]:
    return [_attempt(reward, kwargs, retries) for kwargs in arguments]


async def _call_async(reward: PreparedReward, arguments: list[dict[str, Any]], retries: int) -> list[Any]:
    return list(await asyncio.gather(*(_attempt_async(reward, kwargs, retries) for kwargs in arguments)))


def _attempt(reward: PreparedReward, kwargs: dict[str, Any], retries: int) -> Any:
    for remaining in range(retries, -1, -1):
        try:
            return reward.function(**kwargs)
        except RewardConfigurationError:
            raise
        except (Exception, SystemExit) as error:  # a user's function may raise anything
            if remaining == 0:
                return _Failure(error)
    raise AssertionError("unreachable: retries is at least 0")


async def _attempt_async(reward: PreparedReward, kwargs: dict[str, Any], retries: int) -> Any:
    for remaining in range(retries, -1, -1):
        try:
            return await reward.function(**kwargs)
        except RewardConfigurationError:
            raise
        except (Exception, SystemExit) as error:
            if remaining == 0:
                return _Failure(error)
    raise AssertionError("unreachable: retries is at least 0")


def _submit(coroutine: Coroutine[Any, Any, list[Any]]) -> Future[list[Any]]:
    return asyncio.run_coroutine_threadsafe(coroutine, _event_loop(os.getpid()))


@functools.cache
def _event_loop(process_id: int) -> asyncio.AbstractEventLoop:
    """Start an event loop in a thread, once per process (a fork does not inherit threads).

    The loop lives as long as the process: HTTP clients that a reward function keeps between calls belong to it.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="reward-functions", daemon=True).start()
    return loop
