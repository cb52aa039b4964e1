"""What this package reads of other libraries beyond their public API.

A new release that renames one of these breaks this file, and `tests/utilities/test_internals.py` says which name.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

# transformers


@cache
def cache_argument(forward: Callable[..., Any]) -> str | None:
    """The keyword of a transformers forward function for its cache, which differs by release and family.

    Args:
        forward: An unbound function, with or without decorators.

    Returns:
        The parameter annotated as a `Cache`, or else named as by `generate`; None if there is none.
    """
    from transformers.generation.utils import ALL_CACHE_NAMES

    parameters = inspect.signature(inspect.unwrap(forward)).parameters
    annotated = [name for name, one in parameters.items() if re.search(r"Cache\b", str(one.annotation))]
    return next(iter(annotated or [name for name in ALL_CACHE_NAMES[:1] if name in parameters]), None)


def holds_cache(arguments: Mapping[str, Any]) -> bool:
    """Whether a cache is among the arguments of a call, under any name."""
    from transformers.cache_utils import Cache

    return any(isinstance(value, Cache) for value in arguments.values())


def mark_adapted(model: Any, adapted: bool) -> None:
    """Tell transformers whether a model has PEFT's layers, so that `save_pretrained` saves those alone.

    Its own `add_adapter` asks for a newer PEFT than it needs: 5.24 for 0.22, before there was one.
    """
    model._hf_peft_config_loaded = adapted


def float32_parts(model: Any) -> frozenset[str]:
    """Parts of the names of weights that transformers keeps in float32 when it loads a model in half precision."""
    return frozenset(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
