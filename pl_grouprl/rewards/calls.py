"""Calls reward functions on groups of rollouts, and writes the results into them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from pl_grouprl.rewards.base import (
    PreparedReward,
    RewardConfigurationError,
    RewardFunction,
    RewardInputs,
    Score,
    Weighted,
    as_weighted,
    call_arguments,
    call_units,
    check_environments,
    fits_float32,
    flatten_groups,
    hook_of,
    prepare_reward,
    read_result,
    reward_metrics,
    reward_row,
    smaller_units,
)
from pl_grouprl.types import EpisodeRows, LiveObject, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.processes import BackgroundLoop, OverTimeError, exits_refused, run_with_limit
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.reaper import own_children

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
        return function(**_unwrap_environments(private_copy(self.kwargs)))


def _unwrap_environments(kwargs: dict[str, Any]) -> dict[str, Any]:
    if "environments" not in kwargs:
        return kwargs
    values = [item.value if isinstance(item, LiveObject) else item for item in kwargs["environments"]]
    return kwargs | {"environments": values}


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


async def attempt_async(reward: PreparedReward, call: Call) -> Outcome:
    """Call a coroutine function once; raises the same errors as `attempt`."""
    try:
        result = await call.make(reward.function)
    except (RewardConfigurationError, KeyboardInterrupt, asyncio.CancelledError):
        raise
    except BaseException as error:  # a SystemExit that escapes a task would end the event loop
        return Failure.of(error)
    return read_result(reward, result, call.lengths, call.kwargs)


def too_slow(timeout: float | None) -> Failure:
    """The failure of a call that was stopped. It is not retried: the same call would usually take too long again."""
    return Failure(f"took longer than reward_timeout={timeout} seconds")


# Detects changes that a reward function makes to its process, undoes them where possible, and warns.
#
# If the working directory changed, the run would write elsewhere; without its signal handlers, it would save no
# checkpoint. In a worker, a leftover alarm would end a later call.

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

log = logging.getLogger(__name__)

_SIGNALS = [number for number in signal.valid_signals() if isinstance(number, signal.Signals)]

_warned: set[tuple[str, str]] = set()


@contextlib.contextmanager
def left_as_found(name: str, *, children: bool) -> Iterator[None]:
    """`put_back` for a function in the training process, where `os._exit` is refused, too.

    Args:
        name: Name of the function.
        children: Whether to look for processes that it leaves running.
    """
    advice = "make it leave the process as it was, or run it in a worker process (reward_workers)"
    with put_back(name, advice, children=children), exits_refused():
        yield


@contextlib.contextmanager
def put_back(name: str, advice: str, *, children: bool = False) -> Iterator[None]:
    """Put back the working directory, signal handlers, alarm and resource limits after a function's calls.

    Changes of environment variables and processes left running are only reported. Warns once per function and kind of
    change.

    Args:
        name: Name of the function.
        advice: Remedy at the end of the warning.
        children: Whether to look for processes that it leaves running.
    """
    before = _State.now(children)
    try:
        yield
    finally:
        for what, detail in before.restore(children):
            if (name, what) not in _warned:
                _warned.add((name, what))
                log.warning("Reward function %r %s%s; %s.", name, what, detail, advice)


@dataclass(frozen=True)
class _State:
    directory: str
    environment: dict[str, str]
    handlers: dict[signal.Signals, Any]
    alarm: bool
    limits: dict[str, tuple[int, int]]
    children: set[int]

    @classmethod
    def now(cls, children: bool) -> _State:
        kinds = {} if resource is None else {v: name for name, v in vars(resource).items() if name[:7] == "RLIMIT_"}
        return cls(
            _directory(),
            dict(os.environ),
            {number: signal.getsignal(number) for number in _SIGNALS},
            bool(hasattr(signal, "getitimer") and signal.getitimer(signal.ITIMER_REAL)[0]),
            {name: resource.getrlimit(kind) for kind, name in kinds.items()},
            own_children() if children else set(),
        )

    def restore(self, children: bool) -> Iterator[tuple[str, str]]:
        """Put back what can be, while iterated over; yields each kind of change and its details."""
        now = _State.now(children)
        if now.directory != self.directory:
            yield "changed the working directory", f" to {now.directory!r}{_return_to(self.directory)}"
        if names := [name for name in {**self.environment, **now.environment} if _differs(self, now, name)]:
            yield "changed the environment", f": {sorted(names)}"
        if threading.current_thread() is threading.main_thread():
            yield from self._restore_signals(now)
        if names := [name for name in self.limits if self.limits[name] != now.limits[name]]:
            yield "changed the limits of the process", f": {[self._restore_limit(name) for name in names]}"
        if left := now.children - self.children:
            yield "left processes", f": {sorted(left)}"

    def _restore_signals(self, now: _State) -> Iterator[tuple[str, str]]:
        if now.alarm and not self.alarm:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            yield "left an alarm", " (cancelled)"
        changed = [number for number, handler in self.handlers.items() if handler != now.handlers[number]]
        for number in changed:
            if self.handlers[number] is not None:  # None: not installed from Python
                signal.signal(number, self.handlers[number])
        if changed:
            yield "changed signal handlers", f" of {[number.name for number in changed]} (put back)"

    def _restore_limit(self, name: str) -> str:
        kind, (soft, hard) = getattr(resource, name), self.limits[name]
        try:
            resource.setrlimit(kind, (soft, hard))
        except (ValueError, OSError):
            return f"{name} is {resource.getrlimit(kind)}, not {(soft, hard)}"
        return f"{name} (put back)"


def _directory() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was removed
        return ""


def _return_to(directory: str) -> str:
    try:
        os.chdir(directory)
    except OSError as error:
        return f" (which cannot be put back: {error})"
    return " (put back)"


def _differs(before: _State, now: _State, name: str) -> bool:
    return before.environment.get(name) != now.environment.get(name)


# Runs coroutine reward functions on an event loop in a separate thread, which is abandoned if a function blocks it.
#
# The loop is kept across batches, because HTTP clients that a reward function keeps are bound to it. It has its own
# thread because this one may already run a loop, as in notebooks.

MAX_ABANDONED_CALLS = 256
"""The run ends when this many cancelled calls are still running."""

MAX_BLOCKED_THREADS = 8
"""Number of threads stuck in blocking functions at which the run ends."""


class AsyncCalls:
    """Calls of a coroutine function, started on construction.

    Args:
        reward: The function.
        calls: The calls, which run concurrently.
        retries: Retries of a call that raised.
        timeout: Seconds that each attempt may take; None for no limit.
    """

    def __init__(self, reward: PreparedReward, calls: Sequence[Call], retries: int, timeout: float | None) -> None:
        self._reward = reward
        self._calls = calls
        self._retries = retries
        self._timeout = timeout
        self._futures: dict[int, Future[Outcome]] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._begin(range(len(calls)))

    def wait(self) -> list[Outcome]:
        """Wait for the outcomes.

        Raises:
            RuntimeError: If too many threads are stuck in blocking functions.
            RewardConfigurationError: If the function raises it.
            ValueError: If it returned the wrong type or length.
        """
        while pending := self._pending():
            if self._loop.answers(self._timeout):
                continue
            name = _abandon(self._loop)
            if name in ("", self._reward.name):
                blocked = Failure(
                    f"took longer than reward_timeout={self._timeout} seconds and blocked its event loop; await "
                    "whatever takes time (asyncio.sleep, an asynchronous client), or make it a plain function"
                )
                self._outcomes |= dict.fromkeys(pending, blocked)
            else:
                self._begin(pending)
        return [
            self._outcomes[number] if number in self._outcomes else self._futures[number].result()
            for number in range(len(self._calls))
        ]

    def cancel(self) -> None:
        """Cancel calls that are still running."""
        for future in self._futures.values():
            future.cancel()

    def _begin(self, numbers: Sequence[int]) -> None:
        self._loop = _current_loop()
        for number in numbers:
            attempts = _attempt_in_time(self._reward, self._calls[number], self._retries, self._timeout)
            self._futures[number] = self._loop.submit(self._reward.name, attempts)

    def _pending(self) -> list[int]:
        """Wait for at most one call's timeout; returns the calls without an outcome, cancelled ones included."""
        waited = {number: future for number, future in self._futures.items() if number not in self._outcomes}
        wait_for_futures(waited.values(), self._timeout)
        return [number for number, future in waited.items() if not future.done() or future.cancelled()]


async def _attempt_in_time(reward: PreparedReward, call: Call, retries: int, timeout: float | None) -> Outcome:
    failure = Failure("was not called")
    for _ in range(retries + 1):
        with exits_refused():
            try:
                task = await run_with_limit(attempt_async(reward, call), timeout)
            except OverTimeError as error:
                if error.task is not None:
                    _abandon_task(reward.name, error.task)
                return too_slow(timeout)
        outcome = Failure("raised CancelledError") if task.cancelled() else task.result()
        if not isinstance(outcome, Failure):
            return outcome
        failure = outcome
    return failure


_loops: dict[int, BackgroundLoop] = {}
_blocked: list[threading.Thread] = []
_abandoned: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
"""Calls that did not end when they were cancelled."""
_lock = threading.Lock()


def _current_loop() -> BackgroundLoop:
    """The loop of this process; forks do not inherit threads, so they get their own."""
    with _lock:
        if os.getpid() not in _loops:
            _loops[os.getpid()] = BackgroundLoop("reward-functions")
        return _loops[os.getpid()]


def _abandon_task(name: str, task: asyncio.Task[Any]) -> None:
    _abandoned.add(task)
    running = sum(not other.done() for other in _abandoned)
    if running >= MAX_ABANDONED_CALLS:
        raise RuntimeError(
            f"{running} calls of async reward functions are still running after they were cancelled, the last one of "
            f"{name!r}; let it end when it is cancelled (no bare `except`, no long `await` in `finally`)."
        )
    log.warning("Reward function %r is still running after it was cancelled; the call is abandoned.", name)


def _abandon(loop: BackgroundLoop) -> str:
    """Give later calls a new loop, unless too many threads are stuck; returns the function that blocks this one."""
    name = loop.abandon()
    with _lock:
        if _loops.get(os.getpid()) is not loop:  # already done
            return name
        del _loops[os.getpid()]
        _blocked[:] = [thread for thread in (*_blocked, loop.thread) if thread.is_alive()]
        if len(_blocked) >= MAX_BLOCKED_THREADS:
            raise RuntimeError(
                f"{len(_blocked)} threads are stuck in async reward functions that block their event loop, the last "
                f"one in {name!r}; await whatever takes time, or make it a plain function and set reward_workers."
            )
    log.warning("Reward function %r blocks its event loop; its thread is abandoned.", name)
    return name


# Runs reward functions: with retries, in parallel, and with failures confined to the rollouts concerned.
#
# Coroutine functions run on an event loop in a separate thread. Plain functions run in worker processes if there are
# any;
# otherwise one after another on the thread that waits for the scores, because graders that use signals work only on the
# main thread.


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


# Rewards groups of rollouts: calls the functions, sums their results, writes the rewards into the rollouts.

Rewards = Sequence[Weighted | RewardFunction] | Weighted | RewardFunction | list[PreparedReward]
"""One reward function or a list of them, weighted or not; or what `prepare_rewards` returned."""


def prepare_rewards(rewards: Rewards) -> list[PreparedReward]:
    """Check the names and signatures of reward functions before a run. A list that it returned comes back unchanged.

    Raises:
        ValueError: If the list is empty, names repeat, all weights are 0, or a signature is not supported.
        TypeError: If something is not callable, or is a class.
    """
    if isinstance(rewards, list) and rewards and isinstance(rewards[0], PreparedReward):
        return rewards
    prepared = [prepare_reward(weighted) for weighted in as_weighted(rewards)]
    if all(reward.weight == 0 for reward in prepared):
        raise ValueError(
            f"rewards has weight 0 for all of {[reward.name for reward in prepared]}, so no rollout would have a "
            "reward; give one of them another weight."
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
        ValueError: If a prompt lacks one, or `check_row` refuses it; names the row, the function and the column.
        RewardConfigurationError: If a function raises it.
    """
    prepared = prepare_rewards(rewards)
    for reward in prepared:
        if set_up := hook_of(reward.function, "set_up"):
            set_up()
    rollout = Rollout([], text="", environment=LiveObject(object()) if environments else None)
    for number, prompt in enumerate(prompts):
        group = RolloutGroup(prompt.token_ids, [rollout], number, prompt.columns, prompt.prompt, prompt.data_source)
        inputs = flatten_groups([group])
        for reward in prepared:
            try:
                call_arguments(reward, inputs, [0])
                if check_row := hook_of(reward.function, "check_row"):
                    check_row(private_copy(prompt.columns))
            except ValueError as error:
                raise ValueError(f"{prompt.where or f'{split}, prompt {number}'}: {error}") from error


def check_stoppable(prepared: Sequence[PreparedReward], timeout: float) -> None:
    """Refuse a time limit without workers, unless it serves async functions and all others must stay in this process.

    Raises:
        ValueError: Names the functions that could not be stopped.
    """
    plain = [reward.name for reward in prepared if not reward.is_async]
    movable = [reward.name for reward in prepared if not reward.in_process]
    if movable or len(plain) == len(prepared):
        raise ValueError(
            f"reward_timeout is {timeout} with reward_workers=0; {plain} run in this process, where they cannot be "
            f"stopped. {'Set reward_workers to 1 or more, or leave' if movable else 'Leave'} reward_timeout out."
        )


def check_time_limits(prepared: Sequence[PreparedReward], workers: int, timeout: float | None) -> None:
    """Refuse functions that may run forever, unless workers can stop them.

    Raises:
        ValueError: Names the functions and the options.
    """
    endless = [reward.name for reward in prepared if reward.needs_time_limit]
    if endless and (workers == 0 or timeout is None):
        raise ValueError(
            f"the reward functions {endless} may take forever on some completions, and reward_workers is {workers} "
            f"with reward_timeout {timeout}; set reward_workers to 1 or more and reward_timeout to seconds per call."
        )


class PendingRewards:
    """Rewards that are being computed; see `start_rewards`."""

    def __init__(
        self, groups: Sequence[RolloutGroup], prepared: Sequence[PreparedReward], scores: PendingScores
    ) -> None:
        self._groups = groups
        self._prepared = prepared
        self._scores = scores

    def wait(self) -> dict[str, float]:
        """Run the functions that need this thread, wait for the others, and write the rewards into the rollouts.

        Call it once. Returns and raises the same as `apply_rewards`.
        """
        scores = self._scores.wait()
        rewarded_rows: list[Rollout] = []
        start = 0
        for group in self._groups:
            episodes = group.episodes
            rewarded = [episode.last for episode in episodes]
            end = start + len(rewarded)
            by_function = [_align_steps(per_function[start:end], rewarded) for per_function in scores]
            for rollout, *of_rollout in zip(rewarded, *by_function, strict=True):
                _write_reward(rollout, self._prepared, of_rollout)
            for episode in episodes:
                _share_reward(episode)
            start, rewarded_rows = end, rewarded_rows + rewarded
        return reward_metrics(list(map(reward_row, rewarded_rows)), [reward.name for reward in self._prepared])


def start_rewards(
    groups: Sequence[RolloutGroup],
    rewards: Rewards,
    *,
    tokenizer: Any = None,
    retries: int = 1,
    max_failed_share: float = 0.5,
    workers: CallRunner | None = None,
    timeout: float | None = None,
) -> PendingRewards:
    """Start like `apply_rewards`, but return at once; `wait` on the result finishes the work.

    Coroutine functions and those in worker processes start here. Plain functions of this process run on the thread that
    calls `wait`. Do not change the rollouts until then.
    """
    if retries < 0:
        raise ValueError(f"retries is {retries}; it must be 0 or larger.")
    if not 0 <= max_failed_share <= 1:
        raise ValueError(f"max_failed_share is {max_failed_share}; it must be in [0, 1].")
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout is {timeout}; it must be larger than 0, or None for no limit.")
    prepared = prepare_rewards(rewards)
    decode_completions(groups, tokenizer)
    inputs = flatten_groups([_last_rows(group) for group in groups])
    scores = PendingScores(
        prepared, inputs, retries=retries, max_failed_share=max_failed_share, workers=workers, timeout=timeout
    )
    return PendingRewards(groups, prepared, scores)


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
    of weight 0 are only logged. The reward is None, and the rollout is not trained, if no other function applies, or if
    one of them failed (raised, took too long, or returned a number that is not finite in float32): the sum of the rest
    would not be comparable with the other rollouts of the group. It is also None if the sum overflows float32.

    In place of a completion's number, a function may return a list with one number per token, None or NaN for a token
    without a reward; the sum is then the completion's reward. If the function returns a list for any completion of a
    group, a single number for another completion is the reward of that completion's last token. The tokens are
    `Rollout.completion_ids`, which begin after the environment's observation.

    For an episode, functions of TRL's signature get the messages as `completions`, with tool calls and results. They
    may also take `completion_mask` (per completion, 1 for each token that the model wrote and 0 for others) and, unless
    they run in worker processes, `environments` (the objects themselves, not copies). Functions of verl's signature get
    the whole decoded completion as `solution_str`, tool results included, as in verl; those with a true attribute
    `reads_final_answer` get the content of the last assistant message.

    Functions are called once per episode: where it has several rows (`RolloutGroup.episodes`), they see the last one.
    All rows get the reward; only the last one gets `token_rewards`.

    Args:
        groups: Any number of groups of any size; modified in place.
        rewards: One reward function or several, weighted or not.
        tokenizer: Decodes completions whose `text` is None, and sets it. Not needed if all have their text.
        retries: Retries of a call that raised.
        max_failed_share: Share of rollouts on which a function may fail before that is an error, from 0 to 1.
        workers: `RewardWorkers` created with the same rewards; functions then run in parallel in its processes. None:
            one after another in this process.
        timeout: Seconds that a call of an async function may take; None uses the workers' limit, if there are workers.

    Returns:
        For each function, `rewards/{name}/mean` and `/std` (of the finite rewards, Bessel-corrected; NaN if there are
        none), `/none` (rollouts to which it did not apply), `/invalid` (on which it failed), and the mean of every
        other finite number in returned dictionaries, over the rollouts whose dictionary has the key, as
        `rewards/{name}/{key}` (`{key}_` for the keys `mean`, `std`, `none` and `invalid`). Which keys the dictionaries
        have depends on the data, so ranks may differ.

    Raises:
        ValueError: If a function returns the wrong type or length, or needs a column that the data lacks; if a text is
            missing and there is no tokenizer.
        RewardConfigurationError: If a function raises it.
        RuntimeError: If a function fails on more rollouts than allowed.
    """
    return start_rewards(
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
        if rollout.text is not None:
            continue
        if tokenizer is None:
            raise ValueError(
                "Rollout.text is None and tokenizer is None; set the text or pass a tokenizer to decode it."
            )
        rollout.text = tokenizer.decode(rollout.completion_ids, skip_special_tokens=True)


def _last_rows(group: RolloutGroup) -> RolloutGroup:
    """The group with the rollouts that reward functions see."""
    if len(group.rows_per_episode) == len(group.rollouts):
        return group
    return replace(group, rollouts=[episode.last for episode in group.episodes])


def _share_reward(episode: EpisodeRows) -> None:
    last = episode.last
    for row in episode.rows[:-1]:
        row.reward, row.rewards, row.token_rewards = last.reward, dict(last.rewards), None


def _write_reward(rollout: Rollout, prepared: Sequence[PreparedReward], scores: Sequence[Score]) -> None:
    rollout.rewards, rollout.reward, rollout.token_rewards = {}, None, None
    rollout.failed_rewards = [reward.name for reward, score in zip(prepared, scores, strict=True) if score.failed]
    rollout.reward_numbers = {}
    total, any_applies, any_failed = 0.0, False, False
    token_rows: list[list[float | None]] = []
    for reward, score in zip(prepared, scores, strict=True):
        rollout.rewards[reward.name] = score.value
        rollout.reward_numbers |= {f"{reward.name}/{key}": number for key, number in score.extras.items()}
        if reward.weight == 0:
            continue
        any_failed = any_failed or score.failed
        any_applies = any_applies or score.value is not None
        if score.token_rewards is not None:
            token_rows.append([None if value is None else reward.weight * value for value in score.token_rewards])
        elif score.value is not None:
            total += reward.weight * score.value
    if any_failed or not any_applies:
        return
    tokens = _sum_tokens(token_rows) if token_rows else None
    if tokens is not None:
        steps = [value for value in tokens if value is not None]
        total = (total + math.fsum(steps)) if all(map(fits_float32, steps)) else math.inf  # fsum may overflow
    if fits_float32(total):
        rollout.reward, rollout.token_rewards = total, tokens


def _sum_tokens(rows: Sequence[Sequence[float | None]]) -> list[float | None]:
    """The sum of the rewards of each token; None for a token without any."""
    return [
        None if all(value is None for value in column) else sum(value for value in column if value is not None)
        for column in zip(*rows, strict=True)
    ]


def _align_steps(scores: Sequence[Score], rollouts: Sequence[Rollout]) -> list[Score]:
    """Align a function's token rewards with the token ids of a group's rollouts.

    If it rewarded tokens of any rollout, its single numbers become rewards of the last token.
    """
    if all(score.token_rewards is None for score in scores):
        return list(scores)
    return [_align(score, rollout) for score, rollout in zip(scores, rollouts, strict=True)]


def _align(score: Score, rollout: Rollout) -> Score:
    if score.token_rewards is not None:
        return replace(score, token_rewards=[*[None] * rollout.num_observation_tokens, *score.token_rewards])
    if score.value is not None and rollout.token_ids:
        return replace(score, token_rewards=[*[None] * (len(rollout.token_ids) - 1), score.value])
    return score
