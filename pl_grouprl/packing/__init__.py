"""Packed rows: which tokens share a prefix, and how groups of rollouts are laid out for one decoder call."""

from pl_grouprl.packing.batch import ScoringBatch, Sharing, TruncatedGroups, pack, truncate_rollouts
from pl_grouprl.packing.layout import Segment, SharedPrefixLayout, draw_forest, repeat_rows
from pl_grouprl.packing.plan import (
    Branch,
    RowPlan,
    SplitGroup,
    SplitShape,
    balance,
    imbalance,
    plan_repeated_rows,
    plan_rows,
)
from pl_grouprl.packing.trie import Trie, build_trie

__all__ = [
    "Branch",
    "RowPlan",
    "ScoringBatch",
    "Segment",
    "SharedPrefixLayout",
    "Sharing",
    "SplitGroup",
    "SplitShape",
    "Trie",
    "TruncatedGroups",
    "balance",
    "build_trie",
    "draw_forest",
    "imbalance",
    "pack",
    "plan_repeated_rows",
    "plan_rows",
    "repeat_rows",
    "truncate_rollouts",
]
