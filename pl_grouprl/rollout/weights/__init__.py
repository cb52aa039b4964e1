"""Weights on their way to a sampler: cut into buckets, and compared by checksums."""

from pl_grouprl.rollout.weights.buckets import buckets
from pl_grouprl.rollout.weights.checksum import checksum

__all__ = ["buckets", "checksum"]
