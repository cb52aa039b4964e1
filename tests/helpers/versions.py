"""Tests that need a newer package than the oldest one that the project supports."""

from collections.abc import Iterable
from importlib.metadata import version

import pytest
from packaging.version import Version

STATEFUL = ("lfm2", "qwen3_5", "qwen3_next", "qwen4_exp")
"""Model types whose layers carry a state; before transformers 5.21 they are refused."""


def skip_refused_models(items: Iterable[pytest.Item]) -> None:
    """Skip the tests that are parametrized with models which the installed transformers cannot share."""
    if at_least("transformers", "5.21"):
        return
    for item in items:
        parameters = item.name.partition("[")[2]
        if any(model in parameters for model in STATEFUL):
            item.add_marker(pytest.mark.skip(reason="needs transformers 5.21, for layers with a state"))


def at_least(package: str, oldest: str) -> bool:
    """Whether the installed version of a package is this one or a later one."""
    return Version(version(package)) >= Version(oldest)


def needs(package: str, oldest: str) -> pytest.MarkDecorator:
    """Skip a test where an older version of a package is installed."""
    return pytest.mark.skipif(not at_least(package, oldest), reason=f"needs {package} {oldest}")
