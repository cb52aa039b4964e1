"""Lightning callbacks, usable in any LightningModule."""

from pl_grouprl.callbacks.completions_table import CompletionsTable
from pl_grouprl.callbacks.curriculum import Curriculum
from pl_grouprl.callbacks.defaults import default_callbacks
from pl_grouprl.callbacks.export_policy import ExportPolicy
from pl_grouprl.callbacks.progress_bar import RunProgressBar
from pl_grouprl.callbacks.run_summary import RunSummary
from pl_grouprl.callbacks.safe_checkpoint import SafeCheckpoint, StoppedBySignal
from pl_grouprl.callbacks.shared_prefix import SharedPrefixCallback
from pl_grouprl.callbacks.token_groups import CompressionRatio, TokenGroupMonitor, TokenGroupStatistics
from pl_grouprl.callbacks.validate_at_start import ValidateAtStart
from pl_grouprl.callbacks.weight_summary import WeightSummary
from pl_grouprl.utilities.rank_watchdog import RankWatchdog

__all__ = [
    "CompletionsTable",
    "CompressionRatio",
    "Curriculum",
    "ExportPolicy",
    "RankWatchdog",
    "RunProgressBar",
    "RunSummary",
    "SafeCheckpoint",
    "SharedPrefixCallback",
    "StoppedBySignal",
    "TokenGroupMonitor",
    "TokenGroupStatistics",
    "ValidateAtStart",
    "WeightSummary",
    "default_callbacks",
]
