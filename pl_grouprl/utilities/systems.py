"""What an operating system can do: refusals with the reason and the remedy, and limits."""

from __future__ import annotations

import sys
from contextlib import suppress


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


def max_open_files() -> int:
    """Most files that this process may have open, sockets included; 512 if the system does not say."""
    with suppress(ImportError):
        import resource

        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return sys.maxsize if limit == resource.RLIM_INFINITY else limit
    return 512
