"""Describes a run's options as plain values, and compares them with another run's."""

from __future__ import annotations

import copy
import difflib
import functools
import hashlib
import inspect
import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from types import CodeType
from typing import Any, NamedTuple, TypeVar

import numpy as np

# Copies data for code that may modify its arguments.

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


# Describes any object, its class and arguments, as plain values that two processes can compare.

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


# Records a run's options as plain values by name, and compares them with another run's.

Changes = dict[str, tuple[Any, Any]]
"""Value then and now, by option name."""


def changed_options(then: Mapping[str, Any], now: Mapping[str, Any]) -> Changes:
    """Options that both runs have with different values; tuples equal lists."""
    both = {name: (plain(then[name]), plain(now[name])) for name in then if name in now}
    return {name: pair for name, pair in both.items() if pair[0] != pair[1] and repr(pair[0]) != repr(pair[1])}  # NaN


def changes_since(saved: Mapping[str, Any], module: Any) -> Changes:
    """Options of a module that differ from those in a checkpoint or its manifest.

    Args:
        saved: The checkpoint or manifest. Its `run_options` are compared; older versions wrote `options`, with only
            those that rollouts depend on.
        module: Any LightningModule; one without `run_options` and `rollout_options` has none.
    """
    if "run_options" in saved:
        return changed_options(saved["run_options"], options_of(module))
    return changed_options(saved.get("options", {}), {"model": type(module).__name__} | _rollout_options(module))


def options_of(module: Any) -> dict[str, Any]:
    """The options that distinguish configurations."""
    run_options = getattr(module, "run_options", None)
    return {"model": type(module).__name__} | (_rollout_options(module) if run_options is None else run_options())


def _rollout_options(module: Any) -> dict[str, Any]:
    options: dict[str, Any] = getattr(module, "rollout_options", dict)()
    return options


def is_allowed(name: str, allowed: Iterable[str]) -> bool:
    """Whether an option or a prefix of its name is listed: `sampling` allows every option of `sampling` to change."""
    return any(re.match(rf"{re.escape(prefix)}(?![\w])", name) for prefix in allowed)


def check_allowed(allowed: Sequence[str], known: Iterable[str], free: Iterable[str]) -> None:
    """Refuse a name in `allow_changed` that no option has.

    Args:
        allowed: Names of options, or dotted prefixes of names.
        known: The options that must not change otherwise.
        free: The options that may always change.

    Raises:
        ValueError: Suggests the nearest name.
    """
    known = list(known)
    prefixes = sorted({".".join(name.split(".")[:end]) for name in known for end in range(1, name.count(".") + 2)})
    for prefix in allowed:
        if any(is_allowed(name, [prefix]) for name in known):
            continue
        if prefix in free:
            raise ValueError(f"allow_changed has {prefix!r}, which may always change; leave it out.")
        nearest = difflib.get_close_matches(prefix, prefixes, n=1, cutoff=0.0)
        raise ValueError(
            f"allow_changed has {prefix!r}, and no option of this run begins with it"
            f"{f'; did you mean {nearest[0]!r}?' if nearest else ''}. Use the names in error messages, or their first "
            "parts up to a dot, such as 'sampling' or 'sampling.temperature'."
        )


def refused_changes(changes: Changes, allowed: Sequence[str]) -> list[str]:
    """Describe the options that differ but may not."""
    return [
        f"{name} is {now!r} (was {then!r})" for name, (then, now) in changes.items() if not is_allowed(name, allowed)
    ]


def remedy(changes: Changes, allowed: Sequence[str]) -> str:
    """Describe how to allow the refused changes."""
    names = [name for name in changes if not is_allowed(name, allowed)]
    return f"to change them on purpose, pass allow_changed={[*allowed, *names]}"


def recorded(initialize: Callable[..., None], note: Callable[[Any, Mapping[str, Any]], None]) -> Callable[..., None]:
    """Make a constructor pass its arguments, defaults included, to a function before it runs.

    Args:
        initialize: The constructor.
        note: Takes the object and some of its arguments by name. If one constructor calls another, the inner one's
            value of an option comes last.
    """
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def initialize_recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            bound = signature.bind(self, *args, **kwargs)
        except TypeError:
            initialize(self, *args, **kwargs)  # raises the proper error
            raise
        bound.apply_defaults()
        for parameter in list(signature.parameters.values())[1:]:
            value = bound.arguments[parameter.name]
            if parameter.kind is parameter.VAR_KEYWORD:
                note(self, value)
            elif parameter.kind is not parameter.VAR_POSITIONAL:
                note(self, {parameter.name: value})
        initialize(self, *args, **kwargs)

    return initialize_recorded


# Records which module class wrote a checkpoint, and refuses checkpoints of other algorithms.

PACKAGE = __name__.partition(".")[0]


def lineage(module: Any) -> list[str]:
    """Names of a module's class and its bases, up to and including the algorithm of this package.

    For other modules, only the name of their class.
    """
    classes = [cls for cls in type(module).__mro__ if isinstance(cls, type)]
    for place, cls in enumerate(classes):
        if cls.__module__.partition(".")[0] == PACKAGE:
            return [derived.__name__ for derived in classes[: place + 1]]
    return [type(module).__name__]


def compare_lineage(module: Any, then: Sequence[str] | None, what: str) -> None:
    """Refuse a checkpoint of another algorithm; a subclass counts as its algorithm.

    Args:
        module: The module to load the checkpoint into.
        then: The checkpoint's recorded `lineage`, or None.
        what: The checkpoint's name in the error.

    Raises:
        ValueError: Names both classes.
    """
    if then and then[-1] != lineage(module)[-1]:
        raise ValueError(
            f"{what} was written by {_title(then)}, and the module is {_title(lineage(module))}; a checkpoint belongs "
            f"to the algorithm that wrote it. Load it with {then[-1]}, or start from the policy that its run exported "
            "(ExportPolicy): pass that folder as the policy."
        )


def describe_misfit(module: Any, then: Sequence[str] | None, reason: str) -> str:
    """Error text for a checkpoint whose weights do not fit a module: what wrote it, and torch's reason."""
    writer = _title(then) if then else f"a module that is not one of {PACKAGE}'s, or an older version"
    return (
        f"the weights of the checkpoint do not fit. It was written by {writer}, and the module is "
        f"{_title(lineage(module))} with other models: pass the policy, critic and adapter that it was trained with. "
        f"{reason}"
    )


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ({names[-1]})"
