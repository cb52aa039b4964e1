"""Hashes the data; equal rows give the same hash in every process."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.data.sources import SourceRow


def digest_rows(rows: Sequence[SourceRow]) -> str:
    """Hash all columns of all rows, in order, but not the files and lines they came from.

    Nothing is decoded: images and videos are hashed by their bytes or paths, decoded images by size and mode, and any
    other object by its class.

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
        return {f"{type(name).__name__} {name}": _with_text_names(inner) for name, inner in value.items()}
    return [_with_text_names(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _describe(value: Any) -> Any:
    """Replace an object that JSON cannot encode."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # NumPy arrays and numbers
        return [kind, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if type(value).__module__ in ("datetime", "decimal", "uuid", "pathlib", "fractions"):
        return [kind, str(value)]
    return [kind, *(str(getattr(value, name, "")) for name in ("size", "mode", "filename"))]


_ENCODER = json.JSONEncoder(sort_keys=True, default=_describe)
