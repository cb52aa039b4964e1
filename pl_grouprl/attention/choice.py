"""The backends by name, and which of them `auto` runs."""

from __future__ import annotations

from torch import Tensor

from pl_grouprl.attention.backend import Backend
from pl_grouprl.attention.cascade import CASCADE
from pl_grouprl.attention.flex import FLEX
from pl_grouprl.attention.prefix_grouper import PREFIX_GROUPER
from pl_grouprl.attention.reference import REFERENCE
from pl_grouprl.packing import SharedPrefixLayout


def get_backend(name: str) -> Backend:
    """Find a backend by name.

    Raises:
        ValueError: If there is none of that name.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend is {name!r}; choose one of {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[name]


def choose(query: Tensor, key: Tensor, value: Tensor) -> str:
    """What `auto` runs: `cascade` wherever it can, otherwise (float32 on CUDA) `flex`."""
    return "cascade" if CASCADE.refusal(query, key, value) is None else "flex"


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, scale: float) -> Tensor:
    return BACKENDS[choose(query, key, value)](query, key, value, layout, scale)


AUTO = Backend("auto", _attend)
BACKENDS = {backend.name: backend for backend in (AUTO, CASCADE, FLEX, PREFIX_GROUPER, REFERENCE)}
