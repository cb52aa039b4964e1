"""Attention over packed rows with shared prefixes, and how a transformers model is made to use it."""

from pl_grouprl.attention.parity import check_parity, compare_paths
from pl_grouprl.attention.parity_report import LayerParity, ParityError, ParityReport
from pl_grouprl.attention.patch import CallReport, SharedPrefix, in_force, shared_prefix, sharing_paused
from pl_grouprl.attention.support import UnsupportedModelError, check_supported, find_backbone, find_decoder

__all__ = [
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
    "shared_prefix",
    "sharing_paused",
]
