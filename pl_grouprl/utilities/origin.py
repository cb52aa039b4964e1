"""Records which module class wrote a checkpoint, and refuses checkpoints of other algorithms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
