"""Checks of options."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def check_options(checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuse options that are out of range, and any number that is not finite.

    Args:
        checks: By name, the value, whether it is valid, and what it must be.

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
