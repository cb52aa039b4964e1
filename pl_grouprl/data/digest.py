"""A digest of data: the same in every process as long as the rows are the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.data.sources import SourceRow


def digest_rows(rows: Sequence[SourceRow]) -> str:
    """Hash all columns of all rows, in order; their files and lines do not count.

    Images and videos count by their bytes or paths. A decoded image counts by its size and mode, and an object of
    another kind by its class: neither is read for this.

    Returns:
        SHA-256 in hexadecimal.

    Raises:
        ValueError: If a row is nested too deep. Names it.
    """
    digest = hashlib.sha256()
    for where, values in rows:
        try:
            text = _encode(values)
        except (RecursionError, ValueError) as error:
            raise ValueError(f"{where}: nested too deep or within itself ({error}); correct the row.") from error
        digest.update(text.encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()


def plain(value: Any) -> Any:
    """A value in lists, dictionaries, numbers and strings only."""
    return json.loads(_encode(value))


def _encode(value: Any) -> str:
    try:
        return _ENCODER.encode(value)
    except TypeError:  # names that are no strings, or cannot be sorted
        return _ENCODER.encode(_with_text_names(value))


def _with_text_names(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {f"{type(name).__name__} {name}": _with_text_names(inner) for name, inner in value.items()}
    return [_with_text_names(inner) for inner in value] if isinstance(value, (list, tuple)) else value


def _describe(value: Any) -> Any:
    """What stands for an object that JSON does not know."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ["bytes", hashlib.sha256(value).hexdigest()]
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if hasattr(value, "tobytes") and hasattr(value, "dtype"):  # arrays and numbers of NumPy
        return [kind, str(value.dtype), list(value.shape), hashlib.sha256(value.tobytes()).hexdigest()]
    if type(value).__module__ in ("datetime", "decimal", "uuid", "pathlib", "fractions"):
        return [kind, str(value)]
    return [kind, *(str(getattr(value, name, "")) for name in ("size", "mode", "filename"))]


_ENCODER = json.JSONEncoder(sort_keys=True, default=_describe)
