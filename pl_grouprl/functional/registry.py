"""Functions chosen by name in a configuration, with their options.

A registry is a dictionary of these. The function's signature says what it takes: arguments with the names in `data` are
passed at each call, its other keyword-only arguments are its options.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, TypeVar

from pl_grouprl.utilities.describe import describe as plain_values
from pl_grouprl.utilities.options import check_choices

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="RegisteredFunction")


@dataclass(frozen=True, repr=False)
class RegisteredFunction:
    """A named function and its options. Further fields of subclasses are declared at registration.

    Attributes:
        name: The function's name in configurations.
        function: Takes data, and its options as keyword arguments.
        options: By name; complete once `with_options` has set them.
        argument: The option of an algorithm that takes the name.
        data: Names of all keyword arguments for data. All must be given if needed, except those of `optional`.
        optional: Names of data that may be None.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    argument: ClassVar[str]
    data: ClassVar[tuple[str, ...]]
    optional: ClassVar[tuple[str, ...]] = ("reduce", "importance_weights_N")

    @cached_property
    def needs(self) -> tuple[str, ...]:
        """The data that the function takes as keyword arguments."""
        parameters = inspect.signature(self.function).parameters
        return tuple(name for name in self.data if name in parameters)

    def known_options(self) -> dict[str, inspect.Parameter]:
        """The options of the function by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in self.data}

    def with_options(self: R, options: Mapping[str, Any]) -> R:
        """Bind options; the others keep the function's defaults.

        Raises:
            ValueError: If the function has no such option, or an on/off option is neither. Its own range checks
                run when it is called.
        """
        known = self.known_options()
        if unknown := [name for name in options if name not in known]:
            raise ValueError(
                f"{self.argument}={self.name!r} does not use {', '.join(unknown)}; it takes "
                f"{', '.join(known) or 'no options'}."
            )
        defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
        for name, value in options.items():  # a mapping in YAML, whose values have no types: "false" would be true
            if isinstance(defaults.get(name), bool) and not isinstance(value, bool):
                raise ValueError(f"{self.argument}={self.name!r}: {name} is {value!r}; it must be true or false.")
        return replace(self, options=defaults | dict(options))

    def call(self, *tensors: Any, **data: Any) -> Any:
        """Call the function with the data that it needs, and its options.

        Raises:
            ValueError: If data that it needs is missing.
        """
        if missing := [name for name in self.needs if data.get(name) is None and name not in self.optional]:
            raise ValueError(f"{missing[0]} is None, but {self.argument}={self.name!r} needs it; pass it by name.")
        return self.function(*tensors, **{name: data.get(name) for name in self.needs}, **self.options)

    def __repr__(self) -> str:
        options = [pair for name, value in self.options.items() for pair in plain_values(name, value).items()]
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in options)})"


def choose(registry: Mapping[str, R], argument: str, name: str, options: Mapping[str, Any]) -> R:
    """Bind the function registered as `name` with options.

    Raises:
        ValueError: If the name is not registered, or the function has no such option.
    """
    check_choices(**{argument: (name, sorted(registry))})
    return registry[name].with_options(options)


def describe(part: Any) -> str:
    """Name a loss or an estimator with its options, identically in every process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)
