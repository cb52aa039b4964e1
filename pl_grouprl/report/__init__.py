"""One HTML page of a run, or of several side by side: `python -m pl_grouprl.report RUN...`."""

from pl_grouprl.report.page import write_report
from pl_grouprl.report.run import RecordedRun, read_run

__all__ = ["RecordedRun", "read_run", "write_report"]
