"""Refuses what an operating system cannot do, with the reason and the remedy."""

from __future__ import annotations

import sys


def require_system(possible: bool, what: str, why: str, instead: str) -> None:
    """Refuse an option that this operating system cannot honour.

    Args:
        possible: Whether it can.
        what: The option and its value, or the class.
        why: What the system lacks.
        instead: The remedy.

    Raises:
        ValueError: With all of these and the name of the system, if it cannot.
    """
    if not possible:
        raise ValueError(f"{what} does not work on {sys.platform}: {why}; {instead}.")
