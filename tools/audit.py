"""Lists known vulnerabilities of the packages in this environment, with `pip-audit`.

    python tools/audit.py --pip-audit .venv-audit/bin/pip-audit      # what `make audit` runs

Exits with 0 if every package was audited and each vulnerability has a note in `known_holes.txt`, 1 if one has none, and
2 if packages were not audited: `pip-audit` itself reports "No known vulnerabilities found" and exits with 0 if its
database knows none of the packages, as can happen with a registry mirror.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

KNOWN = Path(__file__).with_name("known_holes.txt")
OWN = "pl-grouprl"


class NotAuditedError(Exception):
    """`pip-audit` gave no report."""


def installed() -> list[str]:
    """The packages of this environment as `name==version`, without local version suffixes (`+cpu`)."""
    found = {dist.metadata["Name"]: dist.version.partition("+")[0] for dist in distributions()}
    return sorted(f"{name}=={version}" for name, version in found.items() if name != OWN)


def read_notes(text: str) -> dict[str, str]:
    """Read the known vulnerabilities, each with the reason why it is harmless here.

    Args:
        text: Lines `ID reason`; empty lines and lines that begin with # are skipped.

    Raises:
        ValueError: If an id has no reason, or appears twice.
    """
    notes: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        hole, _, reason = line.strip().partition(" ")
        if len(reason.split()) < 3 or hole in notes:
            raise ValueError(f"known_holes.txt, line {number}: {hole} must have exactly one line, with a reason.")
        notes[hole] = reason.strip()
    return notes


def run_pip_audit(command: str, packages: Sequence[str]) -> dict[str, Any]:
    """Run `pip-audit` on a list of packages.

    Raises:
        NotAuditedError: If it gave no report.
    """
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(packages))
        file.flush()
        options = ["--requirement", file.name, "--no-deps", "--disable-pip", "--format", "json"]
        done = subprocess.run(  # noqa: S603 (its path comes from the Makefile)
            [command, *options, "--progress-spinner", "off"], capture_output=True, text=True, check=False
        )
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        reason = (done.stderr.strip().splitlines() or ["no error output"])[-1]
        raise NotAuditedError(f"pip-audit gave no report (exit code {done.returncode}): {reason}") from None
    return report


def judge(report: dict[str, Any], notes: dict[str, str], packages: Iterable[str]) -> tuple[list[str], list[str]]:
    """Find vulnerabilities without a note, and packages that were not audited.

    Args:
        report: Output of `pip-audit --format json`.
        notes: Result of `read_notes`.
        packages: The packages that should have been audited.

    Returns:
        The vulnerabilities without a note, and the packages that were not audited.
    """
    audited, holes = set(), []
    for package in report["dependencies"]:
        if "skip_reason" in package:
            continue
        name = f"{package['name']}=={package['version']}"
        audited.add(_canonical(name))
        for hole in package["vulns"]:
            if not {hole["id"], *hole.get("aliases", ())} & notes.keys():
                fixed = ", ".join(hole.get("fix_versions", ())) or "no version yet"
                holes.append(f"{name}: {hole['id']}, fixed in {fixed}")
    return holes, [name for name in packages if _canonical(name) not in audited]


def _canonical(requirement: str) -> str:
    return requirement.lower().replace("_", "-").replace(".", "-")


def main(arguments: Sequence[str] | None = None) -> int:
    """Audit, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pip-audit", default="pip-audit", help="the command")
    parser.add_argument("--known", type=Path, default=KNOWN, help="file of known vulnerabilities")
    options = parser.parse_args(arguments)
    packages = installed()
    try:
        notes = read_notes(options.known.read_text(encoding="utf-8"))
        holes, missed = judge(run_pip_audit(options.pip_audit, packages), notes, packages)
    except NotAuditedError as error:
        print(f"NOT AUDITED: {error}.")
        return 2
    for hole in holes:
        print(f"HOLE: {hole}. Upgrade, or explain in {options.known.name} why it is harmless here.")
    audited = len(packages) - len(missed)
    print(f"{audited} of {len(packages)} packages audited; {len(holes)} holes without a note, {len(notes)} notes.")
    if missed:
        print(f"NOT AUDITED: {', '.join(missed)}. The database does not know them, or could not be reached.")
    return 1 if holes else 2 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
