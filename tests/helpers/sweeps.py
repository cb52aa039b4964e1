"""Which parameters of a sweep the fast tests run."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def sweep(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """All values, for `pytest.mark.parametrize`; those that are not `quick` are marked slow."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} are not among the values {values}"
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]


def sweep_pairs(values: Iterable[tuple[Any, ...]], quick: Collection[tuple[Any, ...]]) -> list[Any]:
    """The same for several arguments at once, given as tuples."""
    values = list(values)
    unknown = [value for value in quick if value not in values]
    assert not unknown, f"{unknown} are not among the values {values}"
    return [pytest.param(*value, marks=() if value in quick else pytest.mark.slow) for value in values]
