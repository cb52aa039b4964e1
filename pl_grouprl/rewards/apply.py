"""Calls reward functions on groups of rollouts, and writes the rewards into them.

start: rollouts -> calls; coroutine functions start on an event loop, others in worker processes if there are any
wait:  the remaining functions run on this thread; outcomes of all calls -> scores -> rewards and metrics
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from typing import Any, Protocol

from pl_grouprl.rewards.base import (
    PreparedReward,
    RewardConfigurationError,
    RewardFunction,
    RewardInputs,
    Score,
    Weighted,
    as_weighted,
    fits_float32,
    hook_of,
    prepare_reward,
    read_result,
    reward_metrics,
    reward_row,
)
from pl_grouprl.types import EpisodeRows, LiveObject, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import BackgroundLoop, OverTimeError, exits_refused, run_with_limit
from pl_grouprl.utilities.progress import tick

log = logging.getLogger(__name__)

Rewards = Sequence[Weighted | RewardFunction] | Weighted | RewardFunction | list[PreparedReward]
"""One reward function or a list of them, weighted or not; or what `prepare_rewards` returned."""


def prepare_rewards(rewards: Rewards) -> list[PreparedReward]:
    """Check the names and signatures of reward functions before a run. A list that it returned comes back unchanged.

    Raises:
        ValueError: If names repeat, all weights are 0, or a signature is not supported.
        TypeError: If something is not callable.
    """
    if isinstance(rewards, list) and rewards and isinstance(rewards[0], PreparedReward):
        return rewards
    prepared = [prepare_reward(weighted) for weighted in as_weighted(rewards)]
    if all(reward.weight == 0 for reward in prepared):
        raise ValueError(
            f"rewards has weight 0 for all of {[reward.name for reward in prepared]}, so no rollout would have a "
            "reward; pass a function with another weight."
        )
    return prepared


def check_columns(prompts: Sequence[Prompt], rewards: Rewards, split: str, *, environments: bool = False) -> None:
    """Check before a run that every prompt has the columns that the reward functions require.

    Calls each function's `set_up` and, for each row, its `check_row`, if it has these methods.

    Args:
        prompts: All prompts.
        rewards: The reward functions.
        split: Name of the data set, for messages.
        environments: Whether rollouts will have environments in this process, for functions that require them.

    Raises:
        ValueError: If a prompt lacks one, or `check_row` rejects it; names the row, the function and the column.
        RewardConfigurationError: If a function raises it.
    """
    prepared = prepare_rewards(rewards)
    for reward in prepared:
        if set_up := hook_of(reward.function, "set_up"):
            set_up()
    rollout = Rollout([], text="", environment=LiveObject(object()) if environments else None)
    for number, prompt in enumerate(prompts):
        group = RolloutGroup(prompt.token_ids, [rollout], number, prompt.columns, prompt.prompt, prompt.data_source)
        inputs = RewardInputs([group])
        for reward in prepared:
            try:
                inputs.arguments(reward, [0])
                if check_row := hook_of(reward.function, "check_row"):
                    check_row(private_copy(prompt.columns))
            except ValueError as error:
                raise ValueError(f"{prompt.where or f'{split}, prompt {number}'}: {error}") from error


def apply_rewards(
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    tokenizer: Any = None,
    retries: int = 1,
    max_failed_share: float = 0.5,
    workers: CallRunner | None = None,
    timeout: float | None = None,
) -> dict[str, float]:
    """Reward every rollout: sets `Rollout.rewards` (per function, unweighted), `reward` and `token_rewards`.

    The combined reward is the weighted sum over the functions that apply, where None means "does not apply". Functions
    of weight 0 are only logged. The reward is None, and the rollout is not trained on, if no other function applies, or
    if one of them failed (raised, took too long, or returned a number that is not finite in float32): the sum of the
    rest would not be comparable with the other rollouts of the group. It is also None if the sum overflows float32.

    Instead of a completion's number, a function may return a list with one number per token, None or NaN for a token
    without a reward; the sum is then the completion's reward. If the function returns a list for any completion of a
    group, a single number for another completion is the reward of that completion's last token. The tokens are
    `Rollout.completion_ids`, which begin after the environment's observation. A dictionary whose `turns` is a list has
    one number for each turn (`EpisodeRows.turns`), None for a turn without a reward: the rewards of its last token.

    For an episode, functions of TRL's signature get the messages as `completions`, with tool calls and results. They
    may also take `completion_mask` (per completion, 1 for each token that the model wrote and 0 for others) and, unless
    they run in worker processes, `environments` (the objects themselves, not copies). Functions of verl's signature get
    the whole decoded completion as `solution_str`, tool results included, as in verl; those with a true attribute
    `reads_final_answer` get the content of the last assistant message.

    Functions are called once per episode: where it has several rows (`RolloutGroup.episodes`), they see the last one.
    All rows get the reward. Rewards of tokens are of the last row, those of turns go to the rows of the turns.

    Args:
        groups: Any number of groups of any size; modified in place.
        rewards: One reward function or several, weighted or not.
        tokenizer: Decodes completions whose `text` is None, and sets it. Not needed if all have their text.
        retries: Retries of a call that raised (including `sys.exit()`); a call that took too long is not repeated.
        max_failed_share: Share of rollouts on which a function may fail before that is an error, from 0 to 1.
        workers: `RewardWorkers` created with the same rewards; functions then run in parallel in its processes, one
            group (verl's signature: one rollout) per call. By default they run one after another in this process.
        timeout: Seconds that a call of an async function may take; defaults to the limit of `workers`.

    Returns:
        For each function, `rewards/{name}/mean` and `/std` (of the finite rewards, Bessel-corrected; NaN if there are
        none), `/none` (rollouts to which it did not apply), `/invalid` (on which it failed), and the mean of every
        other finite number in returned dictionaries, over the rollouts whose dictionary has the key, as
        `rewards/{name}/{key}` (`{key}_` for the keys `mean`, `std`, `none` and `invalid`). Which keys the dictionaries
        have depends on the data, so ranks may differ.

    Raises:
        ValueError: If a function returns the wrong type or length, or needs a column that the data lacks.
        RewardConfigurationError: If a function raises it.
        RuntimeError: If a function fails on more rollouts than allowed.
    """
    return PendingRewards(
        groups,
        rewards,
        tokenizer=tokenizer,
        retries=retries,
        max_failed_share=max_failed_share,
        workers=workers,
        timeout=timeout,
    ).wait()


def decode_completions(groups: Sequence[RolloutGroup], tokenizer: Any) -> None:
    """Set the text of rollouts that have none."""
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.text is None:
            rollout.text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)


class PendingRewards:
    """Rewards that are being computed: starts like `apply_rewards`, whose arguments it takes; `wait` finishes.

    Coroutine functions and those in worker processes start here. Plain functions of this process run on the thread that
    calls `wait`. Do not change the rollouts until then.
    """

    def __init__(
        self,
        groups: Sequence[RolloutGroup],
        rewards: Rewards,
        *,
        tokenizer: Any = None,
        retries: int = 1,
        max_failed_share: float = 0.5,
        workers: CallRunner | None = None,
        timeout: float | None = None,
    ) -> None:
        check_options(
            {
                "retries": (retries, retries >= 0, "0 or larger"),
                "max_failed_share": (max_failed_share, 0 <= max_failed_share <= 1, "in [0, 1]"),
                "timeout": (timeout, timeout is None or timeout > 0, "larger than 0, or None for no limit"),
            }
        )
        decode_completions(groups, tokenizer)
        if timeout is None and workers is not None:
            timeout = workers.timeout
        self._rewards = rewards = prepare_rewards(rewards)
        self._groups = groups
        self._max_failed_share = max_failed_share
        last_rows = [
            group
            if len(group.rows_per_episode) == len(group.rollouts)
            else replace(group, rollouts=[episode.last for episode in group.episodes])
            for group in groups
        ]
        self._inputs = inputs = RewardInputs(last_rows)
        self._begun: list[AsyncCalls | list[Future[Outcome]] | None] = []  # None runs on the thread that waits
        self._retries = retries
        in_workers = [workers is not None and not reward.in_process for reward in rewards]
        self._calls = [  # all before the first begins, since a column may be missing
            [
                Call(
                    unit,
                    [len(inputs.rollouts[index].completion_ids) for index in unit],
                    inputs.arguments(reward, unit, environments=not elsewhere),
                )
                for unit in inputs.units(reward, by_group=elsewhere)
            ]
            for reward, elsewhere in zip(rewards, in_workers, strict=True)
        ]
        for reward, elsewhere, calls in zip(rewards, in_workers, self._calls, strict=True):
            if reward.is_async:
                self._begun.append(AsyncCalls(reward, calls, retries, timeout))
            elif workers is not None and elsewhere:
                self._begun.append([workers.submit(reward.name, call, retries) for call in calls])
            else:
                self._begun.append(None)

    def wait(self) -> dict[str, float]:
        """Run the functions that need this thread, wait for the others, and write the rewards into the rollouts.

        Call it once. Returns and raises the same as `apply_rewards`.
        """
        scores, start = self.scores(), 0
        for group in self._groups:
            end = start + len(group.rows_per_episode)
            of_group = [of_function[start:end] for of_function in scores]
            has_steps = [
                any((score.token_rewards, score.turn_rewards) != (None, None) for score in of_function)
                for of_function in of_group
            ]
            for episode, *of_episode in zip(group.episodes, *of_group, strict=True):
                last = episode.last
                by_name = {reward.name: score for reward, score in zip(self._rewards, of_episode, strict=True)}
                last.rewards = {name: score.value for name, score in by_name.items()}
                last.failed_rewards = [name for name, score in by_name.items() if score.failed]
                last.reward_numbers = {
                    f"{name}/{key}": number for name, score in by_name.items() for key, number in score.extras.items()
                }
                last.reward, tokens = _weighted_sum(episode, self._rewards, of_episode, has_steps)
                first = episode.num_tokens - len(last.token_ids)
                last.token_rewards = None if tokens is None else tokens[first:]
                for row in reversed(episode.rows[:-1]):
                    row.reward, row.rewards, stop = last.reward, dict(last.rewards), first
                    first -= len(row.token_ids)
                    own = (tokens or [])[first:stop]
                    row.token_rewards = own if any(value is not None for value in own) else None
            start = end
        return reward_metrics(list(map(reward_row, self._inputs.rollouts)), [reward.name for reward in self._rewards])

    def scores(self) -> list[list[Score]]:
        """Like `wait`, but return each function's score of each episode, and write nothing."""
        outcomes: list[list[Outcome]] = []
        try:
            for reward, calls, begun in zip(self._rewards, self._calls, self._begun, strict=True):
                if begun is None:
                    with exits_refused():
                        outcomes.append([attempt(reward, call, self._retries) for call in calls])
                else:
                    outcomes.append([])
            for of_function, begun in zip(outcomes, self._begun, strict=True):
                if isinstance(begun, AsyncCalls):
                    of_function += begun.wait()
                elif begun is not None:
                    of_function += [future.result() for future in begun]
        finally:
            for begun in self._begun:
                if isinstance(begun, AsyncCalls):
                    begun.cancel()
                for future in begun if isinstance(begun, list) else ():
                    future.cancel()
        scores = [self._join(*of_function) for of_function in zip(self._rewards, self._calls, outcomes, strict=True)]
        for outcome in (outcome for of_function in outcomes for outcome in of_function):
            if isinstance(outcome, Failure):
                outcome.release()  # it has not ended the run, so nobody looks at it again
        return scores

    def _join(self, reward: PreparedReward, calls: Sequence[Call], outcomes: Sequence[Outcome]) -> list[Score]:
        """Put a function's scores in the order of the rollouts, and check how many failed."""
        scores = [Score(failed=True)] * len(self._inputs.rollouts)
        failure: Failure | None = None
        for call, outcome in zip(calls, outcomes, strict=True):
            if isinstance(outcome, Failure):
                failure = outcome
                continue
            for index, score in zip(call.unit, outcome, strict=True):
                scores[index] = score
        failed, total = sum([score.failed for score in scores]), len(scores)
        did = "gave NaN, infinity, or a number beyond float32" if failure is None else failure.what
        if failed > self._max_failed_share * total:
            raise RuntimeError(
                f"Reward function {reward.name!r} {did}. It failed for {failed} of {total} rollouts, more than "
                f"max_failed_share={self._max_failed_share} allows; fix the function, or let it return None where it "
                "does not apply."
            ) from (None if failure is None else failure.error)
        if failed:
            message = "Reward function %r %s. %d of %d rollouts are left without a reward."
            log.warning(message, reward.name, did, failed, total)
        return scores


def _weighted_sum(
    episode: EpisodeRows, prepared: Sequence[PreparedReward], scores: Sequence[Score], has_steps: Sequence[bool]
) -> tuple[float | None, list[float | None] | None]:
    """The combined reward of an episode, and of the tokens of its rows.

    Where a function rewarded tokens or turns of any rollout of the group (`has_steps`), a single number of it is the
    reward of the last token.
    """
    counted = [item for item in zip(prepared, scores, has_steps, strict=True) if item[0].weight != 0]
    if any(score.failed for _, score, _ in counted) or all(score.value is None for _, score, _ in counted):
        return None, None
    total = 0.0
    token_rows: list[list[float | None]] = []
    for reward, score, steps in counted:
        given = score.token_rewards if score.turn_rewards is None else score.turn_rewards
        if given is None and score.value is not None and steps and episode.last.token_ids:
            given = [score.value]  # of the last token
        if given is not None:
            places: Sequence[int] = range(episode.num_tokens - len(given), episode.num_tokens)
            if score.turn_rewards is not None:
                places = [end - 1 for _, end in episode.turns]
                if len(places) != len(given):
                    raise ValueError(
                        f"Reward function {reward.name!r} returned {len(given)} rewards as 'turns' for a completion of "
                        f"{len(places)} turns; return one number or None for each."
                    )
            own: list[float | None] = [None] * episode.num_tokens
            for place, value in zip(places, given, strict=True):
                own[place] = None if value is None else reward.weight * value
            token_rows.append(own)
        elif score.value is not None:
            total += reward.weight * score.value
    tokens: list[float | None] | None = None
    if token_rows:
        columns = [[value for value in column if value is not None] for column in zip(*token_rows, strict=True)]
        tokens = [sum(values) if values else None for values in columns]
        rewarded = [value for value in tokens if value is not None]
        total = (total + math.fsum(rewarded)) if all(map(fits_float32, rewarded)) else math.inf  # fsum may overflow
    return (total, tokens) if fits_float32(total) else (None, None)


# One call of a reward function, and its outcome.


@dataclass  # not frozen, which would take twice as long to create
class Call:
    """One call of a function; never changed.

    Attributes:
        unit: The rollouts that it scores.
        lengths: Tokens of each completion.
        kwargs: The function's arguments, not yet copied. `environments` are `LiveObject`s, which are never copied.
    """

    unit: list[int]
    lengths: list[int]
    kwargs: dict[str, Any]

    def make(self, function: RewardFunction) -> Any:
        """Call a function with copies, so that it can change neither training nor the arguments of other calls."""
        tick()
        arguments = private_copy(self.kwargs)
        if "environments" in arguments:
            values = [item.value if isinstance(item, LiveObject) else item for item in arguments["environments"]]
            arguments["environments"] = values
        return function(**arguments)


@dataclass(frozen=True)
class Failure:
    """The outcome of a call that returned no scores.

    Attributes:
        what: What the function did; follows its name in messages.
        error: What it raised, if anything.
        out_of_memory: Whether the call ran out of memory. The function may still hold what it allocated.
    """

    what: str
    error: BaseException | None = None
    out_of_memory: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The failure of a call that raised."""
        return cls(f"raised {type(error).__name__}: {error}", error, isinstance(error, MemoryError))

    @classmethod
    def too_slow(cls, timeout: float | None) -> Failure:
        """The failure of a call that was stopped; not retried, since it would usually take too long again."""
        return cls(f"took longer than reward_calls.timeout={timeout} seconds")

    def release(self) -> None:
        """Drop the tracebacks: their frames and those of the callers hold the whole batch, in a reference cycle."""
        pending, released = [self.error], set()
        while pending:
            error = pending.pop()
            if error is not None and id(error) not in released:
                released.add(id(error))
                error.__traceback__ = None
                pending += [error.__cause__, error.__context__]


Outcome = list[Score] | Failure


class CallRunner(Protocol):
    """Runs calls elsewhere; see `pl_grouprl.rewards.RewardWorkers`."""

    timeout: float | None

    def submit(self, name: str, call: Call, retries: int) -> Future[Outcome]:
        """Start a call of the function with this name."""
        ...


def attempt(reward: PreparedReward, call: Call, retries: int = 0) -> Outcome:
    """Call a plain function in this process, with retries.

    Raises:
        RewardConfigurationError: If the function raises it.
        ValueError: If it returned the wrong type or length.
    """
    while True:
        try:
            result = call.make(reward.function)
        except (RewardConfigurationError, KeyboardInterrupt):
            raise
        except BaseException as error:  # math-verify's time limit raises an error that is no Exception
            failure = Failure.of(error)
        else:
            return read_result(reward, result, call.lengths, call.kwargs)
        if retries <= 0:
            return failure
        failure.release()
        retries -= 1


# Coroutine functions run on an event loop in a separate thread, since this one may already run a loop, as in notebooks.
# The loop is kept across batches, because HTTP clients that a function keeps are bound to it. If a function blocks it,
# its thread is abandoned, and the other functions go on with a new one.

_loops: dict[int, BackgroundLoop] = {}  # by process: forks do not inherit threads
_lock = threading.Lock()


class AsyncCalls:
    """Calls of a coroutine function, started on construction.

    Args:
        reward: The function.
        calls: The calls, which run concurrently.
        retries: Retries of a call that raised.
        timeout: Seconds that each attempt may take; no limit if None.
    """

    def __init__(self, reward: PreparedReward, calls: Sequence[Call], retries: int, timeout: float | None) -> None:
        self._reward = reward
        self._calls = calls
        self._retries = retries
        self._timeout = timeout
        self._futures: dict[int, Future[Outcome]] = {}
        self._begin(range(len(calls)))

    def _begin(self, numbers: Sequence[int]) -> None:
        with _lock:
            if os.getpid() not in _loops:
                _loops[os.getpid()] = BackgroundLoop("reward-functions")
            self._loop = _loops[os.getpid()]
        for number in numbers:
            attempts = _attempt_async(self._reward, self._calls[number], self._retries, self._timeout)
            self._futures[number] = self._loop.submit(self._reward.name, attempts)

    def cancel(self) -> None:
        """Cancel calls that are still running."""
        for future in self._futures.values():
            future.cancel()

    def wait(self) -> list[Outcome]:
        """Wait for the outcomes; raises the same as `attempt`."""
        blocked: dict[int, Outcome] = {}
        while True:
            wait_for_futures(self._futures.values(), self._timeout)
            pending = [number for number, future in self._futures.items() if not future.done() or future.cancelled()]
            if not pending:
                return [blocked.get(number) or self._futures[number].result() for number in range(len(self._calls))]
            if self._loop.answers(self._timeout):
                continue
            name = self._loop.abandon()
            with _lock:
                if _loops.get(os.getpid()) is self._loop:
                    del _loops[os.getpid()]
                    log.warning("Reward function %r blocks its event loop; its thread is abandoned.", name)
            if name in ("", self._reward.name):
                failure = Failure(
                    f"took longer than reward_calls.timeout={self._timeout} seconds and blocked its event loop; await "
                    "whatever takes time (asyncio.sleep, an asynchronous client), or make it a plain function"
                )
                for number in pending:
                    blocked[number] = failure
                    del self._futures[number]
            else:
                self._begin(pending)


async def _attempt_async(reward: PreparedReward, call: Call, retries: int, timeout: float | None) -> Outcome:
    async def attempt_once() -> Outcome:
        try:
            result = await call.make(reward.function)
        except (RewardConfigurationError, KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # a SystemExit that escapes a task would end the event loop
            return Failure.of(error)
        return read_result(reward, result, call.lengths, call.kwargs)

    failure = Failure("was not called")
    for _ in range(retries + 1):
        with exits_refused():
            try:
                task = await run_with_limit(attempt_once(), timeout)
            except OverTimeError as error:
                if error.task is not None:
                    message = "Reward function %r is still running after it was cancelled; the call is abandoned."
                    log.warning(message, reward.name)
                return Failure.too_slow(timeout)
        outcome = Failure("raised CancelledError") if task.cancelled() else task.result()
        if not isinstance(outcome, Failure):
            return outcome
        failure = outcome
    return failure
