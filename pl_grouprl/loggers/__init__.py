"""Tables in Lightning's loggers, and a logger for trackio."""

from pl_grouprl.loggers.tables import Table, log_table
from pl_grouprl.loggers.trackio import TrackioLogger

__all__ = ["Table", "TrackioLogger", "log_table"]
