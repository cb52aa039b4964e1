"""Attention over packed rows with shared prefixes, and the patch that makes a transformers model use it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pl_grouprl.attention.backends.choice import register_backend
from pl_grouprl.attention.backends.interface import AttentionRule, Backend
from pl_grouprl.attention.patch import CallReport, SharedPrefix, in_force, shared_prefix, sharing_paused
from pl_grouprl.attention.support import UnsupportedModelError, check_supported, find_backbone, find_decoder

if TYPE_CHECKING:
    from pl_grouprl.checks import LayerParity, ParityError, ParityReport, check_parity, compare_paths

__all__ = [
    "AttentionRule",
    "Backend",
    "CallReport",
    "LayerParity",
    "ParityError",
    "ParityReport",
    "SharedPrefix",
    "UnsupportedModelError",
    "check_parity",
    "check_supported",
    "compare_paths",
    "find_backbone",
    "find_decoder",
    "in_force",
    "register_backend",
    "shared_prefix",
    "sharing_paused",
]

_LAZY = {"LayerParity", "ParityError", "ParityReport", "check_parity", "compare_paths"}


def __getattr__(name: str) -> Any:
    """Import names of `pl_grouprl.checks` lazily, since it builds on this package."""
    if name in _LAZY:
        return getattr(importlib.import_module("pl_grouprl.checks"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
