"""What differs among the strategies that a run can be spread by: where whole weights and gradients are found."""

from pl_grouprl.strategies.support import StrategySupport, support_of

__all__ = ["StrategySupport", "support_of"]
