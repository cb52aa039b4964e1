"""Constructors that refuse unknown argument names and values of the wrong type, with a remedy in the error."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from pl_grouprl.utilities.annotations import ArgumentError, as_config, convert, describe_value, field_names
from pl_grouprl.utilities.option_notes import note_of_class, note_on_option
from pl_grouprl.utilities.option_paths import locate_option

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
