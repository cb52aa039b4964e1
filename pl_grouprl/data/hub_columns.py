"""Derived columns of `HubDataset`: answers extracted by patterns, prompts filled into templates.

Errors name the option of `HubDataset` to correct.
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.types import Messages
from pl_grouprl.utilities.text import shorten


def compile_pattern(column: str, pattern: str) -> re.Pattern[str]:
    """Compile the pattern of a column in the option `extract`.

    Raises:
        ValueError: If it is not a regular expression.
    """
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"HubDataset.extract has {pattern!r} for {column!r}, not a regular expression ({error}); correct it."
        ) from error


def last_match(pattern: re.Pattern[str], value: Any, where: str) -> str:
    """The last match of a pattern in a value, or the first group of that match; stripped.

    Args:
        pattern: From `compile_pattern`.
        value: The value of a column; anything but a string has no match.
        where: Row and column, for the error.

    Raises:
        ValueError: If there is no match.
    """
    matches = list(pattern.finditer(value)) if isinstance(value, str) else []
    found = matches[-1].group(1 if pattern.groups else 0) if matches else None
    if found is None:
        raise ValueError(
            f"{where} is {shorten(value)}, which extract does not match with {pattern.pattern!r}; correct the "
            "pattern or the row."
        )
    return found.strip()


class PromptTemplates:
    """Writes prompts by the option `messages`.

    Args:
        messages: Templates of the messages, with column names in braces.

    Attributes:
        columns: Names of the columns that the templates use.

    Raises:
        ValueError: If there is no message, one lacks role or content, or its braces do not name columns.
    """

    def __init__(self, messages: Sequence[Mapping[str, str]]) -> None:
        if not messages:
            raise ValueError("HubDataset.messages is empty; pass at least one message, or leave it out.")
        self._messages = messages
        self.columns: set[str] = set()
        for message in messages:
            if set(message) != {"role", "content"}:
                raise ValueError(f"HubDataset.messages has {shorten(message)}; each message has 'role' and 'content'.")
            self.columns.update(_columns_in(message["content"]))

    def fill_in(self, row: Mapping[str, Any], where: str) -> Messages:
        """Write the prompt of a row.

        Args:
            row: The columns.
            where: The row's origin, for errors.

        Raises:
            ValueError: If one of the `columns` is null, or its value does not fit a template.
        """
        missing = [name for name in sorted(self.columns) if row[name] is None]
        if missing:
            raise ValueError(f"{where}: column {missing[0]!r} is null, and messages need it; remove the row.")
        try:
            return [{"role": turn["role"], "content": turn["content"].format_map(row)} for turn in self._messages]
        except (ValueError, TypeError, KeyError) as error:  # a format such as {number:.2f} that does not fit the value
            raise ValueError(f"{where}: messages cannot be filled in ({error}); correct them or the row.") from error


def _columns_in(template: str) -> list[str]:
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(template) if field is not None]
    except ValueError as error:
        fields = [str(error)]
    wrong = [field for field in fields if not field.isidentifier()]
    if wrong:
        raise ValueError(
            f"HubDataset.messages has {shorten(template)}, where braces do not contain the name of a column "
            f"({wrong[0]!r}); write {{{{ and }}}} for literal braces."
        )
    return fields
