"""Describes a run's options as plain values, compares them with another run's, and copies data for a user's code."""

from __future__ import annotations

import copy
import functools
import hashlib
import inspect
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

PACKAGE = __name__.partition(".")[0]

_ATOMS = frozenset({int, float, str, bool, bytes, type(None)})

_LONGEST = 200
"""Characters; longer values are replaced by their digest."""

_MOST_PARTS = 100
"""Parts of one option; more are replaced by their digest."""

_DEEPEST = 8
"""Objects nested deeper than this are described by their class."""

_SECRETS = re.compile(r"token|(?:access|auth|hf)_token|(?:.*_)?(?:api_?key|password|secret)|headers|env")
"""Names of texts that are not recorded, and of mappings of which only the keys are."""


def field_values(instance: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name, without copying their values."""
    return {field.name: getattr(instance, field.name) for field in fields(instance)}


def private_copy(value: T) -> T:
    """Copy nested containers, but share the leaves, for code that may modify its arguments.

    Lists, tuples, dictionaries, sets, byte arrays, NumPy arrays and dataclasses (prompts, rollouts, groups) are copied,
    including subclasses. Everything else, such as tensors and images, is shared, since copying it may cost more than
    the call itself.
    """
    return value if type(value) in _ATOMS else _copied(value)


def _copied(value: Any) -> Any:
    kind = type(value)
    if isinstance(value, (list, tuple)):
        if kind is list and _ATOMS.issuperset(map(type, value)):  # token ids, mostly
            return list(value)
        items = [private_copy(item) for item in value]
        if kind is list:
            return items
        if isinstance(value, list):
            copied: Any = copy.copy(value)
            copied[:] = items
            return copied
        if hasattr(value, "_make"):
            return value._make(items)
        return tuple(items) if kind is tuple else value  # constructors of other tuple types are unknown
    if isinstance(value, (dict, MutableMapping)):  # an abstract class alone would take a microsecond
        if kind is dict and _ATOMS.issuperset(map(type, value.values())):
            return dict(value)
        mapping: Any = {} if kind is dict else copy.copy(value)
        for key, held in value.items():
            mapping[key] = private_copy(held)
        return mapping
    if isinstance(value, (set, bytearray)) or kind.__module__ == "numpy":
        return copy.copy(value)
    if is_dataclass(value) and not isinstance(value, type) and hasattr(value, "__dict__"):
        copied = copy.copy(value)
        vars(copied).update({name: private_copy(held) for name, held in vars(value).items()})
        return copied
    return value


# Descriptions: any object, its class and arguments, as plain values that two processes can compare.


def describe(name: str, value: Any) -> dict[str, Any]:
    """Describe a value as plain values: itself, or an object's class and its constructor's arguments.

    If an object has a method `run_options()`, its result is used. If its attributes cannot be read, only its class is.
    Texts named like a secret (`token`, `api_key`, `password`) are hidden, and so are the values of `headers` and `env`.

    Args:
        name: Name of the option; an object's arguments are named after it with a dot.
        value: Numbers, strings, functions, dataclasses, other objects, and lists and mappings of them.

    Returns:
        Strings, numbers, None, and lists of them, by name.
    """
    described = dict(_walk(name, value, ()))
    if len(described) <= _MOST_PARTS:
        return described
    digest = hashlib.sha256(json.dumps(described, default=repr).encode()).hexdigest()
    return {name: described[name], f"{name}.sha256": digest[:16]}


def identity(value: Any) -> str:
    """Qualified name of a class or function, the same in every process."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_plain(value: Any) -> bool:
    """Whether a value can be compared directly: a number, a string, None, or lists and sets of them."""
    value = plain(value)
    return all(map(is_plain, value)) if isinstance(value, list) else type(value) in _ATOMS


def plain(value: Any) -> Any:
    """Convert NumPy's numbers, enums, bytes, tuples and sets to numbers, strings and lists."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=repr)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return plain(value.value)
    if isinstance(value, bytes):
        return value.hex()
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def array_facts(value: Any) -> list[Any] | None:
    """The dtype, the shape and a digest of the contents of a tensor, array or table; None for anything else."""
    import torch  # reward workers import this file, and start without PyTorch

    if hasattr(value, "to_numpy") and not inspect.isclass(value):  # a table or column of pandas or polars
        value = value.to_numpy()
    if isinstance(value, torch.Tensor) and (value.layout != torch.strided or value.is_nested):
        file = io.BytesIO()
        torch.save(value.detach().cpu(), file)
        return [str(value.dtype), str(value.layout), hashlib.sha256(file.getvalue()).hexdigest()]
    if isinstance(value, torch.Tensor):
        data = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    elif hasattr(value, "tobytes") and hasattr(value, "dtype"):
        data = value
    else:
        return None
    if getattr(value.dtype, "hasobject", False):  # its bytes are addresses
        return [str(value.dtype), list(value.shape), value.tolist()]
    return [str(value.dtype), list(value.shape), hashlib.sha256(data.tobytes()).hexdigest()]


def ordered(constant: Any) -> Any:
    """A constant with the items of its sets in an order that is the same in every process."""
    if isinstance(constant, frozenset):
        return sorted(map(ordered, constant), key=repr)
    return tuple(map(ordered, constant)) if isinstance(constant, tuple) else constant


def _walk(name: str, value: Any, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """Yield a value's description and those of its parts; `above` are the ids of the objects that it is part of."""
    if id(value) in above or len(above) == _DEEPEST:
        yield name, identity(type(value))
        return
    parts: Mapping[Any, Any] = {}
    itself = value
    try:
        if not isinstance(value, list | tuple | set | frozenset) or not is_plain(value):
            itself, parts = _parts(value, above)
            parts = dict(parts)
        itself = plain(itself)
        if isinstance(value, str | Mapping) and _SECRETS.fullmatch(name.rpartition(".")[2].strip("_").lower()):
            itself, parts = "(hidden)" if isinstance(value, str) else itself, {}
        text = repr(itself)
    except Exception:  # a user's attributes may raise anything
        yield name, identity(type(value))
        return
    if len(text) > _LONGEST:
        itself = f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
    yield name, itself
    for part, held in parts.items():
        yield from _walk(f"{name}.{ordered(part)}", held, (*above, id(value)))


def _parts(value: Any, above: tuple[int, ...]) -> tuple[Any, Mapping[Any, Any]]:
    """What a value is, and what it is made of, by name."""
    if type(plain(value)) in _ATOMS:
        return value, {}
    if isinstance(value, list | tuple | set | frozenset):
        # By their descriptions: the repr of an object or function may hold its address.
        if isinstance(value, set | frozenset):
            value = sorted(value, key=lambda item: repr(list(_walk("", item, (*above, id(value))))))
        return len(value), dict(enumerate(value))
    if isinstance(value, Mapping):
        return sorted(map(str, value)), value
    if isinstance(value, functools.partial):
        return "functools.partial", {"function": value.func, "args": list(value.args), **value.keywords}
    if inspect.isclass(value) or inspect.isroutine(value):
        owner = getattr(value, "__self__", None)
        parts = {} if owner is None or inspect.isclass(owner) or inspect.ismodule(owner) else {"of": owner}
        function: Any = value
        if hasattr(function, "__code__"):  # functions of one name that another function made differ in their closures
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            parts |= {"defaults": defaults} if defaults else {}
            cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            parts |= {name: cell.cell_contents for name, cell in cells}
        return identity(value), parts
    if (facts := array_facts(value)) is not None:
        return type(value).__name__, dict(enumerate(facts))
    if isinstance(value, re.Pattern):
        return value.pattern, {"flags": value.flags}
    run_options = getattr(type(value), "run_options", None)
    parts = run_options(value) if callable(run_options) else _arguments(value)
    if not parts and " at 0x" not in repr(value):  # a dtype, a path, a range
        return repr(value), {}
    return identity(type(value)), parts


def _arguments(value: Any) -> dict[str, Any]:
    """Attributes of an object with its constructor's arguments, found by name.

    If some argument has no attribute of its name, all plain attributes are included.
    """
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    attributes = vars(value) if hasattr(type(value), "__dict__") and hasattr(value, "__dict__") else {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    try:
        parameters = [p.name for p in inspect.signature(type(value)).parameters.values() if p.kind in kinds]
    except (TypeError, ValueError):
        parameters = []
    found = {p: attributes[key] for p in parameters for key in (p, f"_{p}") if key in attributes}
    if len(found) < len(parameters):
        found |= {key: attribute for key, attribute in attributes.items() if is_plain(attribute)}
    return found


# Comparisons: a run's options with those that a checkpoint or its manifest records.

Changes = dict[str, tuple[Any, Any]]
"""Value then and now, by option name."""


def options_of(module: Any) -> dict[str, Any]:
    """The options that distinguish configurations; of a module without `run_options`, its class alone."""
    run_options = getattr(module, "run_options", None)
    return {"model": type(module).__name__} | ({} if run_options is None else run_options())


def changes_since(saved: Mapping[str, Any], module: Any) -> Changes:
    """Options of a module that differ from the `run_options` of a checkpoint or its manifest."""
    then, now = saved.get("run_options", {}), options_of(module)
    both = {name: (plain(then[name]), plain(now[name])) for name in then if name in now}  # tuples equal lists
    return {name: pair for name, pair in both.items() if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1])}  # NaN


def allowed_changes(module: Any) -> Sequence[str]:
    """The options of a module that are meant to differ from a checkpoint's (`guards.allow_changed`)."""
    return getattr(getattr(module, "guards", None), "allow_changed", ())


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
    """Whether an option or a prefix of its name is listed: `sampling` allows every option of `sampling` to change."""
    return any(re.match(rf"{re.escape(prefix)}(?![\w])", name) for prefix in allowed)


def refused_changes(changes: Changes, allowed: Sequence[str]) -> list[str]:
    """Describe the options that differ but may not."""
    return [
        f"{name} is {now!r} (was {then!r})" for name, (then, now) in changes.items() if not is_allowed(name, allowed)
    ]


def remedy(changes: Changes, allowed: Sequence[str]) -> str:
    """Describe how to allow the changes that were rejected."""
    names = [name for name in changes if not is_allowed(name, allowed)]
    return f"to change them on purpose, set guards.allow_changed to {[*allowed, *names]}"


def lineage(module: Any) -> list[str]:
    """Names of a module's class and its bases, up to and including the algorithm of this package.

    For other modules, only the name of their class.
    """
    classes = [cls for cls in type(module).__mro__ if isinstance(cls, type)]
    for place, cls in enumerate(classes):
        if cls.__module__.partition(".")[0] == PACKAGE:
            return [derived.__name__ for derived in classes[: place + 1]]
    return [type(module).__name__]
