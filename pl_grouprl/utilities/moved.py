"""Old names that still work for one version, with a warning."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(module: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Create the `__getattr__` of a module whose names have moved.

    Args:
        module: The old module.
        homes: Full new name, `package.module.name`, of each old name.

    Returns:
        A function that imports the new name and emits a `DeprecationWarning`.
    """

    def resolve(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warnings.warn(f"{module}.{name} is now {homes[name]}.", DeprecationWarning, stacklevel=2)
        home, _, new_name = homes[name].rpartition(".")
        return getattr(importlib.import_module(home), new_name)

    return resolve
