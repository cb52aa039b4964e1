"""Constructors that refuse unknown names and values of another type, by name and with the remedy."""

from __future__ import annotations

import difflib
import functools
import inspect
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, TypeVar

from pl_grouprl.utilities.annotations import ArgumentError, as_config, convert, describe_value, field_names
from pl_grouprl.utilities.places import place_of

C = TypeVar("C", bound=type)

__all__ = ["ArgumentError", "as_config", "checked_arguments"]


def checked_arguments(cls: C) -> C:
    """Decorate a class whose constructor is to compare what it is given with its annotations.

    Values are converted as `convert` says. A constructor with `**kwargs` hands them to the next one of the method
    resolution order; names that none of them takes are refused. The signature stays as it is.
    """
    own: Callable[..., None] = vars(cls)["__init__"]

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        refuse_unknown(type(self), cls, kwargs)
        owner = type(self).__name__
        names = [name for name, parameter in _parameters(own).items() if parameter.kind is not parameter.KEYWORD_ONLY]
        if len(args) > len(names):
            raise ArgumentError(f"{owner} takes {', '.join(names)} by position; name {describe_value(args[-1])}.")
        hints = _hints(own, cls)
        given = [convert(hints.get(name, Any), arg, f"{owner}.{name}") for name, arg in zip(names, args, strict=False)]
        own(self, *given, **{name: convert(hints.get(name, Any), v, f"{owner}.{name}") for name, v in kwargs.items()})

    cls.__init__ = init  # type: ignore[misc]
    return cls


def refuse_unknown(cls: type, first: type, arguments: Mapping[str, Any]) -> None:
    """Refuse names that no constructor takes, from `first` on in the method resolution order of `cls`.

    Raises:
        ArgumentError: With where the option belongs, or the nearest known name.
    """
    known, is_open = _known(cls, first)
    for name in arguments:
        if name not in known and not is_open:
            raise ArgumentError(f"{cls.__name__} takes no {name!r}{remedy(cls, name, first)}")


def remedy(cls: type, name: str, first: type | None = None) -> str:
    """Say where an option belongs that a class does not take, or the nearest name that it takes.

    Args:
        cls: The class.
        name: Of the option.
        first: The class whose constructor begins the chain; None is `cls`.
    """
    known, _ = _known(cls, first or cls)
    configs = sorted((option for option, hint in known.items() if name in _config_fields(hint)), key=len)
    if configs:
        return f"; it is part of {' or '.join(configs)}: {configs[0]}={{{name!r}: ...}}."
    place = place_of(name, known)
    if place is not None:
        return f"; {place}."
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]!r}?" if nearest else f"; it takes {', '.join(known)}."


def _known(cls: type, first: type) -> tuple[dict[str, Any], bool]:
    """Annotations by the names that constructors take, and whether the last one takes any other too."""
    known: dict[str, Any] = {}
    for owner, constructor in _chain(cls, first):
        known |= {name: _hints(constructor, owner).get(name) for name in _parameters(constructor)}
        if not _hands_on(constructor):
            return known, False
    return known, True


def config_class(cls: type, option: str) -> type:
    """The dataclass that an option of a class takes; the class itself where the option takes none."""
    return next(iter(_configs(_known(cls, cls)[0].get(option))), cls)


def _configs(hint: Any) -> list[type]:
    return [own for own in (hint, *typing.get_args(hint)) if is_dataclass(own) and isinstance(own, type)]


def _config_fields(hint: Any) -> list[str]:
    return [field for config in _configs(hint) for field in field_names(config)]


def _chain(cls: type, first: type) -> Iterator[tuple[type, Callable[..., None]]]:
    mro = cls.__mro__
    for own in mro[mro.index(first) :]:
        if "__init__" in vars(own):
            yield own, inspect.unwrap(vars(own)["__init__"])


def _hands_on(constructor: Callable[..., None]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(constructor).parameters.values())


@functools.cache
def _parameters(constructor: Callable[..., None]) -> dict[str, inspect.Parameter]:
    """Those with a name, without self."""
    parameters = list(inspect.signature(constructor).parameters.values())[1:]
    return {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


@functools.cache
def _hints(constructor: Callable[..., None], owner: type) -> dict[str, Any]:
    """Evaluated annotations; the fields of a dataclass may come from another module than its constructor."""
    made = is_dataclass(owner) and constructor.__code__.co_filename == "<string>"
    return typing.get_type_hints(owner if made else constructor)
