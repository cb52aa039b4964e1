"""Runs everything that this machine can check, unattended: one line per part, and exit code 1 if one fails.

    python tools/check_everything.py                       # or: make test-all; two and a half hours or so
    python tools/check_everything.py --only slow models    # parts whose names contain one of these
    python tools/check_everything.py --list

The others go on if a part fails; its output is in its file under --logs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WORKERS = ("--numprocesses", "2", "--dist", "worksteal")
COUNTS = re.compile(r"^=*\s*(\d+ \w+(?:, \d+ \w+)*) in [\d.]+s", re.MULTILINE)
"""Matches pytest's last line."""


@dataclass(frozen=True)
class Part:
    """A command with its name.

    Attributes:
        name: Displayed name.
        command: The command, run in the root of the repository.
        needs_gpu: Whether it is skipped without a GPU.
    """

    name: str
    command: tuple[str, ...]
    needs_gpu: bool = False


def parts(python: str = sys.executable) -> list[Part]:
    """All parts, quick ones first; the rows of the table of strategies are a separate part."""
    pytest = (python, "-m", "pytest")
    rows = ("--deselect", "tests/strategies/test_table.py::test_row")
    return [
        Part("fast tests", ("make", "test")),
        Part("docs", ("make", "docs")),
        Part("demo", ("make", "demo")),
        Part("models table", (python, "tools/models_table.py", "--check", "docs/models.md")),
        Part("vLLM", ("make", "test-vllm")),
        Part("verifiers", ("make", "test-verifiers")),
        Part("strategies", ("make", "strategies")),
        Part("slow tests", (*pytest, "-m", "slow and not gpu and not vllm", *rows, *WORKERS)),
        Part("oldest", ("make", "test-oldest")),
        Part("newest", ("make", "test-newest")),
        Part("GPU tests", (*pytest, "-m", "gpu and not vllm"), needs_gpu=True),
    ]


def has_gpu() -> bool:
    """Whether torch sees a CUDA device."""
    import torch

    return torch.cuda.is_available()


def run(part: Part, log: Path) -> bool:
    """Run a part, writing its output to a file; print its line."""
    print(f"{part.name:14}", end=" ", flush=True)
    if part.needs_gpu and not has_gpu():
        print("not run here: no GPU", flush=True)
        return True
    started = time.monotonic()
    with log.open("w") as output:
        code = subprocess.run(  # noqa: S603 (the commands are those above)
            part.command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    seconds = time.monotonic() - started
    counts = COUNTS.findall(log.read_text(errors="replace"))
    ended = "passed" if code == 0 else f"FAILED with exit code {code}, see {log}"
    print(f"{ended} {seconds:6.0f} s", *counts[-1:], sep="  ", flush=True)
    return code == 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="parts whose names contain one of these")
    parser.add_argument(
        "--logs", type=Path, default=ROOT / "runs" / "test-all", help="folder for the output of the parts"
    )
    parser.add_argument("--list", action="store_true", help="print the parts and their commands")
    options = parser.parse_args(arguments)
    chosen = [part for part in parts() if not options.only or any(word in part.name for word in options.only)]
    if options.list:
        print(*(f"{part.name:14} {' '.join(part.command)}" for part in chosen), sep="\n")
        return 0
    if not chosen:
        parser.error(f"--only {' '.join(options.only)} matches no part; --list prints them.")
    options.logs.mkdir(parents=True, exist_ok=True)
    passed = [run(part, options.logs / f"{part.name.replace(' ', '-')}.txt") for part in chosen]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
