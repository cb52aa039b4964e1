"""The interface of an environment."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from typing import Any


class Environment(ABC):  # noqa: B024 (recognized by its methods)
    """Any class with a method `reset`, which begins an episode; its other public methods are tools.

    `reset(**row)` returns None, or text that is appended to the last message of the prompt. `get_reward()`, if defined,
    adds a reward. Like tools, environments are the user's code and run with the user's rights.

    Inheriting from this class is optional: environments written for TRL's `GRPOTrainer` work unchanged.
    """

    @classmethod
    def __subclasshook__(cls, other: type) -> Any:
        return any("reset" in vars(base) for base in other.__mro__) if cls is Environment else NotImplemented


EnvironmentFactory = Callable[[], Environment] | Callable[..., Any]
"""A class, a function that returns an instance, or (in YAML) a class with its arguments."""
