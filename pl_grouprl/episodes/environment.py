"""What an environment is."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any


class Environment(ABC):  # noqa: B024 (a class needs not inherit from it)
    """Any class with a method `reset`; see `pl_grouprl.episodes.environments`.

    A class need not inherit from it: one written for TRL's `GRPOTrainer` is an `Environment` as it is.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return any("reset" in vars(base) for base in other.__mro__) if cls is Environment else NotImplemented


EnvironmentFactory = Callable[[], Environment] | Callable[..., Any]
"""A class, a function that returns an instance, or (in YAML) a class with its arguments."""
