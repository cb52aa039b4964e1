"""Describes any object, its class and arguments, as plain values that two processes can compare."""

from __future__ import annotations

import functools
import hashlib
import inspect
import io
import json
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple

import numpy as np
import torch

_LONGEST = 200
"""Characters; longer values are replaced by their digest."""

_MOST_ITEMS = 100
"""Items; longer lists and mappings are replaced by their digest."""

_DEEPEST = 3
"""Objects nested deeper than this are replaced by their digest."""


class _Object(NamedTuple):
    """A value's kind, and descriptions of its parts by name."""

    itself: Any
    parts: Mapping[Any, Any]


def describe(name: str, value: Any) -> dict[str, Any]:
    """Describe a value as plain values: itself, or an object's class and its constructor's arguments.

    If an object has a method `run_options()`, its result is used. If its attributes cannot be read, only its class is.

    Args:
        name: Name of the option; an object's arguments are named after it with a dot.
        value: Numbers, strings, functions, dataclasses, other objects, and lists and mappings of them.

    Returns:
        Strings, numbers, None, and lists of them, by name.
    """
    return _flatten(name, _tree(value, ()), 0)


def identity(value: Any) -> str:
    """Qualified name of a class or function, the same in every process."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"


def is_plain(value: Any) -> bool:
    """Whether a value can be compared directly: a number, a string, None, or lists and sets of them."""
    return not isinstance(_tree(value, ()), _Object)


def plain(value: Any) -> Any:
    """Convert NumPy's numbers, enums, bytes, tuples and sets to numbers, strings and lists."""
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


def _flatten(name: str, tree: Any, depth: int) -> dict[str, Any]:
    if not isinstance(tree, _Object):
        return {name: _short(tree)}
    if tree.parts and depth == _DEEPEST:
        return {name: tree.itself, f"{name}.sha256": _digest(tree.parts)}
    described = {name: tree.itself}
    for part, subtree in tree.parts.items():
        described |= _flatten(f"{name}.{part}", subtree, depth + 1)
    return described


def _tree(value: Any, above: tuple[int, ...]) -> Any:
    """A plain value, or an `_Object`; `above` are the ids of the objects that this one is part of."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int) and value.bit_length() > 1024:  # Python refuses to print much longer ones in decimal
        return hex(value)
    if value is None or isinstance(value, bool | int | float | str | bytes | Enum):
        return plain(value)
    if id(value) in above:
        return _Object(identity(type(value)), {})
    try:
        return _tree_of_object(value, (*above, id(value)))
    except Exception:  # a user's attributes may raise anything
        return _Object(identity(type(value)), {})


def _tree_of_object(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, list | tuple | set | frozenset):
        return _tree_of_items(value, above)
    if isinstance(value, Mapping):
        return _tree_of_parts(sorted(map(str, value)), value, above)
    if isinstance(value, functools.partial):
        parts = {"function": value.func, "args": list(value.args), **value.keywords}
        return _tree_of_parts("functools.partial", parts, above)
    if inspect.isclass(value) or inspect.isroutine(value):
        return _tree_of_parts(identity(value), _function_parts(value), above)
    if (array := array_facts(value)) is not None:
        return _tree(array, above)
    if isinstance(value, re.Pattern) and len(value.pattern) >= _LONGEST:  # its repr is cut
        return _tree([value.pattern, value.flags], above)
    run_options = getattr(type(value), "run_options", None)
    parts = run_options(value) if callable(run_options) else _arguments(value)
    if not parts and " at 0x" not in repr(value):  # a dtype, a path, a range
        return repr(value)
    return _tree_of_parts(identity(type(value)), parts, above)


def _tree_of_items(value: Any, above: tuple[int, ...]) -> Any:
    trees = [_tree(item, above) for item in value]
    if isinstance(value, set | frozenset):
        trees.sort(key=repr)
    if not any(isinstance(tree, _Object) for tree in trees):
        return trees
    return _limited(len(trees), dict(enumerate(trees)))


def _tree_of_parts(itself: Any, parts: Mapping[Any, Any], above: tuple[int, ...]) -> _Object:
    return _limited(itself, {str(ordered(name)): _tree(part, above) for name, part in parts.items()})


def _limited(itself: Any, parts: Mapping[Any, Any]) -> _Object:
    if len(parts) <= _MOST_ITEMS:
        return _Object(_short(itself), parts)
    return _Object(_short(itself), {"sha256": _digest(parts)})


def _function_parts(function: Any) -> dict[str, Any]:
    """What distinguishes functions with the same name: a method's object, defaults, closure, and a lambda's code."""
    owner = getattr(function, "__self__", None)
    parts = {} if owner is None or inspect.isclass(owner) or inspect.ismodule(owner) else {"of": owner}
    code = getattr(function, "__code__", None)
    if code is None:
        return parts
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    parts |= {"defaults": defaults} if defaults else {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        parts[name] = cell.cell_contents
    if "<" in function.__qualname__:  # a lambda, or made by another function
        parts["code"] = hashlib.sha256(_code(code).encode()).hexdigest()
    return parts


def _code(code: CodeType) -> str:
    constants = [_code(item) if isinstance(item, CodeType) else repr(ordered(item)) for item in code.co_consts]
    return repr((code.co_code.hex(), code.co_names, constants))


def ordered(constant: Any) -> Any:
    """A constant with the items of its sets in an order that is the same in every process."""
    if isinstance(constant, frozenset):
        return sorted(map(ordered, constant), key=repr)
    return tuple(map(ordered, constant)) if isinstance(constant, tuple) else constant


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


def _digest(parts: Mapping[Any, Any]) -> str:
    text = json.dumps({str(name): part for name, part in parts.items()}, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(value: Any) -> Any:
    text = repr(value)
    if len(text) <= _LONGEST:
        return value
    return f"{text[:40]}... (sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]})"
