"""Packed rows: which tokens share a prefix, and how groups of rollouts are laid out for one decoder call."""

from pl_grouprl.packing.balance import balance, imbalance
from pl_grouprl.packing.batch import ScoringBatch, Sharing, pack
from pl_grouprl.packing.drawing import draw_forest
from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.packing.repeat import repeat_rows
from pl_grouprl.packing.rows import RowPlan, plan_repeated_rows, plan_rows
from pl_grouprl.packing.splits import Branch, SplitGroup, SplitShape
from pl_grouprl.packing.trie import Trie, build_trie
from pl_grouprl.packing.truncation import TruncatedGroups, truncate_rollouts

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
