"""The backends by name, and how `auto` chooses.

Legend: T packed tokens, S of them that run, H query heads, K key/value heads, D head size of keys, V of values.
"""

from __future__ import annotations

from torch import Tensor

from pl_grouprl.attention.backends.backend import Backend
from pl_grouprl.attention.backends.cascade import CASCADE
from pl_grouprl.attention.backends.flex import FLEX
from pl_grouprl.attention.backends.prefix_grouper import PREFIX_GROUPER
from pl_grouprl.attention.backends.reference import REFERENCE
from pl_grouprl.attention.backends.rule import AttentionRule
from pl_grouprl.packing import SharedPrefixLayout


def get_backend(name: str, argument: str = "backend") -> Backend:
    """Find a backend by name.

    Raises:
        ValueError: If the name is unknown; mentions the caller's argument.
    """
    if name not in BACKENDS:
        raise ValueError(f"{argument} is {name!r}; choose one of {', '.join(sorted(BACKENDS))}.")
    return BACKENDS[name]


def register_backend(backend: Backend) -> None:
    """Register a backend under its name.

    Args:
        backend: Must have a new name. `auto` chooses it where its `preference` is highest.

    Raises:
        ValueError: If the name is taken.
    """
    if backend.name in BACKENDS:
        raise ValueError(f"there is an attention backend named {backend.name!r} already; choose another name.")
    BACKENDS[backend.name] = backend


def choose(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rule: AttentionRule,
    compiled: bool = False,
    layout: SharedPrefixLayout | None = None,
) -> Backend:
    """Choose the backend that `auto` runs for a layer: of those that serve it, the one with the highest preference.

    Args:
        query: Shape [1, H, S, D].
        key: Shape [1, K, T, D].
        value: Shape [1, K, T, V].
        rule: How the layer attends.
        compiled: Whether the layer is compiled.
        layout: Layout of the row; None leaves out backends that cannot run every layout.
    """
    candidates = [
        (preference, backend)
        for backend in BACKENDS.values()
        if (backend.in_compiled_layers or not compiled)
        and backend.runs(layout)
        and (preference := backend.preference(query, key, value, rule)) is not None
    ]
    ordered = sorted(candidates, key=lambda entry: -entry[0])
    return next(backend for _, backend in ordered if backend.refusal(query, key, value, rule) is None)


def _attend(query: Tensor, key: Tensor, value: Tensor, layout: SharedPrefixLayout, rule: AttentionRule) -> Tensor:
    return choose(query, key, value, rule, layout=layout)(query, key, value, layout, rule)


AUTO = Backend("auto", _attend, choice=choose)
ORACLE = REFERENCE
"""The backend that all others are compared with."""

BACKENDS = {backend.name: backend for backend in (AUTO, CASCADE, FLEX, PREFIX_GROUPER, REFERENCE)}
