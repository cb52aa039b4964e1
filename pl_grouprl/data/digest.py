"""Hashes the data; equal rows give the same hash in every process."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

from pl_grouprl.data.sources import SourceRow
from pl_grouprl.utilities.copying import field_values
from pl_grouprl.utilities.describe import array_facts, ordered

_TEXTS = ("datetime", "decimal", "enum", "fractions", "pathlib", "uuid")
"""Modules whose classes, and subclasses of them, are known by their text."""


def digest_rows(rows: Sequence[SourceRow]) -> str:
    """Hash all columns of all rows, in order, but not the files and lines they came from.

    Nothing is decoded: images and videos are hashed by their bytes or paths, an image that was opened and not read by
    its name, size and mode. Arrays, tensors, sets, dataclasses and images in memory are hashed by their contents, and
    any other object by its class.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        ValueError: If a row is nested too deeply. Names it.
    """
    digest = hashlib.sha256()
    for where, values in rows:
        try:
            text = _encode(values)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{where}: nested too deeply, or within itself ({error}); correct the row.") from error
        digest.update(text.encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """Convert a value to lists, dictionaries, numbers and strings."""
    return json.loads(_encode(value))


def _encode(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except TypeError:  # keys that are not strings, or cannot be sorted
        return _ENCODER.encode(_with_text_names(value))


def _with_text_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(name).__name__} {ordered(name)}": _with_text_names(inner) for name, inner in value.items()}
    return [_with_text_names(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _describe(value: Any) -> Any:
    """Replace an object that JSON cannot encode."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, (set, frozenset)):
        return [kind, sorted(map(_encode, value))]
    if isinstance(value, (complex, range)):
        return [kind, repr(value)]
    if isinstance(value, re.Pattern):
        return [kind, value.pattern, value.flags]
    if is_dataclass(value) and not isinstance(value, type):
        return [kind, field_values(value)]
    if (array := array_facts(value)) is not None:
        return [kind, *array]
    if any(base.__module__ in _TEXTS for base in type(value).__mro__):
        return [kind, str(value)]
    parts = (getattr(value, name, "") for name in ("size", "mode", "filename"))
    in_memory = hasattr(value, "tobytes") and getattr(value, "fp", None) is None  # a PIL image
    pixels = [hashlib.sha256(value.tobytes()).hexdigest()] if in_memory else []
    return [kind, *(str(part) for part in parts if not callable(part)), *pixels]


_ENCODER = json.JSONEncoder(sort_keys=True, default=_describe)
