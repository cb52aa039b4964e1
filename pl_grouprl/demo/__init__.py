"""Parts of the default runs only: synthetic tasks, and a base policy trained on demonstrations."""

from pl_grouprl.demo.tasks import Directory, MostFrequentDigit, TwoStepLookup, look_up
from pl_grouprl.demo.warm_start import WarmStartedPolicy

__all__ = ["Directory", "MostFrequentDigit", "TwoStepLookup", "WarmStartedPolicy", "look_up"]
