"""Reward functions: their type, weights, and loading from a file."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_finite

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

Every call gets copies of lists, dictionaries and groups; see `pl_grouprl.utilities.copying.private_copy`.

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
