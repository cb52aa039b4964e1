"""Runs all benchmarks one after another, each in its own process, unattended and within a time limit.

`--profile gpu` is the one script for a GPU that is there for minutes: first the stages of `gpu_stages.py`, then
`pytest -m gpu`, then the other benchmarks in the time that is left. Each part has its own limit, or a share of the
remaining time, and is ended when that is over; its results so far are kept. A failing part is recorded, and the others
continue. DIR/summary.json is updated after every part. The exit code is 1 if any part failed or was ended. README.md
lists what a machine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
DRY_RUN = 10
"""How many times longer a dry run may take, on a CPU."""
GPU = ("--profile", "gpu")
CUDA = ("--device", "cuda")


@dataclass(frozen=True)
class Part:
    """One run of one benchmark.

    Attributes:
        command: Name of the benchmark; `tests` is `pytest -m gpu`.
        weight: Its share of the time that parts with a limit leave.
        options: Command line options besides the common ones.
        takes: The common options that it accepts: threads, clock, minutes.
        name: Name of its results, if the command occurs twice.
        expected: Seconds that it should take on an H100, from earlier runs or estimated; 0 for parts that fill their
            share.
        limit: Seconds after which it is ended, in place of a share.
    """

    command: str
    weight: float
    options: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("threads", "clock")
    name: str = ""
    expected: float = 0.0
    limit: float | None = None

    @property
    def label(self) -> str:
        """Name of the results."""
        return self.name or self.command


def _stage(name: str, expected: float, limit: float) -> Part:
    return Part("gpu-stages", 0, (name,), (), name, expected, limit)


ALL = ("threads", "clock", "minutes")
METHODS = ("--methods", "repeated, packed", "prefix_grouper", "cascade")
CPU_METHODS = (*METHODS, "repeated, one by one")
HEAD = ("--methods", "full logits", "token_scores", "token_scores, any head")
SHORT = ("--prefix", "512", "--rollout", "64")
WHOLE_4B = ("--model", "4b", "--rollouts", "sampled", "--steps", "2")
ARMS_4B = ("--arms", "ours, liger's layers", "TRL, padded, liger", "ours", "TRL, padded")
PROFILES = {
    "cpu": (
        Part("packing", 2, ("--batches", "20"), ()),
        Part("attention", 6, ("--prefix", "1024", "--rounds", "2")),
        Part("scoring", 8, (*SHORT, *CPU_METHODS, "--layers", "2", "--rounds", "2"), ALL),
        Part("update", 12, (*SHORT, *CPU_METHODS, "--layers", "2", "--rounds", "2"), ALL),
        Part("operators", 6, SHORT, ("threads",)),
        Part("head", 8, (*HEAD, "--tokens", "512", "--vocabulary", "32768", "--hidden", "512", "--rounds", "2")),
        Part("rollouts", 8, ("--prompts", "1", "--new-tokens", "32", "--rounds", "1")),
        Part("step", 6, ("--config", "grpo_pg", "--steps", "4", "--warm-up", "1", "--base-steps", "0")),
        Part("token-groups", 4, ("--rows", "64", "--length", "1024")),
        Part("growth", 10, (*SHORT, "--rounds", "2"), ALL),
        Part("sweep", 18, ("--prefixes", "512", "1024"), ALL),
        Part("critic-update", 16, ("--groups", "2", "--layers", "2", "--mini-batches", "2", "--rounds", "2"), ALL),
        Part("balance", 8, ("--rounds", "1"), ("clock",)),
    ),
    "gpu": (
        _stage("update-arms", 75, 110),
        _stage("decode", 60, 90),
        _stage("whole-step", 130, 170),
        Part("vs-trl", 0, (*WHOLE_4B, *ARMS_4B), (), "vs-trl-4b", expected=110, limit=150),
        Part("vs-trl", 0, ("--shapes", "1024:512:8"), (), expected=70, limit=110),
        _stage("first-step", 75, 110),
        Part("tests", 0, (), (), expected=100, limit=150),
        _stage("real-run", 90, 120),
        _stage("default-run", 45, 80),
        _stage("ceilings", 30, 60),
        _stage("compiled", 40, 80),
        _stage("hybrid", 40, 70),
        _stage("head-blocks", 20, 40),
        Part("attention", 8, (*CUDA, "--dtype", "bfloat16", "--prefix", "8192", "--rollout", "1024")),
        Part("scoring", 12, (*GPU, *METHODS), ALL),
        Part("update", 20, (*GPU, *METHODS), ALL),
        Part("operators", 9, GPU, ("threads",)),
        Part("head", 5, (*CUDA, "--dtype", "bfloat16", "--tokens", "8192", "--most-gib", "20")),
        Part("growth", 6, GPU, ALL),
        Part("sweep", 12, GPU, ALL),
        Part("rollouts", 15, (*CUDA, "--shape", "0.6b", "--dtype", "bfloat16", "--rounds", "2"), ALL),
        Part("step", 20, (*CUDA, "--config", "grpo_pg", "--steps", "10", "--base-steps", "0")),
        Part("critic-update", 13, (*GPU, "--rounds", "2"), ALL),
        Part("token-groups", 3, ("--rows", "128")),
    ),
}
"""The parts by importance; time that a part leaves over goes to the following ones."""

Outcome = Literal["done", "failed", "ended"]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all parts.

    Raises:
        SystemExit: With code 1, at the end, if any part failed or was ended.
    """
    options = parse(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    with exiting_on(signal.SIGTERM, signal.SIGHUP):  # so the running part is ended too
        summary = run_parts(options)
    print("\n" + "\n".join(f"{own['part']:14} {own['outcome']:7} {own['seconds']:6.1f} s" for own in summary))
    if any(own["outcome"] != "done" for own in summary):
        raise SystemExit(1)


@contextmanager
def exiting_on(*signals: signal.Signals) -> Iterator[None]:
    """Let signals end the program like an exception."""
    before = {own: signal.signal(own, lambda number, _: sys.exit(128 + number)) for own in signals}
    try:
        yield
    finally:
        for own, handler in before.items():
            signal.signal(own, handler)


def run_parts(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run one part after another; returns the outcomes, which are written after each part."""
    parts = chosen_parts(options)
    print(plan(parts), flush=True)
    started = time.monotonic()
    summary: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        left = max(60 * options.minutes - (time.monotonic() - started), 0.0)
        limit = limit_of(parts[number:], left)
        command = part_command(part, options, limit)
        print(f"\n=== {part.label}: at most {limit:.0f} of {left:.0f} s\n{' '.join(command)}", flush=True)
        record = run_limited(command, limit) if limit else {"outcome": "ended", "seconds": 0.0, "exit_code": None}
        summary.append({"part": part.label, **record})
        (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def chosen_parts(options: argparse.Namespace) -> list[Part]:
    """The profile's parts, or those of `--only`; a dry run has only those with a limit, which know tiny shapes."""
    parts = [part for part in PROFILES[options.profile] if not options.only or part.label in options.only]
    if not options.dry_run:
        return parts
    return [replace(part, limit=DRY_RUN * part.limit) for part in parts if part.limit is not None]


def plan(parts: Sequence[Part]) -> str:
    """What each part should take on an H100."""
    lines = [f"{part.label:14} {part.expected:4.0f} s expected on an H100, at most {part.limit:.0f}"
             for part in parts if part.limit is not None]  # fmt: skip
    expected = sum(part.expected for part in parts)
    return "\n".join([*lines, f"{'together':14} {expected:4.0f} s"] if lines else [])


def limit_of(parts: Sequence[Part], left: float) -> float:
    """Seconds of the first part: its own limit, or its share of what the limits of the others leave.

    The tests, which are late, keep their time in any case.
    """
    part, *later = parts
    tests = sum(own.limit or 0.0 for own in later if own.command == "tests")
    if part.limit is not None:
        return max(min(part.limit, left - tests), 0.0)
    reserved = sum(own.limit or 0.0 for own in later)
    return max(left - reserved, 0.0) * part.weight / sum(own.weight for own in parts)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    labels = sorted({part.label for parts in PROFILES.values() for part in parts})
    parser.add_argument("--profile", choices=list(PROFILES), default="cpu", help="sizes (default: cpu)")
    parser.add_argument("--minutes", type=float, default=9.0, help="total limit (default: 9)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=labels, metavar="NAME", help=f"of {', '.join(labels)}")
    parser.add_argument("--dry-run", action="store_true", help="gpu: run the stages on a CPU with tiny shapes")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: as many as PyTorch takes")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, with --threads 1"
    )
    options = parser.parse_args(arguments)
    if options.dry_run and options.profile != "gpu":
        parser.error("--dry-run needs --profile gpu.")
    options.minutes *= DRY_RUN if options.dry_run else 1
    there = {part.label for part in PROFILES[options.profile]}
    if missing := [name for name in options.only or () if name not in there]:
        parser.error(f"--only {' '.join(missing)} is not a part of --profile {options.profile}.")
    return options


def part_command(part: Part, options: argparse.Namespace, limit: float) -> list[str]:
    """The command line of a part. Parts with `--minutes` get slightly fewer than their limit, to finish in time."""
    if part.command == "tests":
        # Only the files that have such tests, as collecting all would take longer than running these.
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
        collect = ["--collect-only"] if options.dry_run else ["--durations=5"]
        return [sys.executable, "-m", "pytest", "-m", "gpu", "--continue-on-collection-errors", *collect, *files]
    common = {"clock": options.clock, "minutes": f"{0.6 * limit / 60:.3f}"}
    if options.threads:
        common["threads"] = str(options.threads)
    given = [word for name, value in common.items() if name in part.takes for word in (f"--{name}", value)]
    if options.dry_run:
        given.append("--dry-run")
    output = ("--output", str(options.output.resolve() / part.label))
    return [sys.executable, "-m", "benchmarks", part.command, *part.options, *given, *output]


def run_limited(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Run a command in its own process group, which is killed when the limit is over or this process ends.

    Each line that it prints is shown at once, after the seconds since it began.

    Returns:
        `outcome`, `seconds`, `exit_code`, and the last lines that it printed unless it is done.
    """
    started = time.monotonic()
    said: deque[str] = deque(maxlen=15)
    process = subprocess.Popen(  # noqa: S603
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        start_new_session=True, env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )  # fmt: skip

    def show() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line.rstrip())
            print(f"{time.monotonic() - started:7.1f} {said[-1]}", flush=True)

    reader = threading.Thread(target=show, daemon=True)
    reader.start()
    outcome: Outcome = "ended"
    try:
        outcome = "failed" if process.wait(max(limit, 1.0)) else "done"
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):  # child processes of the part may still run
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    reader.join(10.0)  # a process that left the group may still hold the pipe
    record: dict[str, Any] = {"outcome": outcome, "seconds": time.monotonic() - started, "exit_code": code}
    if outcome != "done":
        print(outcome, flush=True)
        record["last_lines"] = list(said)
    return record
