"""Tests that need a newer package than the oldest one that the project supports."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def at_least(package: str, oldest: str) -> bool:
    """Whether the installed version of a package is this one or a later one."""
    return Version(version(package)) >= Version(oldest)


def needs(package: str, oldest: str) -> pytest.MarkDecorator:
    """Skip a test where an older version of a package is installed."""
    return pytest.mark.skipif(not at_least(package, oldest), reason=f"needs {package} {oldest}")
