"""Checks that apply to every row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pl_grouprl.utilities.text import shorten

_ARGUMENTS = ("prompts", "completions", "completion_ids")
"""Arguments passed to reward functions with TRL's signature in addition to the columns."""


def check_values(values: Any, where: str) -> None:
    """Check that a row has named columns and that its texts are Unicode.

    Args:
        values: The row.
        where: The row's origin, for the error.

    Raises:
        ValueError: If it is not a mapping, a column name is not a string, or a text has a lone surrogate.
    """
    if not isinstance(values, Mapping):
        raise ValueError(
            f'{where}: a row must be an object with columns, not {type(values).__name__}; write {{"prompt": ..., ...}}.'
        )
    for name, value in values.items():
        if not isinstance(name, str):
            raise ValueError(f"{where}: a column has the name {name!r}; names must be strings.")
        broken = _broken_text(name) or _broken_text(value)
        if broken:
            raise ValueError(
                f"{where}: column {name!r} has the code point {broken}, half of a surrogate pair, which is not a "
                "character and cannot be encoded; correct the row or the program that wrote it."
            )


def check_columns_of(values: Mapping[str, Any], prompt_column: str, where: str) -> None:
    """Check the columns with a special meaning, other than the prompt.

    Args:
        values: The row.
        prompt_column: The prompt's column, which is not checked.
        where: The row's origin, for the error.

    Raises:
        ValueError: If one cannot be passed to reward functions as intended.
    """
    taken = [name for name in _ARGUMENTS if name in values and name != prompt_column]
    if taken:
        raise ValueError(
            f"{where}: the column {taken[0]!r} has the name of an argument of reward functions; rename it."
        )
    source = values.get("data_source")
    if source is not None and not isinstance(source, (str, int)):
        raise ValueError(f"{where}: column 'data_source' is {source!r}; it must be a name, or null.")
    model = values.get("reward_model")
    if model is not None and not isinstance(model, Mapping):
        raise ValueError(
            f"{where}: column 'reward_model' is {shorten(model)}; it must be a mapping such as "
            "{'ground_truth': ...}; correct it, or rename the column."
        )
    references = {name: values.get(name) for name in ("ground_truth", "answer")}
    references["reward_model.ground_truth"] = (model or {}).get("ground_truth")
    for name, reference in references.items():
        if isinstance(reference, float) and math.isnan(reference):
            raise ValueError(f"{where}: {name!r} is NaN, which is not a reference; write the answer, or null for none.")


def _broken_text(value: Any) -> str | None:
    """The first code point anywhere in a value that UTF-8 cannot encode."""
    found, seen = [value], set()  # a row in memory may contain itself
    while found:
        value = found.pop()
        if isinstance(value, str):
            if not value.isascii() and (broken := _surrogate(value)):
                return broken
        elif isinstance(value, (Mapping, list, tuple)) and id(value) not in seen:
            seen.add(id(value))
            found += [*value.keys(), *value.values()] if isinstance(value, Mapping) else value
    return None


def _surrogate(text: str) -> str | None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"U+{ord(text[error.start]):04X}"
    return None
