"""Packed rows: which tokens share a prefix, and how groups of rollouts are laid out for one decoder call."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from pl_grouprl.packing.balance import balance, imbalance
from pl_grouprl.packing.batch import ScoringBatch, Sharing, pack
from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.packing.repeat import repeat_rows
from pl_grouprl.packing.rows import RowPlan, plan_repeated_rows, plan_rows
from pl_grouprl.packing.shorten import ShortenedGroups, shorten
from pl_grouprl.packing.splits import Branch, SplitGroup
from pl_grouprl.packing.trie import Trie, build_trie

__all__ = [
    "Branch",
    "RowPlan",
    "ScoringBatch",
    "Segment",
    "SharedPrefixLayout",
    "Sharing",
    "ShortenedGroups",
    "SplitGroup",
    "Trie",
    "balance",
    "build_trie",
    "imbalance",
    "pack",
    "plan_repeated_rows",
    "plan_rows",
    "repeat_rows",
    "shorten",
]


def __getattr__(name: str) -> Any:
    """`ModelCost` has moved to `pl_grouprl.models`; this name will be removed in the next version."""
    if name != "ModelCost":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("pl_grouprl.packing.ModelCost is now pl_grouprl.models.ModelCost.", DeprecationWarning, stacklevel=2)
    return importlib.import_module("pl_grouprl.models").ModelCost
