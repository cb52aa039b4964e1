"""Packages that a benchmark does without where they are not installed."""

from __future__ import annotations

from importlib.util import find_spec


def missing(package: str, distribution: str = "") -> str | None:
    """What to say of a package that is not installed, or None where it is.

    Args:
        package: As it is imported.
        distribution: As it is installed, where that is another name.
    """
    if find_spec(package) is not None:
        return None
    name = distribution or package
    return f"{name} is not installed: pip install {name}"
