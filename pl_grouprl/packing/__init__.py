"""Packed rows: which tokens share a prefix, and how groups of rollouts are laid out for one decoder call."""

from pl_grouprl.packing.batch import ScoringBatch, Sharing, pack
from pl_grouprl.packing.cost import ModelCost
from pl_grouprl.packing.layout import Segment, SharedPrefixLayout

__all__ = ["ModelCost", "ScoringBatch", "Segment", "SharedPrefixLayout", "Sharing", "pack"]
