"""Reward functions: their signatures, arguments, weights and results."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from decimal import Decimal
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from pl_grouprl.types import LiveObject, Messages, Rollout, RolloutGroup
from pl_grouprl.utilities.options import check_finite, checked_arguments
from pl_grouprl.utilities.text import metric_name

# Extracts what the model wrote from a completion in either form of TRL's convention.


def completion_text(completion: str | Messages) -> str:
    """Return the model's answer: a string unchanged; of messages, the content of the last assistant message.

    Earlier turns and tool results are not part of the answer. Empty if there is none.
    """
    if isinstance(completion, str):
        return completion
    return next(reversed(_assistant_texts(completion)), "")


def written_text(completion: str | Messages) -> str:
    """Return everything the model wrote: a string unchanged; of messages, the joined contents of the assistant's."""
    return completion if isinstance(completion, str) else "\n".join(_assistant_texts(completion))


def written_ids(completion_ids: Sequence[list[int]], completion_mask: Sequence[list[int]] | None) -> list[list[int]]:
    """Return the tokens of each completion that the model wrote; without a mask, all of them."""
    if completion_mask is None:
        return list(completion_ids)
    return [
        [token for token, bit in zip(ids, mask, strict=True) if bit]
        for ids, mask in zip(completion_ids, completion_mask, strict=True)
    ]


def _assistant_texts(messages: Messages) -> list[str]:
    return [message.get("content") or "" for message in messages if message.get("role") == "assistant"]


# Finds the tokens at which the steps of a completion end.

_BYTES_PER_CHARACTER = 4


def step_ends(token_ids: Sequence[int], tokenizer: Any, separator: str) -> list[int]:
    """Return the index of the last token of each step.

    A step ends at the token that completes `separator`, whatever else that token contains. The last step ends with the
    completion, before its final special tokens. White space and separators alone are not a step: they belong to the
    next one or, at the end of the completion, to none.

    Args:
        token_ids: The completion.
        tokenizer: Decodes the token ids.
        separator: Text that ends a step; not empty.
    """
    length = _length_before_final(token_ids, set(tokenizer.all_special_ids))
    may_complete = _MayComplete(tokenizer, separator[-1])
    window = _BYTES_PER_CHARACTER * len(separator)  # a token has at least one byte
    ends: list[int] = []
    start = blank = 0  # the tokens from `start` to `blank` have no content
    for index in range(length):
        if not may_complete(token_ids[index]):
            continue
        tail = token_ids[max(start, index + 1 - window) : index + 1]
        without, count = (_decode(tokenizer, tokens).count(separator) for tokens in (tail[:-1], tail))
        if count > without:
            if _has_content(tokenizer, token_ids[blank : index + 1], separator):
                ends.append(index)
                start = index + 1
            blank = index + 1
    if _has_content(tokenizer, token_ids[blank:length], separator):
        ends.append(length - 1)
    return ends


def _length_before_final(token_ids: Sequence[int], special: set[int]) -> int:
    """The length of a completion without its final special tokens."""
    length = len(token_ids)
    while length and token_ids[length - 1] in special:
        length -= 1
    return length


class _MayComplete:
    """Whether a token may complete the separator: it has its last character, or part of a multi-byte character."""

    def __init__(self, tokenizer: Any, character: str) -> None:
        self._tokenizer = tokenizer
        self._character = character
        self._known: dict[int, bool] = {}

    def __call__(self, token: int) -> bool:
        if token not in self._known:
            text = _decode(self._tokenizer, [token])
            self._known[token] = self._character in text or "�" in text
        return self._known[token]


def _has_content(tokenizer: Any, token_ids: Sequence[int], separator: str) -> bool:
    return bool(_decode(tokenizer, token_ids).replace(separator, "").strip())


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
    return text


# Reads the results of reward functions into one score per rollout.

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


# Reward functions: their type, weights, and loading from a file.

RewardFunction = Callable[..., Any]
"""A callable with one of three signatures, told apart by the names of its parameters. It may be `async`.

TRL's, called once for all rollouts, returns one number (or None: does not apply) per completion::

    f(prompts, completions, completion_ids, **columns) -> list[float | None]

verl's, called once per rollout, returns a number, or a dictionary whose `score` is the reward::

    compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float | dict

The third is for functions that need token ids and whole groups, such as `ModelReward`. It is called once, with the
`RolloutGroup`s, and returns for each group one number or None per rollout::

    f(groups) -> list[list[float | None]]

Instead of a number, each may return a list (or array, or tensor) with one number per token of the completion, None or
NaN for a token without a reward; or a dictionary whose `score` is either, and whose other numbers are logged.

Every call gets copies of lists, dictionaries and groups; see `pl_grouprl.utilities.describe.private_copy`.

If the object has a method `set_up()`, it is called at least once when a run is set up, so it can load what it needs, or
fail, before the first rollout. A method `check_row(columns)` is then called for each prompt, and raises ValueError if
it cannot score it. An object with a true attribute `stays_in_process` is never sent to worker processes, nor is an
`async` function. In workers, a function is called once per group, so a group's rewards must not depend on other groups.

For an episode, functions see more: see `pl_grouprl.rewards.apply_rewards`. A function of verl's signature with a true
attribute `reads_final_answer` gets the content of the last assistant message as `solution_str`; one with an attribute
`ground_truth_column` gets its reference from that column. A function with a true attribute `needs_time_limit` must run
in workers with a `reward_timeout`. A method `extract_answer(text)`, or `extract_answer(text, columns)`,
returns the answer in a completion as a string, or None, for majority votes; it is called in the training process,
without a time limit.

This is a plain callable type: a Protocol would have to list the columns of every data set, and the parser would refuse
functions in YAML files that do not name them.
"""


class RewardConfigurationError(ValueError):
    """Raised by a reward function that cannot work as configured, whatever the rollouts are.

    It ends the run: the call is not retried, and does not count towards `max_failed_share`.
    """


@checked_arguments
@dataclass
class Weighted:
    """A reward function with its weight in the combined reward.

    Attributes:
        function: The reward function.
        weight: Factor in the weighted sum; 0 logs the function but leaves it out of the reward.
        name: Name in metrics and in `Rollout.rewards`; by default the function's own name. A lambda, which has none, is
            named by its position in the list, from `reward_1`.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        check_finite(**{"Weighted.weight": self.weight})


@checked_arguments
class FunctionFromFile:
    """A reward function loaded from a file by name, as with verl's `custom_reward_function`.

    The file is executed on construction, so it must be as trusted as the configuration itself.

    Args:
        path: A Python file; relative paths start at the working directory.
        name: Name of a function (or of any other callable) in that file.
        kwargs: Passed to the function in every call (verl's `reward_kwargs`).

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If the file defines no callable of that name, or `kwargs` are for something else than a function.
    """

    def __init__(self, path: str, name: str = "compute_score", kwargs: dict[str, Any] | None = None) -> None:
        self.kwargs = kwargs
        self.path = path
        self.name = name
        file = Path(path).expanduser()
        if not file.is_file():
            raise FileNotFoundError(
                f"FunctionFromFile(path={path!r}): no such file; pass the path of a Python file, absolute or "
                f"relative to the working directory ({Path.cwd()})."
            )
        function = getattr(_run_file(file.resolve()), name, None)
        if not callable(function):
            raise ValueError(
                f"FunctionFromFile(path={path!r}, name={name!r}): the file defines no callable of that name; "
                "pass the name of a function at its top level."
            )
        if kwargs and not inspect.isfunction(function):
            raise ValueError(
                f"FunctionFromFile(path={path!r}, name={name!r}, kwargs={kwargs}): {name} is not a function; give its "
                "options to it in the file."
            )
        if kwargs:
            _check_kwargs(function, kwargs)
        self.function: RewardFunction = functools.partial(function, **kwargs) if kwargs else function
        self._sha256 = hashlib.sha256(file.read_bytes()).hexdigest()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function of the file."""
        return self.function(*args, **kwargs)

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        return FunctionFromFile, (self.path, self.name, self.kwargs)

    def run_options(self) -> dict[str, Any]:
        """What decides its rewards, wherever the file is: the function's name and `kwargs`, a digest of the file."""
        options = {"function": self.name, "sha256": self._sha256}
        return options | ({"kwargs": self.kwargs} if self.kwargs else {})


def _check_kwargs(function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    try:
        inspect.signature(function).bind_partial(**kwargs)
    except TypeError as error:
        raise ValueError(
            f"FunctionFromFile(kwargs={kwargs}): {function.__name__}{inspect.signature(function)}: {error}."
        ) from None


def reward_name(function: RewardFunction) -> str | None:
    """Return a function's name in metrics: its own, or that of its class; None for a lambda."""
    if isinstance(function, FunctionFromFile):
        return function.name
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        return None
    return name if isinstance(name, str) and name else type(function).__name__


def hook_of(function: RewardFunction, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a reward function, such as `set_up`; looks through `FunctionFromFile`."""
    target = function.function if isinstance(function, FunctionFromFile) else function
    found = getattr(target, name, None)
    return found if callable(found) else None


def as_weighted(rewards: Sequence[Any] | Weighted | RewardFunction) -> list[Weighted]:
    """Normalize one or several reward functions, weighted or not, to weighted functions with names.

    Raises:
        ValueError: If the list is empty or two functions share a name.
        TypeError: If something in the list is not a reward function.
    """
    items = list(rewards) if isinstance(rewards, Sequence) else [rewards]
    if not items:
        raise ValueError("rewards is empty; pass at least one reward function.")
    weighted = [item if isinstance(item, Weighted) else Weighted(item) for item in items]
    for item in weighted:
        _check_callable(item.function)
    named = [
        Weighted(item.function, item.weight, item.name or reward_name(item.function) or f"reward_{number}")
        for number, item in enumerate(weighted, start=1)
    ]
    names = [item.name for item in named]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"rewards has {names.count(name)} functions named {name!r}, whose metrics would overwrite each other; "
                "give them different names with Weighted(function, name=...)."
            )
    return named


def _check_callable(function: RewardFunction) -> None:
    if inspect.isclass(function):
        raise TypeError(
            f"rewards contains the class {function.__qualname__}; pass an instance of it "
            "(in YAML: a `class_path` entry instead of the bare name)."
        )
    if not callable(function):
        raise TypeError(
            f"rewards contains {function!r} of type {type(function).__name__}; pass a function, an object with "
            "__call__, Weighted(function, weight), or FunctionFromFile(path, name)."
        )


def _run_file(file: Path) -> ModuleType:
    """Run a Python file as a module that cannot be imported by name."""
    spec = importlib.util.spec_from_file_location(f"pl_grouprl_reward_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"FunctionFromFile(path={str(file)!r}): not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations in the file look up their module while the file runs.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# The three signatures of reward functions: which one a function has, and its arguments.

Convention = Literal["trl", "verl", "groups"]

_NO_ENVIRONMENTS = (
    " `environments` are those of an environment_factory, in the training process: leave tool_workers, "
    "reward_workers and max_staleness at 0."
)

_OF_TRL_TRAINER = ("trainer_state", "log_extra", "log_metric")
"""What TRL's trainer passes to reward functions besides columns."""


@dataclass
class RewardInputs:
    """The rollouts of all groups in one flat list, as reward functions see them.

    Attributes:
        prompts: Prompt of each rollout, length B: a string or messages, with the observation of its environment.
        texts: Decoded completion of each rollout; an episode's includes tool results.
        completion_ids: Tokens of each completion.
        data_sources: Name of each prompt's data set.
        columns: Every column of the data, one value per rollout; None if the prompt's row lacks it.
        groups: Group of each rollout, numbered from 0.
        rollout_groups: The groups themselves.
        of_prompts: Cached arguments about a prompt for functions of verl's signature, by function name and group.
        messages: Completion of each rollout as messages; None for one that is not an episode.
        completion_masks: For each token of each completion, 1 if the model wrote it; None if there are no episodes.
        environments: The environment of each rollout; None if there are none in this process.
    """

    prompts: list[str | Messages]
    texts: list[str]
    completion_ids: list[list[int]]
    data_sources: list[str]
    columns: dict[str, list[Any]]
    groups: list[int]
    rollout_groups: list[RolloutGroup] = field(default_factory=list)
    of_prompts: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    messages: list[Messages | None] = field(default_factory=list)
    completion_masks: list[list[int]] | None = None
    environments: list[LiveObject | None] | None = None


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
        final_answer: Its attribute `reads_final_answer`.
        names_environments: Whether it has a parameter `environments`.
        needs_time_limit: Its attribute `needs_time_limit`.
        ground_truth_column: Its attribute `ground_truth_column`.
    """

    function: RewardFunction
    name: str
    weight: float
    convention: Convention
    parameters: frozenset[str] | None
    required: frozenset[str]
    is_async: bool
    in_process: bool
    final_answer: bool = False
    names_environments: bool = False
    needs_time_limit: bool = False
    ground_truth_column: str | None = None


def prepare_reward(weighted: Weighted) -> PreparedReward:
    """Determine the signature of a named function by its parameters.

    With `solution_str` it is verl's; with `completions`, or `**kwargs` alone, TRL's; with `groups`, that of whole
    groups.

    Raises:
        ValueError: If it is none of these.
    """
    function, name = weighted.function, weighted.name or ""
    if isinstance(function, FunctionFromFile):  # kept as the callable: it can be pickled, the function cannot
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
            f"Reward function {name!r} has the signature {signature}, which is not one of the known ones; write "
            "f(prompts, completions, **columns) -> list[float | None] (TRL), "
            "f(data_source, solution_str, ground_truth, extra_info=None) -> float | dict (verl) or "
            "f(groups) -> list[list[float | None]]. Instead of a number, it may return a list with one per token."
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
        final_answer=getattr(function, "reads_final_answer", False),
        names_environments="environments" in by_name,
        needs_time_limit=getattr(function, "needs_time_limit", False),
        ground_truth_column=getattr(function, "ground_truth_column", None),
    )


def check_environments(rewards: Sequence[PreparedReward]) -> None:
    """Refuse reward workers for functions that take environments, which live in this process.

    Raises:
        ValueError: Names the functions.
    """
    if stranded := [reward.name for reward in rewards if reward.names_environments and not reward.in_process]:
        raise ValueError(
            f"The reward functions {stranded} take `environments`, which live in this process, and reward_workers "
            "would run them in another; set reward_workers to 0, or set `stays_in_process = True` on each."
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
    rollouts = [rollout for _, _, rollout in pairs]
    names = {name: None for group in groups for name in group.columns}  # a dictionary keeps the order
    return RewardInputs(
        prompts=[group.prompt if rollout.prompt is None else rollout.prompt for _, group, rollout in pairs],
        texts=[rollout.text or "" for rollout in rollouts],
        completion_ids=[rollout.completion_ids for rollout in rollouts],
        data_sources=[group.data_source for _, group, _ in pairs],
        columns={name: [group.columns.get(name) for _, group, _ in pairs] for name in names},
        groups=[index for index, _, _ in pairs],
        rollout_groups=list(groups),
        messages=[rollout.messages for rollout in rollouts],
        completion_masks=_completion_masks(rollouts),
        environments=_environments(rollouts),
    )


def _completion_masks(rollouts: Sequence[Rollout]) -> list[list[int]] | None:
    if all(rollout.messages is None for rollout in rollouts):
        return None
    return [
        [1] * len(rollout.completion_ids)
        if rollout.loss_mask is None
        else rollout.loss_mask[rollout.num_observation_tokens :]
        for rollout in rollouts
    ]


def _environments(rollouts: Sequence[Rollout]) -> list[LiveObject | None] | None:
    environments = [rollout.environment for rollout in rollouts]
    return (
        environments
        if any(environment is not None and environment.value is not None for environment in environments)
        else None
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
    """Split a failed call into one call per group, so a single bad completion costs only its group."""
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
    text, messages = inputs.texts[index], inputs.messages[index]
    if reward.final_answer and messages is not None:
        text = completion_text(messages)
    of_prompt = (reward.name, inputs.groups[index])  # computed once for all rollouts of a prompt
    if of_prompt not in inputs.of_prompts:
        inputs.of_prompts[of_prompt] = _taken(reward, inputs, _verl_arguments(reward, inputs, index))
    return inputs.of_prompts[of_prompt] | {"solution_str": text}


def _taken(reward: PreparedReward, inputs: RewardInputs, available: dict[str, Any]) -> dict[str, Any]:
    """The available arguments that a function takes.

    Raises:
        ValueError: If a required one is missing.
    """
    missing = sorted(reward.required - available.keys())
    if missing:
        raise ValueError(
            f"Reward function {reward.name!r} requires {missing}, and the data has the columns "
            f"{sorted(inputs.columns)}; {_remedy(missing)}"
        )
    if reward.parameters is None:
        return available
    return {key: value for key, value in available.items() if key in reward.parameters}


def _remedy(missing: Sequence[str]) -> str:
    of_trainer = [name for name in missing if name in _OF_TRL_TRAINER]
    if of_trainer:
        return f"TRL's {', '.join(of_trainer)} are not passed: give the parameters a default."
    add = "add the column, or give the parameter a default."
    return add + (_NO_ENVIRONMENTS if "environments" in missing else "")


def _groups_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    numbers = dict.fromkeys(inputs.groups[index] for index in unit)  # each once, in order
    return {"groups": [inputs.rollout_groups[number] for number in numbers]}


def _trl_arguments(inputs: RewardInputs, unit: list[int]) -> dict[str, Any]:
    columns = {name: [values[index] for index in unit] for name, values in inputs.columns.items()}
    available = columns | {
        "prompts": [inputs.prompts[index] for index in unit],
        "completions": [_completion(inputs, index) for index in unit],
        "completion_ids": [inputs.completion_ids[index] for index in unit],
    }
    of_episodes = {"completion_mask": inputs.completion_masks, "environments": inputs.environments}
    return available | {
        name: [values[index] for index in unit] for name, values in of_episodes.items() if values is not None
    }


def _completion(inputs: RewardInputs, index: int) -> str | Messages:
    messages, text = inputs.messages[index], inputs.texts[index]
    if messages is not None:
        return messages
    return text if isinstance(inputs.prompts[index], str) else [{"role": "assistant", "content": text}]


def _verl_arguments(reward: PreparedReward, inputs: RewardInputs, index: int) -> dict[str, Any]:
    columns = {name: values[index] for name, values in inputs.columns.items()}
    return {
        "data_source": inputs.data_sources[index],
        "solution_str": inputs.texts[index],
        "ground_truth": _ground_truth(reward, columns),
        "extra_info": columns.get("extra_info"),
    }


def _ground_truth(reward: PreparedReward, columns: Mapping[str, Any]) -> Any:
    found = ground_truth_of(columns, reward.ground_truth_column)
    if found is not None or "ground_truth" not in reward.required:
        return found
    wanted = "reward_model.ground_truth (verl), or a column `ground_truth` or `answer`"
    raise ValueError(
        f"Reward function {reward.name!r} requires a ground_truth, and the row has only the columns "
        f"{sorted(columns)}; add {wanted if reward.ground_truth_column is None else repr(reward.ground_truth_column)}."
    )


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


def _is_async(function: RewardFunction) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


# The reward that an environment assigns to its episode.


@checked_arguments
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
        return [[self._reward(rollout) for rollout in group.rollouts] for group in groups]

    def _reward(self, rollout: Rollout) -> Any:
        if rollout.environment_name != self.name:
            return None
        numbers = rollout.environment_numbers
        if not numbers:
            return rollout.environment_reward
        renamed = {re.sub("^(score_*)$", r"\1_", key): number for key, number in numbers.items()}
        return renamed | {"score": rollout.environment_reward}
