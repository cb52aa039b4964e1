"""Checks of options."""

from __future__ import annotations

import json
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


def differing_options(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say which options that both runs know have other values now, and which; tuples and lists are the same."""

    def plain(value: Any) -> Any:
        return json.loads(json.dumps(value))

    both = [name for name in then if name in now]
    return [f"{name} is {now[name]!r} (there {then[name]!r})" for name in both if plain(then[name]) != plain(now[name])]
