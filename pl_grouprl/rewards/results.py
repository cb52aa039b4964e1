"""Reads the results of reward functions into one score per rollout."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from typing import Any

from pl_grouprl.rewards.conventions import PreparedReward
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.text import metric_name

STATISTICS = ("mean", "std", "none", "invalid")
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def fits_float32(value: float) -> bool:
    """Whether a number is finite in float32."""
    return abs(value) <= _MAX_FLOAT32  # False for NaN


@dataclass  # not frozen, which would take twice as long to create
class Score:
    """A function's score of one rollout; never changed.

    Attributes:
        value: The reward, or the sum of the token rewards; None if the function does not apply, or failed.
        extras: Further numbers to log, by key.
        failed: Whether the function raised, or gave NaN or infinity. Numbers beyond float32, in which advantages are
            computed, count as infinite.
        token_rewards: The reward of each token, None for a token without one; None if the reward is of the whole
            completion.
    """

    value: float | None = None
    extras: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    token_rewards: list[float | None] | None = None


def read_result(
    reward: PreparedReward, result: Any, lengths: Sequence[int], arguments: Mapping[str, Any]
) -> list[Score]:
    """Turn what a function returned into one score per rollout of the call.

    Args:
        reward: The function.
        result: What it returned.
        lengths: Tokens of each completion of the call.
        arguments: The arguments of the call.

    Raises:
        ValueError: If it has the wrong type or length.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError(f"Reward function {reward.name!r} returned a coroutine; define it with `async def`.")
    if reward.convention == "verl":
        return [_read_item(reward, result, lengths[0])]
    if hasattr(result, "tolist"):  # arrays and tensors
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(
            f"Reward function {reward.name!r} returned {type(result).__name__} instead of a list; "
            f"return one number or None per completion ({len(lengths)} of them)."
        )
    if reward.convention == "groups":
        result = _join_groups(reward, result, arguments["groups"])
    if len(result) != len(lengths):
        raise ValueError(
            f"Reward function {reward.name!r} returned {len(result)} rewards for {len(lengths)} completions; "
            "return one number or None per completion, in their order."
        )
    return [_read_item(reward, value, length) for value, length in zip(result, lengths, strict=True)]


def _join_groups(reward: PreparedReward, result: Sequence[Any], groups: Sequence[RolloutGroup]) -> list[Any]:
    """Concatenate the lists of all groups.

    Raises:
        ValueError: If there is not one list per group with one entry per rollout.
    """
    lists = [item.tolist() if hasattr(item, "tolist") else item for item in result]
    given = [len(item) if isinstance(item, (list, tuple)) else type(item).__name__ for item in lists]
    expected = [len(group.rollouts) for group in groups]
    if given != expected:
        raise ValueError(
            f"Reward function {reward.name!r} returned {given} rewards for groups of {expected} rollouts; return one "
            "list per group, with one number or None per rollout."
        )
    return [value for values in lists for value in values]


def _read_item(reward: PreparedReward, result: Any, length: int) -> Score:
    """The score of one completion, with the other numbers of a dictionary as extras."""
    if type(result) is float and fits_float32(result):  # shortcut for what most functions return
        return Score(result)
    if not isinstance(result, Mapping):
        return _read_value(reward, result, length)
    if "score" not in result:
        raise ValueError(
            f"Reward function {reward.name!r} returned a dictionary with the keys {list(result)}; "
            "it must have the key 'score'."
        )
    extras = {
        f"{key}_" if str(key).rstrip("_") in STATISTICS else metric_name(str(key)): number
        for key, value in result.items()
        if key != "score" and (number := _as_float(_without_arrays(value))) is not None and math.isfinite(number)
    }
    return replace(_read_value(reward, result["score"], length), extras=extras)


def _read_value(reward: PreparedReward, value: Any, length: int) -> Score:
    """The score of one completion: a number, None, or a reward for each of its `length` tokens."""
    value = _without_arrays(value, length)
    if not isinstance(value, (list, tuple)):
        return _score(_number(reward, value, "rollout"))
    if reward.convention == "verl" and isinstance(value, tuple):
        raise ValueError(
            f"Reward function {reward.name!r} returned the tuple {value!r}, which is not a score; return a number, or "
            "a dictionary such as {'score': 1.0, 'correct': True}."
        )
    if len(value) != length:
        raise ValueError(
            f"Reward function {reward.name!r} returned {len(value)} rewards for a completion of {length} tokens; "
            "return one number or None per token of completion_ids, or one number for all."
        )
    numbers = [_number(reward, _without_arrays(number), "token") for number in value]
    tokens = [None if number is None or math.isnan(number) else number for number in numbers]
    steps = [number for number in tokens if number is not None]
    return replace(_score(sum(steps) if all(map(fits_float32, steps)) else math.inf), token_rewards=tokens)


def _score(value: float | None) -> Score:
    return Score(value) if value is None or fits_float32(value) else Score(failed=True)


def _without_arrays(value: Any, length: int = 0) -> Any:
    """Convert arrays and tensors to lists, and those of one element to a number.

    Only the array [NaN] for a completion of one token becomes [None]: the token has no reward.
    """
    if not hasattr(value, "item"):
        return value
    shape = getattr(value, "shape", ())
    if math.prod(shape) != 1:
        return value.tolist()
    number = value.item()
    return [None] if len(shape) == length == 1 and number != number else number


def _number(reward: PreparedReward, value: Any, of: str) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise ValueError(
            f"Reward function {reward.name!r} returned {value!r} of type {type(value).__name__} as the reward of a "
            f"{of}; return a number or None."
        )
    return number


def _as_float(value: Any) -> float | None:
    """A number as a float, infinite beyond float64; None for anything else."""
    if not isinstance(value, (Real, Decimal)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


RewardRow = tuple[Mapping[str, float | None], Sequence[str], Mapping[str, float]]
"""The `rewards`, `failed_rewards` and `reward_numbers` of a rollout."""


def reward_row(rollout: Rollout) -> RewardRow:
    """What metrics of reward functions need of a rollout."""
    return rollout.rewards, rollout.failed_rewards, rollout.reward_numbers


def reward_metrics(
    rows: Sequence[RewardRow], functions: Iterable[str] = (), statistics: Sequence[str] = STATISTICS
) -> dict[str, float]:
    """Metrics of reward functions.

    Args:
        rows: Of all rollouts that functions have seen.
        functions: Functions to report even if no row has them.
        statistics: Which statistics to report.

    Returns:
        Per function `rewards/{name}/mean` and `/std` (unbiased) of its finite rewards, NaN without any, and how
        often it did not apply (`/none`) and failed (`/invalid`); the mean of each further number over the rows that
        have it, as `rewards/{name}/{key}`.
    """
    rewards: dict[str, list[float | None]] = {name: [] for name in functions}
    failures: Counter[str] = Counter()
    numbers: dict[str, list[float]] = {}
    for of_row, failed, numbers_of_row in rows:
        failures.update(failed)
        for name, reward in of_row.items():
            rewards.setdefault(name, []).append(reward)
        for name, number in numbers_of_row.items():
            numbers.setdefault(name, []).append(number)
    metrics: dict[str, float] = {}
    for name, values in rewards.items():
        finite = [value for value in values if value is not None and math.isfinite(value)]
        found = {
            "mean": mean(finite),
            "std": std(finite) if finite else math.nan,
            "none": float(len(values) - len(finite) - failures[name]),
            "invalid": float(failures[name]),
        }
        metrics |= {f"rewards/{name}/{statistic}": found[statistic] for statistic in statistics}
    return metrics | {f"rewards/{name}": mean(values) for name, values in numbers.items()}


def mean(values: Sequence[float]) -> float:
    """Average numbers; NaN without any."""
    return math.fsum(values) / len(values) if values else math.nan


def std(values: Sequence[float]) -> float:
    """Compute the unbiased standard deviation; 0 for fewer than two numbers."""
    center = mean(values)
    return math.sqrt(sum((value - center) ** 2 for value in values) / max(len(values) - 1, 1))
