"""Encodes entries of reasoning-gym as JSON text, which survives file formats and process boundaries unchanged."""

from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from typing import Any

_KIND, _ITEMS = "__kind__", "__items__"


def encode_entry(entry: Mapping[str, Any]) -> str:
    """Write an entry as JSON, with markers for tuples and for dictionaries whose keys are not strings.

    NumPy numbers and enum members become plain values.

    Raises:
        TypeError: If the entry contains any other type.
    """
    return json.dumps(_to_json(entry))


def decode_entry(text: str) -> dict[str, Any]:
    """Read an entry written by `encode_entry`.

    Raises:
        ValueError: If the text is not JSON.
    """
    return json.loads(text, object_hook=_restore)


def _to_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        value = value.value
    if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    if isinstance(value, tuple):
        return {_KIND: "tuple", _ITEMS: [_to_json(item) for item in value]}
    if isinstance(value, Mapping):
        return _mapping_to_json(value)
    raise TypeError(f"an entry contains a value of type {type(value).__module__}.{type(value).__qualname__}: {value!r}")


def _mapping_to_json(value: Mapping[Any, Any]) -> dict[str, Any]:
    if all(type(key) is str for key in value) and _KIND not in value:
        return {key: _to_json(item) for key, item in value.items()}
    return {_KIND: "dict", _ITEMS: [[_to_json(key), _to_json(item)] for key, item in value.items()]}


def _restore(value: dict[str, Any]) -> Any:
    if _KIND not in value:
        return value
    return tuple(value[_ITEMS]) if value[_KIND] == "tuple" else dict(value[_ITEMS])
