"""Option values: checked, converted from mappings, merged."""

from __future__ import annotations

import collections.abc
import dataclasses
import difflib
import functools
import inspect
import math
import numbers
import os
import reprlib
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pl_grouprl.utilities.option_names import locate_option, note_of_class, note_on_option, note_on_value

# Helpers for options: range checks, merging, and leaving out those that are not set.


def check_options(checks: Mapping[str, tuple[Any, bool, str]]) -> None:
    """Refuse options that are out of range, and any number that is not finite.

    Args:
        checks: For each option by name: its value, whether that is valid, and what it must be.

    Raises:
        ValueError: Gives the name, the value and what it must be.
    """
    for name, (value, valid, range_) in checks.items():
        finite = "finite, and " if valid and "finite" not in range_ else ""
        if not valid or not is_finite(value):
            raise ValueError(f"{name} is {value!r}; it must be {finite}{range_}.")


def check_finite(**options: Any) -> None:
    """Refuse numbers that are NaN or infinite.

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


def drop_none(**options: Any) -> dict[str, Any]:
    """Leave out options that are None, so an option that a loss does not know is an error only if it was set."""
    return {name: value for name, value in options.items() if value is not None}


def join_options(options: dict[str, Any], more: dict[str, Any] | None, argument: str) -> dict[str, Any]:
    """Merge constructor arguments with the mapping that holds all further options.

    Args:
        options: The constructor arguments.
        more: The further options; None for none.
        argument: The name of that mapping, for the error.

    Raises:
        ValueError: If an option is in both.
    """
    for name, value in (more or {}).items():
        if name in options:
            raise ValueError(
                f"{name} is set twice, as {options[name]!r} and in {argument} as {value!r}; leave one of them out."
            )
    return options | (more or {})


# Checks values against annotations, and converts mappings to the configs they describe.

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


# Constructors that refuse unknown argument names and values of the wrong type, with a remedy in the error.

C = TypeVar("C", bound=type)

__all__ = ["ArgumentError", "as_config", "checked_arguments"]


def checked_arguments(cls: C) -> C:
    """Class decorator: the constructor checks its arguments against its annotations.

    Values are converted by `convert`. A constructor with `**kwargs` is assumed to pass them to the next one in the
    method resolution order; names that none of them takes are refused. The signature does not change.
    """
    init: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(init)
    def checked_init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(type(self), cls, kwargs)
        owner = type(self).__name__
        names = [name for name, parameter in _parameters(init).items() if parameter.kind is not parameter.KEYWORD_ONLY]
        if len(args) > len(names):
            extra = describe_value(args[-1])
            raise ArgumentError(f"{owner} takes only {', '.join(names)} by position; pass {extra} by name.")
        hints = _hints(init, cls)
        given = [convert(hints.get(name, Any), arg, f"{owner}.{name}") for name, arg in zip(names, args, strict=False)]
        init(self, *given, **{name: convert(hints.get(name, Any), v, f"{owner}.{name}") for name, v in kwargs.items()})

    cls.__init__ = checked_init  # type: ignore[misc]
    return cls


def refuse_unknown(cls: type, first: type, arguments: Mapping[str, Any]) -> None:
    """Refuse names that no constructor takes, from `first` on in the method resolution order of `cls`.

    Raises:
        ArgumentError: Says where the option belongs, or the nearest known name.
    """
    known, is_open = known_options(cls, first)
    for name in arguments:
        if name not in known and not is_open:
            raise ArgumentError(f"{cls.__name__} takes no {name!r}{suggestion(cls, name, first)}")


def suggestion(cls: type, name: str, first: type | None = None, in_yaml: bool = False) -> str:
    """For an option that a class does not take, say where it belongs, or the nearest name that the class takes.

    Args:
        cls: The class.
        name: Name of the option.
        first: The class whose constructor begins the chain; None for `cls`.
        in_yaml: Show what to write in a YAML file instead of Python.
    """
    known, _ = known_options(cls, first or cls)
    of_class = note_of_class(name, known)
    if of_class is not None:
        return f". {of_class}"
    note = note_on_option(name)
    configs = sorted((option for option, hint in known.items() if name in _config_fields(hint)), key=len)
    if configs:
        example = f"{configs[0]}: {{{name}: ...}}" if in_yaml else f"{configs[0]}={{{name!r}: ...}}"
        return f"; it is part of {' or '.join(configs)}: {example}.{note}"
    location = locate_option(name, known, in_yaml)
    if location is not None:
        return f"; {location}.{note}"
    if note:
        return f".{note}"
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; it takes {', '.join(known)}."


def known_options(cls: type, first: type) -> tuple[dict[str, Any], bool]:
    """Annotations by the names that the constructors take, and whether the last one takes any other name."""
    known: dict[str, Any] = {}
    for owner, constructor in _chain(cls, first):
        known |= {name: _hints(constructor, owner).get(name) for name in _parameters(constructor)}
        if not _takes_kwargs(constructor):
            return known, False
    return known, True


def config_class(cls: type, option: str) -> type:
    """The dataclass that an option of a class takes; the class itself if the option takes none."""
    return next(iter(_configs(known_options(cls, cls)[0].get(option))), cls)


def _configs(hint: Any) -> list[type]:
    return [cls for cls in (hint, *typing.get_args(hint)) if is_dataclass(cls) and isinstance(cls, type)]


def _config_fields(hint: Any) -> list[str]:
    return [field for config in _configs(hint) for field in field_names(config)]


def _chain(cls: type, first: type) -> Iterator[tuple[type, Callable[..., None]]]:
    mro = cls.__mro__
    for base in mro[mro.index(first) :]:
        if "__init__" in vars(base):
            yield base, inspect.unwrap(vars(base)["__init__"])


def _takes_kwargs(constructor: Callable[..., None]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values())


@functools.cache
def _parameters(constructor: Callable[..., None]) -> dict[str, inspect.Parameter]:
    """The named parameters, without self."""
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


@functools.cache
def _hints(constructor: Callable[..., None], owner: type) -> dict[str, Any]:
    """Evaluated annotations; a dataclass may inherit fields that were annotated in another module."""
    generated = is_dataclass(owner) and constructor.__code__.co_filename == "<string>"
    return typing.get_type_hints(owner if generated else constructor)
