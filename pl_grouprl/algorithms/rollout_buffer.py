"""Moved to `pl_grouprl.training.rollout_buffer`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(__name__, {"RolloutBuffer": "pl_grouprl.training.rollout_buffer.RolloutBuffer"})
