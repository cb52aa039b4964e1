"""Runs the tests of every row of the fault matrix unattended, and prints the matrix with its figures.

    python -m tests.attacks                     # all rows: about an hour on two cores
    python -m tests.attacks --rows kill disk    # rows whose condition contains one of these words
    python -m tests.attacks --quick             # without tests marked slow

Each row runs in a separate process. A test reports a figure with `record_property("figure", ...)`. Exits with 1 if a
row failed, or ran nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.attacks.matrix import ROWS, Row

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 3600
"""Seconds that a row may take."""


@dataclass
class Result:
    """The result of a row: test cases by outcome, its duration, and what its tests measured."""

    row: Row
    passed: int = 0
    skipped: int = 0
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    figures: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether something ran and nothing failed."""
        return self.passed > 0 and not self.failed

    def __str__(self) -> str:
        counts = f"{self.passed} passed" + (f", {self.skipped} skipped" if self.skipped else "")
        lines = [f"{'ok    ' if self.good else 'FAILED'} {self.row.condition}", f"       -> {self.row.expected}"]
        lines.append(f"       {counts}, {len(self.failed)} failed, {self.seconds:.0f} s")
        return "\n".join([*lines, *(f"       - {figure}" for figure in self.figures), *self._failures()])

    def _failures(self) -> Iterable[str]:
        return (f"       ! {name}" for name in self.failed)


def run(row: Row, *, quick: bool) -> Result:
    """Run the tests of a row."""
    result, began = Result(row), time.monotonic()
    marks = "not gpu and not vllm" + (" and not slow" if quick else "")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-m", marks, "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run([*command, *row.tests], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
            output = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            output = f"took longer than {LIMIT} s"
        result.seconds = time.monotonic() - began
        if report.is_file():
            read_report(report, result)
        else:
            result.failed.append(output[-2000:])
    return result


def read_report(report: Path, result: Result) -> None:
    """Count the cases in a JUnit report, and collect their figures."""
    for case in ET.parse(report).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            result.skipped += 1
        else:
            result.passed += 1
        for entry in case.iter("property"):
            if entry.get("name") == "figure":
                result.figures.append(entry.get("value", ""))


def chosen(words: list[str]) -> list[Row]:
    """Rows whose condition contains one of the words; all rows if there are no words."""
    if not words:
        return list(ROWS)
    return [row for row in ROWS if any(re.search(re.escape(word), row.condition, re.IGNORECASE) for word in words)]


def main() -> int:
    """Run the chosen rows; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--rows", nargs="*", default=[], help="Run rows whose condition contains one of these words.")
    parser.add_argument("--quick", action="store_true", help="Leave out tests that are marked slow.")
    options = parser.parse_args()
    rows = chosen(options.rows)
    if not rows:
        parser.error(f"--rows {' '.join(options.rows)}: no condition has one of these words.")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    results = []
    for row in rows:
        results.append(run(row, quick=options.quick))
        print(results[-1], flush=True)
    good = sum(result.good for result in results)
    passed, failed = sum(r.passed for r in results), sum(len(r.failed) for r in results)
    print(f"{good} of {len(results)} rows hold; {passed} tests passed, {failed} failed.")
    return int(good < len(results))


if __name__ == "__main__":
    sys.exit(main())
