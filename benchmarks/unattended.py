"""Runs all benchmarks one after another, each in its own process, unattended and within a time limit.

Each part gets a share of the remaining time and is ended when that is over; its results so far are kept. A failing
part is recorded, and the others continue. DIR/summary.json is updated after every part. The exit code is 1 if any part
failed or was ended. README.md lists what a machine needs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
GPU = ("--profile", "gpu")
CUDA = ("--device", "cuda")


@dataclass(frozen=True)
class Part:
    """One run of one benchmark.

    Attributes:
        command: Name of the benchmark.
        weight: Its share of the time.
        options: Command line options besides the common ones.
        takes: The common options that it accepts: threads, clock, minutes.
        name: Name of its results, if the command occurs twice.
    """

    command: str
    weight: float
    options: tuple[str, ...] = ()
    takes: tuple[str, ...] = ("threads", "clock")
    name: str = ""

    @property
    def label(self) -> str:
        """Name of the results."""
        return self.name or self.command


ALL = ("threads", "clock", "minutes")
METHODS = ("--methods", "repeated, packed", "prefix_grouper", "cascade")
CPU_METHODS = (*METHODS, "repeated, one by one")
HEAD = ("--methods", "full logits", "token_scores", "token_scores, any head")
SHORT = ("--prefix", "512", "--rollout", "64")
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
    parts = [part for part in PROFILES[options.profile] if not options.only or part.command in options.only]
    commands: list[tuple[str, float, Part | None]] = [(part.label, part.weight, part) for part in parts]
    if options.tests:
        commands.append(("tests", 20.0, None))
    end = time.monotonic() + 60 * options.minutes
    summary: list[dict[str, Any]] = []
    for number, (label, weight, part) in enumerate(commands):
        left = max(end - time.monotonic(), 0.0)
        limit = left * weight / sum(other for _, other, _ in commands[number:])
        command = test_command() if part is None else part_command(part, options, limit)
        print(f"\n=== {label}: at most {limit:.0f} of {left:.0f} s\n{' '.join(command)}", flush=True)
        record = run_limited(command, limit) if left else {"outcome": "ended", "seconds": 0.0, "exit_code": None}
        summary.append({"part": label, **record})
        (options.output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = sorted({part.command for parts in PROFILES.values() for part in parts})
    parser.add_argument("--profile", choices=list(PROFILES), default="cpu", help="sizes (default: cpu)")
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together (default: 9)")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=commands, metavar="NAME", help=f"of {', '.join(commands)}")
    parser.add_argument("--tests", action="store_true", help="run `pytest -m gpu` at the end")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: as many as PyTorch takes")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: processor time, with --threads 1"
    )
    options = parser.parse_args(arguments)
    there = {part.command for part in PROFILES[options.profile]}
    if missing := [name for name in options.only or () if name not in there]:
        parser.error(f"--only {' '.join(missing)} is not a part of --profile {options.profile}.")
    return options


def part_command(part: Part, options: argparse.Namespace, limit: float) -> list[str]:
    """The command line of a part. Parts with `--minutes` get slightly fewer than their limit, to finish in time."""
    common = {"clock": options.clock, "minutes": f"{0.6 * limit / 60:.3f}"}
    if options.threads:
        common["threads"] = str(options.threads)
    given = [word for name, value in common.items() if name in part.takes for word in (f"--{name}", value)]
    output = ("--output", str(options.output.resolve() / part.label))
    return [sys.executable, "-m", "benchmarks", part.command, *part.options, *given, *output]


def test_command() -> list[str]:
    """The tests that need a GPU."""
    return [sys.executable, "-m", "pytest", "-m", "gpu"]


def run_limited(command: Sequence[str], limit: float) -> dict[str, Any]:
    """Run a command in its own process group, which is killed when the limit is over or this process ends.

    Returns:
        `outcome`, `seconds`, `exit_code`, and the last lines on standard error unless it is done.
    """
    started = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as stderr:
        process = subprocess.Popen(command, cwd=ROOT, stderr=stderr, start_new_session=True)  # noqa: S603
        outcome: Outcome = "ended"
        try:
            outcome = "failed" if process.wait(max(limit, 1.0)) else "done"
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # child processes of the part may still run
                os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        stderr.seek(0)
        said = stderr.read().splitlines()[-15:]
    record: dict[str, Any] = {"outcome": outcome, "seconds": time.monotonic() - started, "exit_code": code}
    if outcome != "done":
        print("\n".join([outcome, *said]), flush=True)
        record["stderr"] = said
    return record
