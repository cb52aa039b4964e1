"""Operations on tools and environments, and the errors of those that do not return."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from pl_grouprl.episodes.environment_host import EnvironmentHost


class OperationError(RuntimeError):
    """An operation did not return; the message continues a sentence that begins with its name."""


class OperationTimeoutError(OperationError):
    """It took too long; if `is_stuck`, it may still be running."""

    def __init__(self, message: str, *, is_stuck: bool) -> None:
        super().__init__(message)
        self.is_stuck = is_stuck


class OperationCancelledError(OperationError):
    """It is async and raised `CancelledError`, though nothing had cancelled it."""


class OperationExitError(OperationError):
    """Its process ended."""


@dataclass(frozen=True)
class Operation:
    """A call of a method of `EnvironmentHost`.

    Attributes:
        name: Name of the tool or environment, for errors.
        method: Name of the method.
        arguments: Its arguments.
        limit: Time limit in seconds; None is no limit.
        is_async: Whether it calls an async function, so that it needs an event loop.
        number: Number of the episode's environment, if any; sync operations with the same number run in order.
        uses_environment: Whether it uses that environment, which is dropped if the operation does not end.
    """

    name: str
    method: str
    arguments: tuple[Any, ...]
    limit: float | None
    is_async: bool = False
    number: int | None = None
    uses_environment: bool = True

    def coroutine(self, host: EnvironmentHost) -> Coroutine[Any, Any, Any]:
        """The coroutine that runs it."""
        running: Coroutine[Any, Any, Any] = getattr(host, self.method)(*self.arguments)
        return running
