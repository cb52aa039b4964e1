"""Checks of options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def check_options(checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuse options that are out of range.

    Args:
        checks: By name, the value, whether it is valid, and what it must be.

    Raises:
        ValueError: With the name, the value and what it must be.
    """
    for name, (value, valid, range_) in checks.items():
        if not valid:
            raise ValueError(f"{name} is {value!r}; it must be {range_}.")
