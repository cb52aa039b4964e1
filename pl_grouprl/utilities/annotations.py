"""Checks values against annotations, and converts mappings to the configs they describe."""

from __future__ import annotations

import collections.abc
import dataclasses
import inspect
import numbers
import os
import reprlib
import types
from collections.abc import Iterable, Mapping
from typing import Any, Literal, Union, get_args, get_origin

from pl_grouprl.utilities.option_notes import note_on_value

_PLAIN = (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, Mapping)
"""Types whose values never satisfy one of our protocols or abstract classes."""

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a string",
    type(None): "None",
    dict: "a mapping",
    collections.abc.Sequence: "a list",
    collections.abc.Callable: "a function or another callable",
}

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 120


class ArgumentError(TypeError, ValueError):
    """An argument that a constructor refuses: an unknown name, a wrong type, or not one of the choices."""


def convert(hint: Any, value: Any, name: str) -> Any:
    """Convert a value to its annotated type, or refuse it.

    Lists and tuples convert to each other, NumPy's numbers to Python's, paths to strings, and a mapping to the
    dataclass whose fields it has. A protocol accepts any object; its methods are checked on use.

    Args:
        hint: An evaluated annotation.
        value: What was passed.
        name: The argument's name, for the error.

    Raises:
        ArgumentError: Gives the name, the value and what it must be.
    """
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(hint, value, name)
    if origin is Literal:
        return _checked(value, value in _choices_like(value, hint), hint, name)
    if origin in (list, tuple):
        return _convert_sequence(hint, value, name)
    if origin is dict or hint is dict:
        _checked(value, isinstance(value, Mapping), hint, name)
        key, item = get_args(hint) or (Any, Any)
        return {convert(key, k, f"a key of {name}"): convert(item, v, f"{name}[{k!r}]") for k, v in value.items()}
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return as_config(hint, value, name)
    return _convert_simple(origin or hint, value, name)


def as_config(cls: type, value: Any, name: str) -> Any:
    """Return an object of a config class unchanged, or create one from a mapping of its fields.

    Raises:
        ArgumentError: If it is neither, or a field is unknown or refused; names the option.
    """
    if isinstance(value, cls):
        return value
    _checked(value, isinstance(value, Mapping), cls, name)
    if "class_path" in value:
        raise ArgumentError(
            f"{name} is a mapping with a class_path, which only YAML knows; pass an object of the class, or a mapping "
            f"with the fields of {cls.__name__}: {', '.join(field_names(cls))}."
        )
    try:
        return cls(**{str(field): item for field, item in value.items()})
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: {error}") from error


def field_names(cls: type) -> list[str]:
    """The fields of a dataclass that its constructor takes."""
    return [field.name for field in dataclasses.fields(cls) if field.init]


def describe_value(value: Any) -> str:
    """Show a plain value, or another value's type."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, _PLAIN):
        return _short.repr(value)
    return f"a {type(value).__name__}"


def describe_hint(hint: Any) -> str:
    """Say in words what an annotation accepts."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        lists_last = sorted(args, key=lambda arg: get_origin(arg) in (list, tuple))
        return _either(describe_hint(arg) for arg in lists_last)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in args)}" if len(args) > 3 else _either(map(repr, args))
    if origin in (list, tuple):
        items = [arg for arg in args if arg is not Ellipsis]
        count = f"a list of {len(items)}" if origin is tuple and Ellipsis not in args else "a list"
        return f"{count}, each item {describe_hint(items[0])}" if items else count
    if dataclasses.is_dataclass(hint):
        return f"a {hint.__name__}, or a mapping of its fields ({', '.join(field_names(hint))})"  # type: ignore[arg-type, union-attr]
    kind = origin or hint
    return _WORDS.get(kind) or f"a {getattr(kind, '__name__', kind)}"


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _checked(value: Any, valid: bool, hint: Any, name: str) -> Any:
    if not valid:
        note = note_on_value(name, value)
        if isinstance(value, str) and collections.abc.Callable in {get_origin(arg) for arg in get_args(hint)}:
            note += " Pass the function itself; only YAML knows import paths."
        raise ArgumentError(f"{name} is {describe_value(value)}; it must be {describe_hint(hint)}.{note}")
    return value


def _choices_like(value: Any, hint: Any) -> list[Any]:
    """The choices of the value's type, so True does not match 1."""
    return [choice for choice in get_args(hint) if type(choice) is type(value)]


def _convert_union(union: Any, value: Any, name: str) -> Any:
    errors = []
    for hint in get_args(union):
        try:
            return convert(hint, value, name)
        except ArgumentError as error:
            errors.append((hint, error))
    # The branch that matches the value's kind can say what is wrong inside it.
    for hint, refusal in errors:
        is_list = get_origin(hint) in (list, tuple) and isinstance(value, list | tuple)
        if is_list or (dataclasses.is_dataclass(hint) and isinstance(value, Mapping)):
            raise refusal
    return _checked(value, False, union, name)


def _is_config_of(hint: Any, value: Any) -> bool:
    """Whether a value is one config, as an object or a mapping, where a hint takes a dataclass or a union with one."""
    options = (hint, *get_args(hint))
    configs = tuple(cls for cls in options if isinstance(cls, type) and dataclasses.is_dataclass(cls))
    return bool(configs) and isinstance(value, (*configs, Mapping))


def _convert_sequence(hint: Any, value: Any, name: str) -> list[Any] | tuple[Any, ...]:
    origin, args = get_origin(hint), get_args(hint)
    if origin is list and _is_config_of(args[0], value):
        value = [value]  # a single config means a list of one
    _checked(value, isinstance(value, list | tuple), hint, name)
    items = [arg for arg in args if arg is not Ellipsis]
    if origin is tuple and Ellipsis not in args:
        _checked(value, len(value) == len(items), hint, name)
    else:
        items = items[:1] * len(value)
    return origin(convert(item, v, f"{name}[{i}]") for i, (item, v) in enumerate(zip(items, value, strict=True)))


def _convert_simple(kind: Any, value: Any, name: str) -> Any:
    if kind is Any or kind is object or not isinstance(kind, type):
        return value
    if kind is float or kind is int:
        number = numbers.Integral if kind is int else numbers.Real
        _checked(value, isinstance(value, number) and not isinstance(value, bool), kind, name)
        return value if isinstance(value, int) else kind(value)
    if kind is str and isinstance(value, os.PathLike):
        return os.fspath(value)
    if kind is collections.abc.Callable:
        return _checked(value, callable(value), kind, name)
    if inspect.isabstract(kind) or kind.__module__ == "collections.abc" or getattr(kind, "_is_protocol", False):
        plain = tuple(p for p in _PLAIN if not issubclass(p, kind)) if kind.__module__ == "collections.abc" else _PLAIN
        return _checked(value, not isinstance(value, (*plain, str, bytes, type)), kind, name)
    return _checked(value, isinstance(value, kind), kind, name)
