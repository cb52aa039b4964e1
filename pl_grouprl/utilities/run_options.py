"""A run's options as plain values by name: recorded, compared with another run's, and allowed to differ."""

from __future__ import annotations

import difflib
import functools
import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

_LONGEST = 200
"""Most characters of a value that is kept as it is; a longer one is replaced by its digest."""

_DEEPEST = 3
"""How many levels of nested objects are described."""

Changes = dict[str, tuple[Any, Any]]
"""By option name, its value then and now."""


def describe(name: str, value: Any, depth: int = 0) -> dict[str, Any]:
    """Describe a value as plain values: itself, or an object's class and its constructor's arguments.

    Args:
        name: Name of the option; an object's arguments are named after it with a dot.
        value: Numbers, strings, functions, dataclasses, other objects, and lists and mappings of them.
        depth: How deeply this value is nested in objects.

    Returns:
        Strings, numbers, None, and lists of them, by name.
    """
    if isinstance(value, functools.partial):
        parts: Mapping[str, Any] = {"function": value.func, "args": list(value.args), **value.keywords}
        return _join(name, "functools.partial", parts, depth)
    if is_plain(value):
        return {name: _short(_plain(value))}
    if isinstance(value, Mapping):
        return _join(name, sorted(map(str, value)), value, depth)
    if isinstance(value, Sequence | set | frozenset):
        return _join(name, len(value), dict(enumerate(value)), depth)
    if inspect.isclass(value) or inspect.isroutine(value):
        owner = getattr(value, "__self__", None)
        parts = {} if owner is None or inspect.isclass(owner) or inspect.ismodule(owner) else {"of": owner}
        return _join(name, identity(value), parts, depth)
    own = getattr(value, "run_options", None)
    parts = own() if callable(own) else arguments_of(value)
    if not parts and " at 0x" not in repr(value):  # a dtype, a path
        return {name: _short(repr(value))}
    return _join(name, identity(type(value)), parts, depth)


def identity(value: Any) -> str:
    """Qualified name of a class or function, the same in every process."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_plain(value: Any) -> bool:
    """Whether a value can be compared as it is: a number, a string, None, or lists and sets of them."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str | bytes | Enum)


def arguments_of(value: Any) -> dict[str, Any]:
    """Attributes of an object that hold its constructor's arguments, found by name.

    If some argument has no attribute of its name, all plain attributes are included.
    """
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    own = getattr(value, "__dict__", {})
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = [p.name for p in inspect.signature(type(value)).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        parameters = []
    found = {p: own[key] for p in parameters for key in (p, f"_{p}") if key in own}
    if len(found) < len(parameters):
        found |= {key: attribute for key, attribute in own.items() if is_plain(attribute)}
    return found


def changed_options(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Options that both runs have with different values; tuples equal lists."""
    return {name: (then[name], now[name]) for name in then if name in now and _plain(then[name]) != _plain(now[name])}


def changes_since(saved: Mapping[str, Any], module: Any) -> Changes:
    """Options of a module that differ from those in a checkpoint or its manifest.

    Args:
        saved: Has `run_options`, or from older versions `options`, which are only those that rollouts depend on.
        module: Any LightningModule; one without `run_options` and `rollout_options` has none.
    """
    if "run_options" in saved:
        return changed_options(saved["run_options"], options_of(module))
    return changed_options(saved.get("options", {}), {"model": type(module).__name__} | _rollout_options(module))


def options_of(module: Any) -> dict[str, Any]:
    """The options by which two configurations are told apart."""
    own = getattr(module, "run_options", None)
    return {"model": type(module).__name__} | (_rollout_options(module) if own is None else own())


def _rollout_options(module: Any) -> dict[str, Any]:
    options: dict[str, Any] = getattr(module, "rollout_options", dict)()
    return options


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
    """Whether an option may change, being listed itself or under a listed prefix: `sampling` allows all of sampling."""
    return any(re.match(rf"{re.escape(prefix)}(?![\w])", name) for prefix in allowed)


def check_allowed(allowed: Sequence[str], known: Iterable[str], free: Iterable[str]) -> None:
    """Refuse a name in `allow_changed` that no option has.

    Args:
        allowed: Names of options, or dotted prefixes of names.
        known: The options that are compared.
        free: The options that are not.

    Raises:
        ValueError: Suggests the nearest name.
    """
    known = list(known)
    starts = sorted({".".join(name.split(".")[:end]) for name in known for end in range(1, name.count(".") + 2)})
    for own in allowed:
        if any(is_allowed(name, [own]) for name in known):
            continue
        if own in free:
            raise ValueError(f"allow_changed has {own!r}, which may change in any case; leave it out.")
        nearest = difflib.get_close_matches(own, starts, n=1, cutoff=0.0)
        raise ValueError(
            f"allow_changed has {own!r}, and no option of this run begins with it"
            f"{f'; did you mean {nearest[0]!r}?' if nearest else ''}. Name options as errors about them do, or parts "
            "of a name up to a dot, such as 'sampling' or 'sampling.temperature'."
        )


def refused_changes(changes: Changes, allowed: Sequence[str]) -> list[str]:
    """Describe the options that differ but may not."""
    return [
        f"{name} is {now!r} (was {then!r})" for name, (then, now) in changes.items() if not is_allowed(name, allowed)
    ]


def remedy(changes: Changes, allowed: Sequence[str]) -> str:
    """Say how to allow the refused changes."""
    names = [name for name in changes if not is_allowed(name, allowed)]
    return f"to change them on purpose, pass allow_changed={[*allowed, *names]}"


def _join(name: str, itself: Any, parts: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    described = {name: itself}
    if depth < _DEEPEST:
        for part, value in parts.items():
            described |= describe(f"{name}.{part}", value, depth + 1)
    return described


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        value = sorted(value, key=repr)
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, bytes):
        return value.hex()
    for kind in (bool, int, float, str):  # NumPy's numbers among them
        if isinstance(value, kind):
            return kind(value)
    return value


def _short(value: Any) -> Any:
    text = repr(value)
    if len(text) <= _LONGEST:
        return value
    return f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"


def recorded(initialize: Callable[..., None]) -> Callable[..., None]:
    """Make a constructor pass its arguments, defaults included, to `self.note_options` before it runs.

    If one constructor calls another, the inner one's value of an option counts.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            initialize(self, *args, **kwargs)  # says what is wrong
            raise
        bound.apply_defaults()
        for parameter in list(signature.parameters.values())[1:]:
            value = bound.arguments[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                self.note_options(value)
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                self.note_options({parameter.name: value})
        initialize(self, *args, **kwargs)

    return initialize_recorded
