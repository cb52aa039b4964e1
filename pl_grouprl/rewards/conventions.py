"""The three signatures of reward functions: telling them apart, what each is called with, what each returns."""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Literal

from pl_grouprl.rewards.base import FunctionFromFile, RewardFunction, Weighted
from pl_grouprl.types import Messages, RolloutGroup

Convention = Literal["trl", "verl", "groups"]

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127

_TRL_INPUTS = ("prompts", "completions", "completion_ids")
_VERL_INPUTS = ("data_source", "solution_str", "ground_truth", "extra_info")


@dataclass
class RewardInputs:
    """The rollouts of all groups in one flat list, as reward functions see them.

    Attributes:
        prompts: Prompt of each rollout, length B: a string or messages.
        texts: Completion of each rollout, decoded.
        completion_ids: Tokens of each completion.
        data_sources: Name of the data set that each prompt is from.
        columns: Every column of the data, one value per rollout; None where a prompt's row lacks it.
        groups: Which group each rollout is from, counted from 0.
        rollout_groups: The groups themselves.
        of_prompts: What a function of verl's signature is told about a prompt, by its name and the group.
    """

    prompts: list[str | Messages]
    texts: list[str]
    completion_ids: list[list[int]]
    data_sources: list[str]
    columns: dict[str, list[Any]]
    groups: list[int]
    rollout_groups: list[RolloutGroup] = field(default_factory=list)
    of_prompts: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)


def fits_float32(value: float) -> bool:
    """Whether a number is finite in float32."""
    return abs(value) <= _MAX_FLOAT32  # False for NaN


@dataclass(frozen=True)
class Score:
    """What a function said of one rollout.

    Attributes:
        value: The reward; the sum of those of the tokens if there are any. None: the function does not apply.
        extras: Further numbers to be logged.
        failed: True where the function raised.
        token_rewards: The reward of each token, None for a token without one; None: the reward is of the completion as
            a whole.
    """

    value: float | None = None
    extras: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    token_rewards: list[float | None] | None = None

    @property
    def invalid(self) -> bool:
        """True where there should be a number and there is none: the function raised, or gave NaN or infinity.

        What float32 does not hold, in which advantages are computed, is infinite.
        """
        return self.failed or (self.value is not None and not fits_float32(self.value))


@dataclass(frozen=True)
class PreparedReward:
    """A reward function whose convention is known.

    Attributes:
        function: What is called.
        name: Name in metrics.
        weight: Factor in the weighted sum.
        convention: Whose signature the function has.
        parameters: Names that the function takes; None if it takes any (`**kwargs`).
        required: Names without which it cannot be called.
        is_async: True for a coroutine function.
        in_process: True where the function is never sent to a worker process: it is async, or says so itself.
    """

    function: RewardFunction
    name: str
    weight: float
    convention: Convention
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    in_process: bool


def prepare_reward(weighted: Weighted) -> PreparedReward:
    """Find out which signature a named function has.

    A parameter `solution_str` makes it verl's; `completions`, or `**kwargs` alone, makes it TRL's; `groups` that of
    whole groups.

    Raises:
        ValueError: If it is none of these.
    """
    function, name = weighted.function, weighted.name or ""
    if isinstance(function, FunctionFromFile):  # called through it, since it can be pickled and the function cannot
        function = function.function
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"Reward function {name!r} has no readable signature; wrap it in a Python function."
        ) from error
    by_name = {
        parameter.name: parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    takes_any = any(parameter.kind == parameter.VAR_KEYWORD for parameter in signature.parameters.values())
    convention = _convention(by_name.keys(), takes_any)
    if convention is None:
        raise ValueError(
            f"Reward function {name!r} has the signature {signature}, which is none of the known ones; write "
            "f(prompts, completions, **columns) -> list[float | None] (TRL), "
            "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict (verl) or "
            "f(groups) -> list[list[float | None]]. In place of a number, a list has one per token."
        )
    is_async = _is_async(function)
    return PreparedReward(
        function=weighted.function,
        name=name,
        weight=weighted.weight,
        convention=convention,
        parameters=None if takes_any else frozenset(by_name),
        required=frozenset(key for key, parameter in by_name.items() if parameter.default is parameter.empty),
        is_async=is_async,
        in_process=is_async or getattr(function, "stays_in_process", False),
    )


def _convention(parameters: Set[str], takes_any: bool) -> Convention | None:
    if "solution_str" in parameters:
        return "verl"
    if "completions" in parameters:
        return "trl"
    if "groups" in parameters:
        return "groups"
    return "trl" if takes_any else None


def flatten_groups(groups: Sequence[RolloutGroup]) -> RewardInputs:
    """List the rollouts of all groups, in order. Every rollout must have its text."""
    pairs = [(index, group, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]
    names = {name: None for group in groups for name in group.columns}  # a dictionary keeps the order
    return RewardInputs(
        prompts=[group.prompt for _, group, _ in pairs],
        texts=[rollout.text or "" for _, _, rollout in pairs],
        completion_ids=[rollout.token_ids for _, _, rollout in pairs],
        data_sources=[group.data_source for _, group, _ in pairs],
        columns={name: [group.columns.get(name) for _, group, _ in pairs] for name in names},
        groups=[index for index, _, _ in pairs],
        rollout_groups=list(groups),
    )


def call_units(reward: PreparedReward, inputs: RewardInputs, *, by_group: bool = False) -> list[list[int]]:
    """Return the rollouts of each call.

    Args:
        reward: The function. verl's signature is called once per rollout.
        inputs: All rollouts.
        by_group: Call functions of the other signatures once per group, instead of once for all rollouts.
    """
    everything = list(range(len(inputs.texts)))
    if not everything:
        return []
    if reward.convention == "verl":
        return [[index] for index in everything]
    return _by_group(everything, inputs) if by_group else [everything]


def smaller_units(reward: PreparedReward, unit: list[int], inputs: RewardInputs) -> list[list[int]]:
    """Divide a call that failed into one call per group, so that a single bad completion costs only its group."""
    if reward.convention == "verl":
        return []
    parts = _by_group(unit, inputs)
    return parts if len(parts) > 1 else []


def _by_group(unit: list[int], inputs: RewardInputs) -> list[list[int]]:
    parts: dict[int, list[int]] = {}
    for index in unit:
        parts.setdefault(inputs.groups[index], []).append(index)
    return list(parts.values())


def call_arguments(reward: PreparedReward, inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    """Return the keyword arguments of one call.

    Raises:
        ValueError: If the function requires an argument that neither the convention nor a column provides.
    """
    if reward.convention != "verl":
        make = _trl_arguments if reward.convention == "trl" else _groups_arguments
        return _taken(reward, inputs, make(inputs, unit))
    (index,) = unit
    of_prompt = (reward.name, inputs.groups[index])  # made once for all of its rollouts
    if of_prompt not in inputs.of_prompts:
        inputs.of_prompts[of_prompt] = _taken(reward, inputs, _verl_arguments(reward, inputs, index))
    return inputs.of_prompts[of_prompt] | {"solution_str": inputs.texts[index]}


def _taken(reward: PreparedReward, inputs: RewardInputs, available: dict[str, Any]) -> dict[str, Any]:
    """Those arguments that a function takes.

    Raises:
        ValueError: If one that it requires is missing.
    """
    missing = sorted(reward.required - available.keys())
    if missing:
        raise ValueError(
            f"Reward function {reward.name!r} requires {missing}, and the data has the columns "
            f"{sorted(inputs.columns)}; add the column, or give the parameter a default."
        )
    if reward.parameters is None:
        return available
    return {key: value for key, value in available.items() if key in reward.parameters}


def read_result(reward: PreparedReward, result: Any, group_of: Sequence[int], lengths: Sequence[int]) -> list[Score]:
    """Turn what a function returned into one score per rollout of the call.

    Args:
        reward: The function.
        result: What it returned.
        group_of: Which group each rollout of the call is from.
        lengths: Tokens of each completion.

    Raises:
        ValueError: If it has the wrong type or length.
    """
    if inspect.iscoroutine(result):
        result.close()
        raise ValueError(f"Reward function {reward.name!r} returned a coroutine; define it with `async def`.")
    if reward.convention == "verl":
        return [_read_verl(reward, result, lengths[0])]
    if hasattr(result, "tolist"):  # arrays and tensors
        result = result.tolist()
    if not isinstance(result, (list, tuple)):
        raise ValueError(
            f"Reward function {reward.name!r} returned {type(result).__name__} instead of a list; "
            f"return one number or None per completion ({len(group_of)} of them)."
        )
    if reward.convention == "groups":
        result = _join_groups(reward, result, group_of)
    if len(result) != len(group_of):
        raise ValueError(
            f"Reward function {reward.name!r} returned {len(result)} rewards for {len(group_of)} completions; "
            "return one number or None per completion, in their order."
        )
    return [_read_value(reward, value, length) for value, length in zip(result, lengths, strict=True)]


def _join_groups(reward: PreparedReward, result: Sequence[Any], group_of: Sequence[int]) -> list[Any]:
    """Check that there is one list per group and one entry per rollout in it; return the entries of all groups.

    Raises:
        ValueError: If not.
    """
    lists = [own.tolist() if hasattr(own, "tolist") else own for own in result]
    given = [len(own) if isinstance(own, (list, tuple)) else type(own).__name__ for own in lists]
    expected = list(Counter(group_of).values())
    if given != expected:
        raise ValueError(
            f"Reward function {reward.name!r} returned {given} rewards for groups of {expected} rollouts; return one "
            "list per group, with one number or None per rollout."
        )
    return [value for own in lists for value in own]


def _groups_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    numbers = dict.fromkeys(inputs.groups[index] for index in unit)  # each once, in order
    return {"groups": [inputs.rollout_groups[number] for number in numbers]}


def _trl_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    columns = {name: [values[index] for index in unit] for name, values in inputs.columns.items()}
    completions: list[Any] = []
    for index in unit:
        text, conversational = inputs.texts[index], not isinstance(inputs.prompts[index], str)
        completions.append([{"role": "assistant", "content": text}] if conversational else text)
    return columns | {
        "prompts": [inputs.prompts[index] for index in unit],
        "completions": completions,
        "completion_ids": [inputs.completion_ids[index] for index in unit],
    }


def _verl_arguments(reward: PreparedReward, inputs: RewardInputs, index: int) -> dict[str, Any]:
    columns = {name: values[index] for name, values in inputs.columns.items()}
    return {
        "data_source": inputs.data_sources[index],
        "solution_str": inputs.texts[index],
        "ground_truth": _ground_truth(reward, columns),
        "extra_info": columns.get("extra_info"),
    }


def _ground_truth(reward: PreparedReward, columns: Mapping[str, Any]) -> Any:
    """Find the reference: `reward_model["ground_truth"]` as verl has it, or a column `ground_truth` or `answer`."""
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    for name in ("ground_truth", "answer"):
        if columns.get(name) is not None:
            return columns[name]
    if "ground_truth" not in reward.required:
        return None
    raise ValueError(
        f"Reward function {reward.name!r} requires a ground_truth, and the row has only the columns "
        f"{sorted(columns)}; add reward_model.ground_truth (verl), or a column `ground_truth` or `answer`."
    )


def _read_verl(reward: PreparedReward, result: Any, length: int) -> Score:
    if type(result) is float:  # what most functions return, for each rollout: the checks below take longer
        return Score(result)
    if not isinstance(result, Mapping):
        return _read_value(reward, result, length)
    if "score" not in result:
        raise ValueError(
            f"Reward function {reward.name!r} returned a dictionary with the keys {sorted(result)}; "
            "it must have the key 'score'."
        )
    extras = {key: float(value) for key, value in result.items() if key != "score" and isinstance(value, Real)}
    return replace(_read_value(reward, result["score"], length), extras=extras)


def _read_value(reward: PreparedReward, value: Any, length: int) -> Score:
    """The score of one completion: a number, None, or a reward for each of its `length` tokens."""
    value = _without_arrays(value, length)
    if not isinstance(value, (list, tuple)):
        return Score(_number(reward, value, "rollout"))
    if len(value) != length:
        raise ValueError(
            f"Reward function {reward.name!r} returned {len(value)} rewards for a completion of {length} tokens; "
            "return one number or None per token of completion_ids, or one number for all."
        )
    numbers = [_number(reward, _without_arrays(own), "token") for own in value]
    tokens = [None if own is None or math.isnan(own) else own for own in numbers]
    steps = [own for own in tokens if own is not None]
    return Score(sum(steps) if all(map(fits_float32, steps)) else math.inf, token_rewards=tokens)


def _without_arrays(value: Any, length: int = 0) -> Any:
    """Turn arrays and tensors into numbers and lists; one with a single element is a number."""
    if not hasattr(value, "item"):
        return value
    shape = getattr(value, "shape", ())
    if math.prod(shape) != 1:
        return value.tolist()
    number = value.item()
    return [None] if len(shape) == length == 1 and number != number else number  # the only token has no reward


def _number(reward: PreparedReward, value: Any, of: str) -> float | None:
    if value is None:
        return None
    if not isinstance(value, Real):
        raise ValueError(
            f"Reward function {reward.name!r} returned {value!r} of type {type(value).__name__} as the reward of a "
            f"{of}; return a number or None."
        )
    try:
        return float(value)
    except OverflowError:  # an integer beyond float64
        return math.inf


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
