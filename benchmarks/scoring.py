"""Scoring groups of rollouts, as for old log-probabilities: forward without gradient, prompt shared and repeated.

README.md says how to read the table.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.compare import Comparison
from benchmarks.passes import run


def main(arguments: Sequence[str] | None = None) -> list[Comparison]:
    """Parse the command line, measure, print, and write JSON and PNG."""
    return run("scoring", __doc__, arguments)
