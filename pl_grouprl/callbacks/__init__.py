"""Lightning callbacks, usable in any LightningModule."""

from pl_grouprl.callbacks.checkpoints import SafeCheckpoint, StoppedBySignal
from pl_grouprl.callbacks.completions_table import CompletionsTable
from pl_grouprl.callbacks.curriculum import Curriculum
from pl_grouprl.callbacks.defaults import ValidateAtStart, default_callbacks
from pl_grouprl.callbacks.export_policy import ExportPolicy
from pl_grouprl.callbacks.progress_bar import RunProgressBar
from pl_grouprl.callbacks.run_summary import RunSummary, WeightSummary
from pl_grouprl.callbacks.shared_prefix import SharedPrefixCallback
from pl_grouprl.callbacks.token_groups import CompressionRatio, TokenGroupMonitor, TokenGroupStatistics
from pl_grouprl.distributed.lost_ranks import RankWatchdog

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
