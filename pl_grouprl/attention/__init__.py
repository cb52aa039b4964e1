"""Attention over packed rows with shared prefixes, and how a transformers model is made to use it."""

from pl_grouprl.attention.patch import CallReport, SharedPrefix, shared_prefix
from pl_grouprl.attention.support import UnsupportedModelError, check_supported, find_decoder

__all__ = ["CallReport", "SharedPrefix", "UnsupportedModelError", "check_supported", "find_decoder", "shared_prefix"]
