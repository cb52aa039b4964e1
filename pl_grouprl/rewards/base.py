"""What a reward function is, how several are weighted, and how one is named by file path."""

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

The third is for functions that need token ids and handle prompts shared by several rollouts, such as `ModelReward`. It
is called once, with the `RolloutGroup`s, and returns for each group one number or None per rollout::

    f(groups) -> list[list[float | None]]

In place of a number, each of them may return a list (an array, a tensor) with one number per token of the completion,
None or NaN for a token without a reward; or a dictionary whose `score` is either, and whose other numbers are logged.

Every call gets copies of lists, dictionaries and groups; see `pl_grouprl.utilities.copying.private_copy`.

If the object has a method `set_up()`, it is called when a run is set up, and perhaps again: whatever must be loaded is
then loaded, or refused, before the first rollout. A method `check_row(columns)` is then called for each prompt, and
raises ValueError if it cannot score it. An object with a true attribute `stays_in_process` is never sent to worker
processes, nor is an `async` function; every other one must then give a group's rewards whatever the other groups are,
since workers call it once per group.

For an episode, functions see more: see `pl_grouprl.rewards.apply_rewards`. A function of verl's signature with a true
attribute `reads_final_answer` gets the content of the last assistant message as `solution_str`; one with an attribute
`ground_truth_column` gets its reference from that column. A run refuses a function with a true attribute
`needs_time_limit` unless workers run it with a `reward_timeout`. A method `extract_answer(text)`, or
`extract_answer(text, columns)`, returns the answer in a completion as a string, or None, for majority votes over
completions; it is called in the training process, without a time limit.

This is a plain callable type: a Protocol would have to list the columns of every data set, and a function read from
a YAML file would be refused for not naming them.
"""


class RewardConfigurationError(ValueError):
    """A reward function that cannot work as it is configured, whatever the rollouts are.

    It ends the run: it is not tried again, and not counted among the failures that `max_failed_share` allows.
    """


@checked_arguments
@dataclass
class Weighted:
    """A reward function together with its share in the combined reward.

    Attributes:
        function: The reward function.
        weight: Factor in the weighted sum. 0 logs the function and leaves it out of the reward.
        name: Name in metrics and in `Rollout.rewards`; the function's own name by default, and `reward_1` for a lambda,
            which has none, that is the first in the list.
    """

    function: RewardFunction
    weight: float = 1.0
    name: str | None = None

    def __post_init__(self) -> None:
        check_finite(**{"Weighted.weight": self.weight})


@checked_arguments
class FunctionFromFile:
    """A reward function named by file and function, as in verl's `custom_reward_function`.

    The file is run when the object is made: it is code of the person who wrote the configuration.

    Args:
        path: A Python file. Relative paths start at the working directory.
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
                f"FunctionFromFile(path={path!r}): no such file; give the path of a Python file, absolute or "
                f"relative to the working directory ({Path.cwd()})."
            )
        function = getattr(_run_file(file.resolve()), name, None)
        if not callable(function):
            raise ValueError(
                f"FunctionFromFile(path={path!r}, name={name!r}): the file defines no callable of that name; "
                "give the name of a function at its top level."
            )
        if kwargs and not inspect.isfunction(function):
            raise ValueError(
                f"FunctionFromFile(path={path!r}, name={name!r}, kwargs={kwargs}): {name} is not a function; give its "
                "options to it in the file."
            )
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


def reward_name(function: RewardFunction) -> str | None:
    """Return the name that metrics show for a function: its own, or that of its class. None for a lambda."""
    if isinstance(function, FunctionFromFile):
        return function.name
    if isinstance(function, functools.partial):
        return reward_name(function.func)
    name = getattr(function, "__name__", None)
    if name == "<lambda>":
        return None
    return name if isinstance(name, str) and name else type(function).__name__


def hook_of(function: RewardFunction, name: str) -> Callable[..., Any] | None:
    """Return an optional method of a reward function, such as `set_up`; also for one defined in a file."""
    own = function.function if isinstance(function, FunctionFromFile) else function
    found = getattr(own, name, None)
    return found if callable(found) else None


def as_weighted(rewards: Sequence[Weighted | RewardFunction] | Weighted | RewardFunction) -> list[Weighted]:
    """Bring a reward function, or a list of them, weighted or not, into one form: weighted and named.

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
                "name them apart with Weighted(function, name=...)."
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
    """Run a Python file as a module of its own, without making it importable by name."""
    spec = importlib.util.spec_from_file_location(f"pl_grouprl_reward_file_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"FunctionFromFile(path={str(file)!r}): not a Python file; its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and annotations in the file look their module up while the file runs.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
