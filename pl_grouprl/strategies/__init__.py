"""What differs among the strategies that a run can be spread by: where whole weights and gradients are found."""

from pl_grouprl.strategies.choice import support_of
from pl_grouprl.strategies.support import StrategySupport

__all__ = ["StrategySupport", "support_of"]
