"""Moved to `pl_grouprl.training.loss_sums`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(__name__, {"LossTerms": "pl_grouprl.training.loss_sums.LossSums"})
