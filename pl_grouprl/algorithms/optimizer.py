"""Moved to `pl_grouprl.training.optimizer`."""

from pl_grouprl.utilities.moved import moved

__getattr__ = moved(
    __name__,
    {
        "OptimizerConfig": "pl_grouprl.training.optimizer.OptimizerConfig",
        "build_optimizer": "pl_grouprl.training.optimizer.build_optimizer",
    },
)
