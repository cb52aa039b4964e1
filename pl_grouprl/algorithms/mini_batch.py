"""Moved to `pl_grouprl.training.micro_batch`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(__name__, {"MiniBatch": "pl_grouprl.training.micro_batch.MicroBatch"})
