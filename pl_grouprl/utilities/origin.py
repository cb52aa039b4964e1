"""Which class of module a checkpoint is of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

PACKAGE = __name__.partition(".")[0]


def lineage(module: Any) -> list[str]:
    """Names of a module's class and of those it is derived from, up to the algorithm of this package, which is last.

    A module that is none of this package's is its class alone.
    """
    classes = [cls for cls in type(module).__mro__ if isinstance(cls, type)]
    for place, cls in enumerate(classes):
        if cls.__module__.partition(".")[0] == PACKAGE:
            return [derived.__name__ for derived in classes[: place + 1]]
    return [type(module).__name__]


def compare_lineage(module: Any, then: Sequence[str] | None, what: str) -> None:
    """Refuse a checkpoint of another algorithm. Its subclasses count as the algorithm.

    Args:
        module: What the checkpoint is to be loaded into.
        then: The `lineage` that the checkpoint notes; None where it notes none.
        what: How to call the checkpoint.

    Raises:
        ValueError: With both classes.
    """
    if then and then[-1] != lineage(module)[-1]:
        raise ValueError(
            f"{what} is of {_title(then)}, and the module is {_title(lineage(module))}; a checkpoint belongs to the "
            f"algorithm that wrote it. Load it with {then[-1]}, or begin with the policy that its run exported "
            "(ExportPolicy): pass that folder as the policy."
        )


def describe_misfit(module: Any, then: Sequence[str] | None, reason: str) -> str:
    """Say what a checkpoint is of whose weights do not fit a module, before torch's reason."""
    of = f"of {_title(then)}" if then else f"of a module that is none of {PACKAGE}'s, or of an older version"
    return (
        f"the weights of the checkpoint do not fit. It is {of}, and the module is {_title(lineage(module))} with other "
        "models than the checkpoint's: pass the policy, the critic and the adapter that it was trained with. "
        f"{reason}"
    )


def _title(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} ({names[-1]})"
