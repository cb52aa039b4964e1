"""Build a registered callable from its name and options, as a configuration gives them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def build(registry: Mapping[str, Callable[..., T]], argument: str, name: str, options: Mapping[str, Any]) -> T:
    """Call `registry[name](**options)`, and say what there is when the name or an option is unknown.

    Args:
        registry: Constructors by name.
        argument: How the caller calls the choice, for the error.
        name: Which one to build.
        options: Keyword arguments of the constructor.

    Returns:
        What the constructor returns.

    Raises:
        ValueError: If the name is not registered, or the constructor does not take one of the options.
    """
    if name not in registry:
        raise ValueError(f"{argument} is {name!r}; it must be one of {', '.join(sorted(registry))}.")
    constructor = registry[name]
    known = list(inspect.signature(constructor).parameters)
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ValueError(
            f"{argument}={name!r} does not use {', '.join(unknown)}; it takes {', '.join(known) or 'no options'}. "
            "Leave the others unset."
        )
    return constructor(**options)
