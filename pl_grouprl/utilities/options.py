"""Option values: checked, converted from mappings, merged."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def check_options(checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Raise if an option is out of range, or a number is NaN or infinite.

    Args:
        checks: For each option by name: its value, whether that is valid, and what it must be.

    Raises:
        ValueError: Gives the name, the value and what it must be.
    """
    for name, (value, valid, range_) in checks.items():
        finite = "finite, and " if valid and "finite" not in range_ else ""
        if not valid or not is_finite(value):
            raise ValueError(f"{name} is {value!r}; it must be {finite}{range_}.")


def check_fields(options: Any, **checks: tuple[bool, str]) -> None:
    """Like `check_options`, for attributes of an object, which are named after its class."""
    owner = type(options).__name__
    check_options({f"{owner}.{name}": (getattr(options, name), *check) for name, check in checks.items()})


def check_choices(**options: tuple[Any, Collection[str]]) -> None:
    """Raise if an option is none of its choices; each option by name: its value and the choices.

    Raises:
        ValueError: Gives the name, the value and the choices.
    """
    check_options(
        {name: (value, value in known, f"one of {', '.join(known)}") for name, (value, known) in options.items()}
    )


def check_finite(**options: Any) -> None:
    """Raise if a number is NaN or infinite.

    Raises:
        ValueError: Gives the name and the value.
    """
    check_options({name: (value, True, "a finite number") for name, value in options.items()})


def is_finite(value: Any) -> bool:
    """False for NaN, infinity, and containers of them."""
    if isinstance(value, Mapping):
        return all(map(is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def as_options(cls: type[T], value: T | Mapping[str, Any], name: str) -> T:
    """Create an option dataclass from a mapping of its fields; return an instance unchanged.

    Raises:
        TypeError: If the value is neither, or has an unknown field.
    """
    if isinstance(value, cls):
        return value
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} is {value!r}; pass {cls.__name__} or a mapping with {', '.join(fields)}.")
    for key in value:
        if key not in fields:
            nearest = difflib.get_close_matches(str(key), fields, n=1)
            meant = f"did you mean {nearest[0]!r}?" if nearest else f"it has {', '.join(fields)}."
            raise TypeError(f"{name} has no option {key!r}; {meant}")
    options = {
        key: tuple(item) if isinstance(item, list) and str(fields[key].type).startswith("tuple") else item
        for key, item in value.items()
    }
    return cls(**options)


def nearest_option(cls: type, name: str) -> str | None:
    """The parameter of a class's constructors, or the field of an option dataclass among them, with the nearest name.

    A field is named with its parameter, `reward_calls.workers`. None if no name is near.
    """
    constructors = [vars(base)["__init__"] for base in cls.__mro__ if "__init__" in vars(base)]
    known = {name: p.default for one in constructors for name, p in inspect.signature(one).parameters.items()}
    fields = {
        f"{parameter}.{field.name}": field.name
        for parameter, default in known.items()
        if dataclasses.is_dataclass(default)
        for field in dataclasses.fields(default)
    }
    same_end = [dotted for dotted, field in fields.items() if name == field or name.endswith(f"_{field}")]
    nearest = difflib.get_close_matches(name, same_end, n=1, cutoff=0.3)
    return next(iter(nearest or difflib.get_close_matches(name, [*known, *fields], n=1)), None)


def drop_none(**options: Any) -> dict[str, Any]:
    """Leave out options that are None, so an option that a loss does not know is an error only if it was set."""
    return {name: value for name, value in options.items() if value is not None}


def join_options(options: dict[str, Any], more: dict[str, Any] | None, argument: str) -> dict[str, Any]:
    """Merge constructor arguments with the mapping that holds all further options, named `argument` in the error.

    Raises:
        ValueError: If an option is in both.
    """
    for name, value in (more or {}).items():
        if name in options:
            raise ValueError(f"{name} is set twice, as {options[name]!r} and in {argument} as {value!r}; omit one.")
    return options | (more or {})
