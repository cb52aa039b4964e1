"""Old names that keep working for one version."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved_names(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Make a module's `__getattr__` for names that have moved; using one is a `DeprecationWarning`.

    Args:
        module: `__name__` of the module.
        homes: For each old name its new one, with the module: `package.module.name`.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {homes[name]}.", DeprecationWarning, stacklevel=2)
        home, _, new_name = homes[name].rpartition(".")
        return getattr(importlib.import_module(home), new_name)

    return get
