"""Records a run's options as plain values by name, and compares them with another run's."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pl_grouprl.utilities.describe import plain

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
