"""What the default run needs and no other: a task made up on the spot, and a base policy trained on demonstrations."""

from pl_grouprl.demo.digits import MostFrequentDigit
from pl_grouprl.demo.warm_start import WarmStartedPolicy

__all__ = ["MostFrequentDigit", "WarmStartedPolicy"]
