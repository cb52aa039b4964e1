"""Reward functions: their signatures, weights, arguments, results and metrics."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from importlib.machinery import SourceFileLoader
from itertools import compress
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from pl_grouprl.types import Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.options import as_options, check_finite
from pl_grouprl.utilities.text import metric_name

RewardFunction = Callable[..., Any]
"""A callable, perhaps `async`, with one of three signatures, told apart by the names of its parameters.

TRL's, called once for all rollouts, returns one number (or None: does not apply) per completion::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

verl's, called once per rollout, returns a number, or a dictionary whose `score` is the reward::

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

The third, for functions that need token ids and whole groups, such as `ModelReward`, is called once, with the
`RolloutGroup`s, and returns for each group one number or None per rollout::

    f(groups) -> list[list[float | None]]

Instead of a number, each may return a list (or array, or tensor) with one number per token of the completion, None or
NaN for a token without a reward; or a dictionary whose `score` is either, and whose other numbers are logged. In
worker processes, a function is called once per group, so a group's rewards must not depend on other groups.

Every call gets copies of lists, dictionaries and groups; see `pl_grouprl.utilities.describe.private_copy`.

The completion of an episode with tools is a list of messages; the calls that the model wrote are
`message["tool_calls"]`, each `{"type": "function", "function": {"name": "look_up", "arguments": {"key": "a"}}}`. For
what else functions see of an episode, see `pl_grouprl.rewards.apply_rewards`.

An object may also have these attributes:

- `set_up()` is called at least once when a run is set up: it loads what the function needs, or fails, before the first
  rollout.
- `check_row(columns)` is called for each prompt at setup, and raises ValueError if it cannot score it.
- `extract_answer(text)`, or `extract_answer(text, columns)`, returns the answer in a completion as a string, or None,
  for majority votes. It runs in the training process, without a time limit.
- `stays_in_process = True`: never sent to worker processes, as `async` functions are not.
- `needs_time_limit = True`: must run in workers with a `reward_calls.timeout`.
- `reads_final_answer = True` (verl's signature): `solution_str` is the content of the last assistant message.
- `ground_truth_column` (verl's signature): the column with its reference.

This is a plain callable type, because a Protocol would have to list the columns of every data set.
"""


class RewardConfigurationError(ValueError):
    """Raised by a reward function that cannot work as configured, whatever the rollouts are.

    It ends the run: the call is not retried, and does not count towards `max_failed_share`.
    """


@dataclass
class Weighted:
    """A reward function with its weight in the combined reward.

    Attributes:
        function: The reward function.
        weight: Factor in the weighted sum; 0 logs the function without adding it to the reward.
        name: Name in metrics and in `Rollout.rewards`; defaults to the function's own name. A lambda, which has none,
            is named by its position in the list, from `reward_1`.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        check_finite(**{"Weighted.weight": self.weight})


class FunctionFromFile:
    """A reward function loaded from a file by name, as with verl's `custom_reward_function`.

    The file is executed on construction, so it must be as trusted as the configuration itself.

    Args:
        path: A Python file; relative paths start at the working directory.
        name: Name of a function (or of any other callable) in that file.
        kwargs: Passed to the function in every call (verl's `reward_kwargs`).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file does not define the name.
        TypeError: If the function does not take one of the `kwargs`.
    """

    def __init__(self, path: str, name: str = "compute_score", kwargs: dict[str, Any] | None = None) -> None:
        self.path = path
        self.name = name
        self.kwargs = kwargs
        file = Path(path).expanduser().resolve()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {path}.")
        module_name = f"pl_grouprl_reward_file_{file.stem}"
        spec = importlib.util.spec_from_loader(module_name, SourceFileLoader(module_name, str(file)))
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module  # dataclasses and annotations look up their module while the file runs
        spec.loader.exec_module(module)
        function = getattr(module, name, None)
        if function is None:
            raise ValueError(f"{path} does not define {name!r}.")
        try:
            inspect.signature(function).bind_partial(**kwargs or {})
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name!r} of {path} cannot be called: {error}.") from error
        self.function: RewardFunction = functools.partial(function, **kwargs) if kwargs else function
        self._sha256 = hashlib.sha256(file.read_bytes()).hexdigest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the file."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return FunctionFromFile, (self.path, self.name, self.kwargs)

    def run_options(self) -> dict[str, Any]:
        """What its rewards depend on, wherever the file is: the function's name and `kwargs`, a digest of the file."""
        options = {"function": self.name, "sha256": self._sha256}
        return options | ({"kwargs": self.kwargs} if self.kwargs else {})


def hook_of(function: RewardFunction, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a reward function, such as `set_up`; looks through `FunctionFromFile`."""
    target = function.function if isinstance(function, FunctionFromFile) else function
    found = getattr(target, name, None)
    return found if callable(found) else None


def reward_name(function: RewardFunction) -> str | None:
    """Return a function's name in metrics: its own, or its class's; None for a lambda."""
    if isinstance(function, FunctionFromFile):
        return function.name
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    name = getattr(function, "__name__", None) or type(function).__name__
    return None if name == "<lambda>" else name


def as_weighted(rewards: Sequence[Any] | Weighted | RewardFunction) -> list[Weighted]:
    """Normalize one or several reward functions, weighted or not, to weighted functions with names.

    A mapping is read as the fields of a `Weighted`.

    Raises:
        TypeError: If a mapping has another field.
        ValueError: If two functions share a name.
    """
    items = list(rewards) if isinstance(rewards, Sequence) else [rewards]
    items = [as_options(Weighted, item, "rewards") if isinstance(item, Mapping) else item for item in items]
    weighted = [item if isinstance(item, Weighted) else Weighted(item) for item in items]
    named = [
        Weighted(item.function, item.weight, item.name or reward_name(item.function) or f"reward_{number}")
        for number, item in enumerate(weighted, start=1)
    ]
    names = [item.name for item in named]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(
            f"rewards has several functions named {repeated[0]!r}, whose metrics would overwrite each other; give them "
            "different names with Weighted(function, name=...)."
        )
    return named


@dataclass(frozen=True)
class PreparedReward:
    """A reward function with what is known about it.

    Attributes:
        function: The callable.
        name: Name in metrics.
        weight: Factor in the weighted sum.
        convention: Whose signature the function has.
        parameters: Names of its parameters; None if it takes any (`**kwargs`).
        required: Names of its required parameters.
        is_async: Whether it is a coroutine function.
        in_process: Whether it is never sent to a worker process: it is async, or has a true `stays_in_process`.
        names_environments: Whether it has a parameter `environments`.
        final_answer: Its attribute `reads_final_answer`.
        needs_time_limit: Its attribute `needs_time_limit`.
        ground_truth_column: Its attribute `ground_truth_column`.
    """

    function: RewardFunction
    name: str
    weight: float
    convention: Literal["trl", "verl", "groups"]
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    in_process: bool
    names_environments: bool = False
    final_answer: bool = False
    needs_time_limit: bool = False
    ground_truth_column: str | None = None


def prepare_reward(weighted: Weighted) -> PreparedReward:
    """Determine the signature of a named function by its parameters.

    With `solution_str` it is verl's; with `completions`, or `**kwargs` alone, TRL's; with `groups`, it takes whole
    groups.

    Raises:
        ValueError: If it is none of these.
        TypeError: If the function is not callable.
    """
    function = weighted.function
    if isinstance(function, FunctionFromFile):  # kept as the callable: it can be pickled, the function cannot
        function = function.function
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    named = {p.name: p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    convention: Literal["trl", "verl", "groups"]
    if "solution_str" in named:
        convention = "verl"
    elif "groups" in named and "completions" not in named:
        convention = "groups"
    elif "completions" in named or takes_any:
        convention = "trl"
    else:
        raise ValueError(
            f"Reward function {weighted.name!r} has the signature {signature}, which is not one of the known ones; "
            "write f(prompts, completions, **columns) -> list[float | None], "
            "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict, or "
            "f(groups) -> list[list[float | None]]."
        )
    is_async = any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004
    return PreparedReward(
        function=weighted.function,
        name=weighted.name or "",
        weight=weighted.weight,
        convention=convention,
        parameters=None if takes_any else frozenset(named),
        required=frozenset(name for name, parameter in named.items() if parameter.default is parameter.empty),
        is_async=is_async,
        in_process=is_async or getattr(function, "stays_in_process", False),
        names_environments="environments" in named,
        final_answer=getattr(function, "reads_final_answer", False),
        needs_time_limit=getattr(function, "needs_time_limit", False),
        ground_truth_column=getattr(function, "ground_truth_column", None),
    )


# Arguments of a call.


def completion_text(completion: str | Messages) -> str:
    """Return the model's answer: a string unchanged; of messages, the content of the last assistant message.

    Earlier turns and tool results are not part of the answer. Empty if there is none.
    """
    return completion if isinstance(completion, str) else next(reversed(_assistant_texts(completion)), "")


def written_text(completion: str | Messages) -> str:
    """Return everything the model wrote: a string unchanged; of messages, the joined contents of the assistant's."""
    return completion if isinstance(completion, str) else "\n".join(_assistant_texts(completion))


def _assistant_texts(messages: Messages) -> list[str]:
    return [message.get("content") or "" for message in messages if message.get("role") == "assistant"]


def content_text(message: Mapping[str, Any]) -> str:
    """A message's content as text: parts on lines of their own; images and videos are only named."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", f"({part.get('type')})")) for part in content)


def written_ids(completion_ids: Sequence[list[int]], completion_mask: Sequence[list[int]] | None) -> list[list[int]]:
    """Return the tokens of each completion that the model wrote; without a mask, all of them."""
    if completion_mask is None:
        return list(completion_ids)
    return [list(compress(ids, mask)) for ids, mask in zip(completion_ids, completion_mask, strict=True)]


def ground_truth_of(columns: Mapping[str, Any], column: str | None = None) -> Any:
    """Find the reference: verl's `reward_model["ground_truth"]`, or a column `ground_truth` or `answer`.

    Args:
        columns: The columns of one row.
        column: Look only in this column.
    """
    if column is not None:
        return columns.get(column)
    reward_model = columns.get("reward_model")
    if isinstance(reward_model, Mapping) and reward_model.get("ground_truth") is not None:
        return reward_model["ground_truth"]
    return next((columns[name] for name in ("ground_truth", "answer") if columns.get(name) is not None), None)


class RewardInputs:
    """The rollouts of all groups in one flat list of length B, and what each call receives.

    Args:
        groups: Every rollout must have its text.

    Attributes:
        groups: The argument.
        rollouts: All rollouts, in order.
        group_index: Index of each rollout's group.
        has_environments: Whether any rollout has an environment in this process.
    """

    def __init__(self, groups: Iterable[RolloutGroup]) -> None:
        self.groups = list(groups)
        self.rollouts = [rollout for group in self.groups for rollout in group.rollouts]
        self.group_index = [index for index, group in enumerate(self.groups) for _ in group.rollouts]
        live = [rollout.environment for rollout in self.rollouts if rollout.environment is not None]
        self.has_environments = any(environment.value is not None for environment in live)
        self._has_episodes = any(rollout.messages is not None for rollout in self.rollouts)
        self._columns = list(dict.fromkeys(name for group in self.groups for name in group.columns))
        self._of_prompts: dict[tuple[str, int], dict[str, Any]] = {}

    def units(self, reward: PreparedReward, *, by_group: bool) -> list[list[int]]:
        """Return the rollouts of each call: one with verl's signature, otherwise those of a group, or all."""
        indices = range(len(self.rollouts))
        if reward.convention == "verl":
            return [[index] for index in indices]
        units: dict[int, list[int]] = {}
        for index in indices:
            units.setdefault(self.group_index[index] if by_group else 0, []).append(index)
        return list(units.values())

    def arguments(self, reward: PreparedReward, unit: Sequence[int], *, environments: bool = True) -> dict[str, Any]:
        """Return the keyword arguments of one call.

        Args:
            reward: The function.
            unit: The rollouts of the call.
            environments: Whether the function may have the environments.

        Raises:
            ValueError: If the function requires an argument that neither the convention nor a column provides.
        """
        if reward.convention == "verl":
            (index,) = unit
            rollout, group = self.rollouts[index], self.groups[self.group_index[index]]
            text = rollout.text or ""
            if reward.final_answer and rollout.messages is not None:
                text = completion_text(rollout.messages)
            key = (reward.name, self.group_index[index])
            if key not in self._of_prompts:  # once for all rollouts of a prompt
                reference = ground_truth_of(group.columns, reward.ground_truth_column)
                if reference is None and "ground_truth" in reward.required:
                    column = reward.ground_truth_column or "ground_truth, answer, or reward_model with a ground_truth"
                    raise ValueError(
                        f"Reward function {reward.name!r} requires a ground_truth, and the row has only the columns "
                        f"{sorted(group.columns)}; add the column {column}."
                    )
                of_prompt = {
                    "data_source": group.data_source,
                    "solution_str": text,
                    "ground_truth": reference,
                    "extra_info": group.columns.get("extra_info"),
                }
                self._of_prompts[key] = self._taken(reward, of_prompt)
            return self._of_prompts[key] | {"solution_str": text}
        if reward.convention == "groups":
            indices = dict.fromkeys(self.group_index[index] for index in unit)  # each once, in order
            return self._taken(reward, {"groups": [self.groups[index] for index in indices]})
        rollouts = [self.rollouts[index] for index in unit]
        groups = [self.groups[self.group_index[index]] for index in unit]
        prompts = [
            group.prompt if rollout.prompt is None else rollout.prompt
            for group, rollout in zip(groups, rollouts, strict=True)
        ]
        available: dict[str, Any] = {name: [group.columns.get(name) for group in groups] for name in self._columns}
        available |= {
            "prompts": prompts,
            "completions": [_completion(*pair) for pair in zip(prompts, rollouts, strict=True)],
            "completion_ids": [rollout.completion_ids for rollout in rollouts],
        }
        if self._has_episodes:
            available["completion_mask"] = [
                [1] * len(rollout.completion_ids)
                if rollout.loss_mask is None
                else rollout.loss_mask[rollout.num_observation_tokens :]
                for rollout in rollouts
            ]
        if environments and self.has_environments:
            available["environments"] = [rollout.environment for rollout in rollouts]
        return self._taken(reward, available)

    def _taken(self, reward: PreparedReward, available: dict[str, Any]) -> dict[str, Any]:
        """The available arguments that a function takes."""
        if missing := sorted(reward.required - available.keys()):
            raise ValueError(
                f"Reward function {reward.name!r} requires {missing}, and the data has the columns "
                f"{sorted(self._columns)}; add the column, or give the parameter a default."
            )
        if reward.parameters is None:
            return available
        return {name: value for name, value in available.items() if name in reward.parameters}


def _completion(prompt: str | Messages, rollout: Rollout) -> str | Messages:
    if rollout.messages is not None:
        return rollout.messages
    text = rollout.text or ""
    return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]


# Results of a call.

_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def fits_float32(value: float) -> bool:
    """Whether a number is finite in float32."""
    return abs(value) <= _MAX_FLOAT32  # False for NaN


@dataclass  # not frozen, which would take twice as long to create
class Score:
    """A function's score of one rollout; never changed.

    Attributes:
        value: The reward, or the sum of the token or turn rewards; None if the function does not apply, or failed.
        extras: Further numbers to log, by key.
        failed: Whether the function raised, or gave NaN or infinity. Numbers beyond float32, in which advantages are
            computed, count as infinite.
        token_rewards: The reward of each token, None for a token without one; None if the function rewards no tokens.
        turn_rewards: The same for the turns of the completion.
    """

    value: float | None = None
    extras: dict[str, float] = field(default_factory=dict)
    failed: bool = False
    token_rewards: list[float | None] | None = None
    turn_rewards: list[float | None] | None = None


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
    if reward.convention == "verl":
        return [_read_score(reward, result, lengths[0])]
    values = _as_list(result)
    if not isinstance(values, list):
        raise _wrong(reward, f"a {type(result).__name__}", f"a list with one number or None for each of {len(lengths)}")
    if reward.convention == "groups":
        values = [_as_list(value) for value in values]
        given = [len(value) if isinstance(value, list) else type(value).__name__ for value in values]
        expected = [len(group.rollouts) for group in arguments["groups"]]
        if given != expected:
            raise _wrong(reward, f"{given} rewards for groups of {expected} rollouts", "one list per group")
        values = [value for of_group in values for value in of_group]
    if len(values) != len(lengths):
        raise _wrong(reward, f"{len(values)} rewards for {len(lengths)} completions", "one number or None for each")
    return [_read_score(reward, value, length) for value, length in zip(values, lengths, strict=True)]


def _as_list(value: Any) -> Any:
    """Lists, tuples, arrays and tensors as lists; anything else unchanged."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, tuple) else value


def _wrong(reward: PreparedReward, returned: str, instead: str) -> ValueError:
    return ValueError(f"Reward function {reward.name!r} returned {returned}; return {instead}.")


STATISTICS = ("mean", "std", "none", "invalid")


def _read_score(reward: PreparedReward, result: Any, length: int) -> Score:
    """The score of a completion of `length` tokens: from a number, None, a list per token, or a dictionary."""
    if type(result) is float and fits_float32(result):  # shortcut for what most functions return
        return Score(result)
    extras: dict[str, float] = {}
    turns: Any = None
    if isinstance(result, Mapping):
        turns = _as_list(result.get("turns"))
        turns = turns if isinstance(turns, list) else None  # a number is one to log
        if (turns is None) == ("score" not in result):
            keys = "one with the key 'score', or with a list of rewards as 'turns'"
            raise _wrong(reward, f"a dictionary with the keys {list(result)}", keys)
        given = "score" if turns is None else "turns"
        for key, value in result.items():
            number = _as_float(_without_arrays(value))
            if key != given and number is not None and math.isfinite(number):
                extras[f"{key}_" if str(key).rstrip("_") in STATISTICS else metric_name(str(key))] = number
        result = result[given]
    value, rewards = _without_arrays(result, length) if turns is None else turns, None
    if isinstance(value, (list, tuple)):
        if reward.convention == "verl" and isinstance(value, tuple):
            raise _wrong(reward, f"the tuple {value!r}, which is not a score", "a number, or a dictionary with 'score'")
        if turns is None and len(value) != length:
            raise _wrong(
                reward,
                f"{len(value)} rewards for a completion of {length} tokens",
                "one number or None per token of completion_ids, or one number for all",
            )
        numbers = [_number(reward, _without_arrays(number)) for number in value]
        rewards = [None if number is None or math.isnan(number) else number for number in numbers]
        steps = [number for number in rewards if number is not None]
        value = sum(steps) if all(map(fits_float32, steps)) else math.inf
    value = _number(reward, value)
    failed = value is not None and not fits_float32(value)
    own = (rewards, None) if turns is None else (None, rewards)
    return Score(None if failed else value, extras, failed, *own)


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


def _number(reward: PreparedReward, value: Any) -> float | None:
    if value is None:
        return None
    number = _as_float(value)
    if number is None:
        raise _wrong(reward, f"{value!r} of type {type(value).__name__} as a reward", "a number or None")
    return number


def _as_float(value: Any) -> float | None:
    """A number as a float, infinite beyond float64; None for anything else."""
    if not isinstance(value, (Real, Decimal)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


# Metrics.

RewardRow = tuple[Mapping[str, float | None], Sequence[str], Mapping[str, float]]
"""The `rewards`, `failed_rewards` and `reward_numbers` of a rollout."""


def reward_row(rollout: Rollout) -> RewardRow:
    """What metrics of reward functions need from a rollout."""
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


class EnvironmentReward:
    """The result of an environment's `get_reward`; does not apply to episodes in environments of other classes.

    `get_reward` is called when an episode ends. If it fails, the episode has no reward.

    Args:
        name: Name of the environment's class; also the reward's name in metrics.
    """

    stays_in_process = True
    """The rewards are already known."""

    def __init__(self, name: str) -> None:
        self.name = self.__name__ = name

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[Any]]:
        """Return the reward of each rollout; NaN, which counts as a failure, where `get_reward` failed."""

        def reward(rollout: Rollout) -> Any:
            if rollout.environment_name != self.name:
                return None
            numbers = {re.sub("^(score_*)$", r"\1_", key): n for key, n in rollout.environment_numbers.items()}
            return {**numbers, "score": rollout.environment_reward}

        return [[reward(rollout) for rollout in group.rollouts] for group in groups]


class EnvironmentStepReward:
    """What an environment's `get_step_reward` returned, a reward for each turn, as the reward `{class}_steps`.

    Does not apply to episodes in environments of other classes. If `get_step_reward` fails, the episode has no reward.

    Args:
        name: Name of the environment's class.
    """

    stays_in_process = True
    """The rewards are already known."""

    def __init__(self, name: str) -> None:
        self._environment_name, self.__name__ = name, f"{name}_steps"

    def __call__(self, groups: Sequence[RolloutGroup]) -> list[list[Any]]:
        """Return the rewards of each rollout's turns; NaN, a failure, where `get_step_reward` failed."""

        def reward(rollout: Rollout) -> Any:
            if rollout.environment_name != self._environment_name:
                return None
            steps = rollout.environment_step_rewards
            return {"score": math.nan} if any(step != step for step in steps) else {"turns": steps}

        return [[reward(rollout) for rollout in group.rollouts] for group in groups]
