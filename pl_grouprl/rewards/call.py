"""One call of a reward function, and its outcome."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from pl_grouprl.rewards.base import RewardConfigurationError, RewardFunction
from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.rewards.results import Score, read_result
from pl_grouprl.types import LiveObject
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.progress import tick


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
