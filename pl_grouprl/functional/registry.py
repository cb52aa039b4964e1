"""Functions chosen by name in a configuration: registered where they are defined, bound to checked options.

The options of a registered function are its keyword-only arguments, except those for data. The registration declares
anything else that callers need to know.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

from pl_grouprl.utilities.describe import describe as plain_values
from pl_grouprl.utilities.describe import identity
from pl_grouprl.utilities.option_names import note_on_value
from pl_grouprl.utilities.options import convert, describe_value

F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R", bound="RegisteredFunction")
T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class RegisteredFunction:
    """A named function and its options.

    Subclasses define the call; their further fields are declared at registration.

    Attributes:
        name: The function's name in configurations.
        function: Takes data, and its options as keyword arguments.
        options: By name; complete once `with_options` has set them.
        argument: The option of an algorithm that takes the name.
        data: All names of keyword arguments for data.
    """

    name: str
    function: Callable[..., Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    argument: ClassVar[str]
    data: ClassVar[tuple[str, ...]]

    @property
    def takes(self) -> tuple[str, ...]:
        """The data that the function takes as keyword arguments."""
        raise NotImplementedError

    def try_out(self) -> None:
        """Call the function on dummy data, so that it can refuse its options, and check the result."""
        raise NotImplementedError

    def __repr__(self) -> str:
        options = [pair for name, value in self.options.items() for pair in plain_values(name, value).items()]
        return f"{self.name}({', '.join(f'{name}={value!r}' for name, value in options)})"

    def known_options(self) -> dict[str, inspect.Parameter]:
        """The options of the function by name."""
        parameters = inspect.signature(self.function).parameters
        return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY and name not in self.takes}

    def with_options(self: R, options: Mapping[str, Any]) -> R:
        """Bind options; the others keep the function's defaults.

        Raises:
            ValueError: If an option is unknown, has the wrong type, or is out of range.
        """
        known = self.known_options()
        unknown = [name for name in options if name not in known]
        if unknown:
            raise ValueError(
                f"{self.argument}={self.name!r} does not use {', '.join(unknown)}; it takes "
                f"{', '.join(known) or 'no options'}. Leave the others unset."
            )
        defaults = {name: p.default for name, p in known.items() if p.default is not p.empty}
        passed = {name: convert(self._type_of(name), value, f"{self.name}.{name}") for name, value in options.items()}
        bound = replace(self, options=defaults | passed)
        bound.try_out()
        return bound

    def _type_of(self, option: str) -> Any:
        annotation = inspect.signature(self.function).parameters[option].annotation
        if annotation is inspect.Parameter.empty:
            return Any
        holder = type("", (), {"__annotations__": {option: annotation}})
        try:
            return typing.get_type_hints(holder, inspect.unwrap(self.function).__globals__)[option]
        except NameError as error:
            raise TypeError(
                f"option {option} of {self.argument} {self.name!r} has the type {annotation!r}, not known at run "
                f"time ({error}); import it outside of TYPE_CHECKING, or leave the annotation out."
            ) from None

    def _positional(self) -> list[str]:
        """The data that every such function takes first, by position."""
        parameters = list(inspect.signature(type(self).__call__).parameters.values())[1:]
        return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in self.data]

    def check_declaration(self) -> None:
        """Compare the registration with the function's arguments.

        Raises:
            TypeError: If it is not a function, lacks an argument for declared data, takes undeclared data, or has an
                option that is not keyword-only or has no default.
        """
        if not inspect.isfunction(self.function):
            raise TypeError(f"{self.argument} {self.name!r} is {describe_value(self.function)}; register a function.")
        arguments = inspect.signature(self.function).parameters
        absent = [name for name in self.takes if name not in arguments]
        undeclared = [name for name in arguments if name in self.data and name not in self.takes]
        for names, problem in ((absent, "lacks"), (undeclared, "does not declare")):
            if names:
                call = ", ".join((*self._positional(), *(f"{data}=..." for data in self.takes), "options"))
                raise TypeError(
                    f"{self.argument} {self.name!r} {problem} {', '.join(names)}; make the arguments of "
                    f"{self.function.__qualname__} and its registration agree. As it is registered, it is called as "
                    f"{self.name}({call})."
                )
        for name, parameter in arguments.items():
            is_option = name in self.known_options()
            if is_option == (parameter.default is parameter.empty) and name not in self.data:
                raise TypeError(
                    f"{self.argument} {self.name!r}: {name} must be keyword-only with a default to be an option, as in "
                    f"`*, {name}=...`; arguments for data have no default."
                )


def registering(registry: dict[str, R], kind: type[R], name: str, **declared: Any) -> Callable[[F], F]:
    """Create a decorator that adds a function to a registry and returns it unchanged.

    Args:
        registry: Registered functions by name.
        kind: Class of the entry.
        name: The function's name in configurations.
        **declared: Further fields of the entry.

    Raises:
        ValueError: If the name belongs to another function. A function whose module is reloaded replaces itself.
        TypeError: If the function's arguments do not match the declaration.
    """
    if not isinstance(name, str):
        raise TypeError(f"a name is missing: write @register_{kind.argument}('...') above {describe_value(name)}.")

    def register(function: F) -> F:
        entry, known = kind(name, function, **declared), registry.get(name)
        entry.check_declaration()
        if known is not None and _origin(known.function) != _origin(function):
            raise ValueError(f"{kind.argument} {name!r} is {identity(known.function)} already; choose another name.")
        registry[name] = entry
        return function

    return register


def _origin(function: Callable[..., Any]) -> tuple[Any, ...]:
    """Identifies a function when its file is loaded again, even under another module name."""
    plain = inspect.unwrap(function)
    cells = [cell.cell_contents for cell in plain.__closure__ or ()]
    line = plain.__code__.co_firstlineno if "<" in plain.__qualname__ else None  # of a lambda or a local function
    return plain.__qualname__, plain.__code__.co_filename, line, cells


def build(registry: Mapping[str, R], argument: str, name: str, options: Mapping[str, Any]) -> R:
    """Bind the function registered as `name` with options.

    Raises:
        ValueError: If the name is not registered, or the function refuses an option.
    """
    if name not in registry:
        raise ValueError(
            f"{argument} is {name!r}; it must be one of {', '.join(sorted(registry))}.{note_on_value(argument, name)}"
        )
    return registry[name].with_options(options)


def describe(part: Any) -> str:
    """Name a loss or an estimator with its options, identically in every process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)
