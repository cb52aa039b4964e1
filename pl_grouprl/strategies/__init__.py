"""Access to weights and gradients under each distributed strategy."""

from pl_grouprl.strategies.choice import support_of
from pl_grouprl.strategies.support import StrategySupport

__all__ = ["StrategySupport", "support_of"]
