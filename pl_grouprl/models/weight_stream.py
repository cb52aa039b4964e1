"""Moved to `pl_grouprl.sync.stream`."""

from pl_grouprl.utilities.moved import moved

_NAMES = ("adapter_config", "adapter_weights", "base_weights", "checkpoint_weights")

__getattr__ = moved(__name__, {name: f"pl_grouprl.sync.stream.{name}" for name in _NAMES})
