"""Packed rows: which tokens share a prefix, and how groups of rollouts are laid out for one decoder call."""

from pl_grouprl.packing.batch import ScoringBatch, Sharing, pack
from pl_grouprl.packing.cost import ModelCost
from pl_grouprl.packing.layout import Segment, SharedPrefixLayout
from pl_grouprl.packing.repeat import repeat_rows
from pl_grouprl.packing.shorten import ShortenedGroups, shorten

__all__ = [
    "ModelCost",
    "ScoringBatch",
    "Segment",
    "SharedPrefixLayout",
    "Sharing",
    "ShortenedGroups",
    "pack",
    "repeat_rows",
    "shorten",
]
