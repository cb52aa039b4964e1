"""Reads the option `tasks` of `ReasoningGym`, and distributes rows over tasks and levels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def read_tasks(tasks: str | list[str] | dict[str, Any], levels: int | None) -> dict[str, dict[str, Any]]:
    """Check the option `tasks`, and normalize it.

    Args:
        tasks: A name, a list of names, or a mapping of names to options, as in `ReasoningGym`.
        levels: Number of levels to take from the library's curriculum; None uses the levels listed in the options.

    Returns:
        For each name, its `weight` and its `configs`: the options of each level, without the weight.

    Raises:
        ValueError: If they are malformed, or tasks differ in their number of levels.
    """
    if isinstance(tasks, str):
        tasks = [tasks]
    if isinstance(tasks, list):
        if len(set(tasks)) < len(tasks):
            raise ValueError(f"ReasoningGym.tasks is {tasks}; name each task once.")
        tasks = {name: {} for name in tasks}
    if not tasks:
        raise ValueError("ReasoningGym.tasks is empty; name at least one task.")
    read = {name: _read_task(name, options) for name, options in tasks.items()}
    _check_levels({name: len(task["configs"]) for name, task in read.items()}, levels)
    return read


def divide(total: int, weights: Sequence[float]) -> list[int]:
    """Distribute rows in proportion to weights, at least one each; all 0 if there are no rows.

    Args:
        total: Number of rows; 0, or at least as many as weights.
        weights: Larger than 0.
    """
    if total == 0:
        return [0] * len(weights)
    exact = [(total - len(weights)) * weight / sum(weights) for weight in weights]  # beyond the first row of each
    shares = [1 + int(share) for share in exact]
    largest_remainders = sorted(range(len(weights)), key=lambda i: int(exact[i]) - exact[i])
    for i in largest_remainders[: total - sum(shares)]:
        shares[i] += 1
    return shares


def _check_levels(listed: dict[str, int], levels: int | None) -> None:
    """Refuse tasks with different numbers of levels, or with levels from two sources.

    Args:
        listed: Number of levels in each task's options.
        levels: As for `read_tasks`.
    """
    if levels is not None and levels < 1:
        raise ValueError(f"ReasoningGym.levels is {levels}; it must be at least 1.")
    different = set(listed.values())
    if len(different) > 1 or (levels is not None and different != {1}):
        raise ValueError(
            f"ReasoningGym.tasks has these numbers of levels: {listed}, with levels={levels}; list the same number of "
            "levels for every task, or set `levels` and list none."
        )


def _read_task(name: str, options: Any) -> dict[str, Any]:
    configs = options if isinstance(options, list) else [options or {}]
    if not configs or not all(isinstance(config, Mapping) for config in configs):
        raise ValueError(
            f"ReasoningGym.tasks: the options of {name!r} are {options!r}; write a mapping, or a list of them."
        )
    weights = {config.get("weight", 1) for config in configs}
    if len(weights) > 1 or not isinstance(weight := weights.pop(), int | float) or not weight > 0:
        raise ValueError(f"ReasoningGym.tasks: the weight of {name!r} must be one number larger than 0: {options!r}.")
    if reserved := [key for key in ("seed", "size") for config in configs if key in config]:
        raise ValueError(
            f"ReasoningGym.tasks: {reserved[0]!r} of {name!r} is ReasoningGym's own option; set it there for all tasks."
        )
    return {
        "weight": weight,
        "configs": [{key: value for key, value in config.items() if key != "weight"} for config in configs],
    }
