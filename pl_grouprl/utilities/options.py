"""Helpers for options: range checks, merging, and leaving out those that are not set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_options(checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuse options that are out of range, and any number that is not finite.

    Args:
        checks: For each option by name: its value, whether that is valid, and what it must be.

    Raises:
        ValueError: Gives the name, the value and what it must be.
    """
    for name, (value, valid, range_) in checks.items():
        finite = "finite, and " if valid and "finite" not in range_ else ""
        if not valid or not is_finite(value):
            raise ValueError(f"{name} is {value!r}; it must be {finite}{range_}.")


def check_finite(**options: Any) -> None:
    """Refuse numbers that are NaN or infinite.

    Raises:
        ValueError: Gives the name and the value.
    """
    check_options({name: (value, True, "a finite number") for name, value in options.items()})


def is_finite(value: Any) -> bool:
    """False for NaN, infinity, and containers of them."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def drop_none(**options: Any) -> dict[str, Any]:
    """Leave out options that are None, so an option that a loss does not know is an error only if it was set."""
    return {name: value for name, value in options.items() if value is not None}


def join_options(options: dict[str, Any], more: dict[str, Any] | None, argument: str) -> dict[str, Any]:
    """Merge constructor arguments with the mapping that holds all further options.

    Args:
        options: The constructor arguments.
        more: The further options; None for none.
        argument: The name of that mapping, for the error.

    Raises:
        ValueError: If an option is in both.
    """
    for name, value in (more or {}).items():
        if name in options:
            raise ValueError(
                f"{name} is set twice, as {options[name]!r} and in {argument} as {value!r}; leave one of them out."
            )
    return options | (more or {})
