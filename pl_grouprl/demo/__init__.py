"""Parts of the default run only: a synthetic task, and a base policy trained on demonstrations."""

from pl_grouprl.demo.digits import MostFrequentDigit
from pl_grouprl.demo.warm_start import WarmStartedPolicy

__all__ = ["MostFrequentDigit", "WarmStartedPolicy"]
