"""Short descriptions of values, names and exceptions for error messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any


def printable(text: str) -> str:
    """The text with escapes for control characters, which a terminal would obey."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def metric_name(text: str) -> str:
    """A name from data as part of a metric's name: `printable`, and one to one."""
    return printable(re.sub(r"\\(?=[xuUntr\\])", r"\\\\", text))


def encodable(text: str) -> str:
    """The text with escapes for what standard output cannot encode, such as emoji in a file on Windows (cp1252)."""
    encoding = output_encoding()
    return text.encode(encoding, "backslashreplace").decode(encoding)


def output_encoding() -> str:
    """The encoding of standard output."""
    return getattr(sys.stdout, "encoding", None) or "utf-8"


def shorten(value: Any, length: int = 80) -> str:
    """The repr of a value, truncated."""
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."


def first_names(names: Sequence[str], limit: int = 3) -> str:
    """The first names and how many more there are, such as `a, b, c and 2 more`; `none` for no names."""
    more = len(names) - limit
    return (", ".join(names[:limit]) or "none") + (f" and {more} more" if more > 0 else "")


def describe_error(error: BaseException, length: int = 2000) -> str:
    """The text of an exception, truncated; its class name if the text is empty or cannot be read."""
    try:
        text = str(error)
    except BaseException:  # a user's __str__ may do anything, even call sys.exit
        text = ""
    return text[:length] or type(error).__name__
