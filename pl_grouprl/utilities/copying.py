"""Copies data for code that may modify its arguments."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

T = TypeVar("T")

_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})


def field_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying their values."""
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def private_copy(value: T) -> T:
    """Copy nested containers, but share the leaves.

    Lists, tuples, dictionaries, sets, byte arrays, NumPy arrays and dataclasses (prompts, rollouts, groups) are copied,
    including subclasses. Everything else, such as tensors and images, is shared, since copying it may cost more than
    the call itself.
    """
    if type(value) in _ATOMS:
        return value
    if isinstance(value, (list, tuple)):
        return _copy_sequence(value)
    if isinstance(value, (dict, MutableMapping)):  # an abstract class alone would take a microsecond
        return _copy_mapping(value)
    if isinstance(value, (set, bytearray)) or type(value).__module__ == "numpy":
        return copy.copy(value)
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        copied = copy.copy(value)
        vars(copied).update({name: private_copy(held) for name, held in vars(value).items()})
        return copied
    return value


def _copy_sequence(value: Any) -> Any:
    kind = type(value)
    if kind is list and _ATOMS.issuperset(map(type, value)):  # token ids, mostly
        return value.copy()
    items = [private_copy(item) for item in value]
    if kind is list:
        return items
    if isinstance(value, list):
        copied = copy.copy(value)
        copied[:] = items
        return copied
    if hasattr(value, "_make"):
        return value._make(items)
    return tuple(items) if kind is tuple else value  # constructors of other tuple types are unknown


def _copy_mapping(value: Any) -> Any:
    if type(value) is dict:
        if _ATOMS.issuperset(map(type, value.values())):
            return value.copy()
        return {key: private_copy(held) for key, held in value.items()}
    copied = copy.copy(value)
    for key, held in value.items():
        copied[key] = private_copy(held)
    return copied
