"""`python -m pl_grouprl.report RUN... [--output FILE]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pl_grouprl.report.page import write_report
from pl_grouprl.report.run import read_runs


def main(args: Sequence[str] | None = None) -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        "python -m pl_grouprl.report", description="Write one HTML page of a run, or of several side by side."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/grpo_pg/version_0")
    parser.add_argument("--output", default="report.html", help="the file to write (default: %(default)s)")
    options = parser.parse_args(args)
    try:
        path = write_report(read_runs(options.runs), Path(options.output))
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(f"Report: {path}")


if __name__ == "__main__":
    main()
