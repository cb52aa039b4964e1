"""Scoring groups of rollouts with and without a shared prefix: time, memory, and how close both come to the ideal.

One run prints one table per case: the prompt repeated (padded, and packed without padding), and each backend that
encodes it once. `python benchmarks/shared_prefix.py --help` lists the options, README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:  # run as a script
    sys.path.insert(0, str(ROOT))

from benchmarks.cases import Case, profile_cases  # noqa: E402
from benchmarks.compare import PASSES, Comparison, Plan, Row, compare  # noqa: E402
from benchmarks.figure import draw  # noqa: E402
from benchmarks.measure import CLOCKS, Conditions  # noqa: E402
from benchmarks.methods import BASELINE, METHODS, find_method  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
SHAPE_OPTIONS = [field.name for field in fields(Case) if field.name not in ("name", "device", "checkpointing")]

DEFAULT_METHODS = {
    "cpu": [method.name for method in METHODS],
    "gpu": ["repeated, padded", BASELINE, "prefix_grouper", "cascade", "flex"],
}


def main(arguments: Sequence[str] | None = None) -> list[Comparison]:
    """Parse the command line, measure, print, and write JSON and PNG."""
    options = parse(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.profile == "gpu" and not torch.cuda.is_available():
        raise SystemExit("--profile gpu needs a CUDA device and there is none; use --profile cpu.")
    conditions = Conditions.here("cuda" if options.profile == "gpu" else "cpu", options.clock)
    print(f"conditions: {conditions}", flush=True)
    changed = {name: getattr(options, name) for name in SHAPE_OPTIONS if getattr(options, name) is not None}
    cases = list(dict.fromkeys(replace(case, **changed) for case in profile_cases(options.profile)))
    methods = [find_method(name) for name in options.methods or DEFAULT_METHODS[options.profile]]
    plan = Plan(methods, options.passes, options.rounds, options.clock, options.memory)
    end = time.monotonic() + options.minutes * 60
    comparisons: list[Comparison] = []
    for number, case in enumerate(cases):
        seconds = (end - time.monotonic()) / (len(cases) - number)  # an equal share of what is left
        if seconds < 0:
            print(f"\n{len(cases) - number} cases left out: --minutes {options.minutes:g} are over.")
            break
        comparisons.append(compare(case, plan, seconds))
        print(table(comparisons[-1]), flush=True)
        if options.output:
            write(options.output, conditions, comparisons)
    return comparisons


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; those that describe a case replace the profile's where given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", choices=("cpu", "gpu"), default="cpu", help="the list of cases (default: cpu)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each method is timed (default: 3)")
    parser.add_argument("--minutes", type=float, default=8.0, help="no new round or case after this (default: 8)")
    parser.add_argument("--threads", type=int, help="of PyTorch; default: as many as PyTorch takes")
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: processor time, for a busy machine; with --threads 1",
    )
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=list(PASSES))
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="CPU: do not measure memory")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.png")
    for name in SHAPE_OPTIONS:
        default = getattr(Case, name)
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, type=type(default), help=f"cpu: {default}")
    return parser.parse_args(arguments)


def table(comparison: Comparison) -> str:
    """The rows of a case as text."""
    case = comparison.case
    shapes = ", ".join(f"{name} {getattr(case, name)}" for name in SHAPE_OPTIONS)
    lines = [
        "",
        f"{case.name}: {shapes}, device {case.device}, activation checkpointing {case.checkpointing}",
        f"ideal: tokens x{comparison.token_ratio:.2f}, operations x{comparison.ideal_ratio:.2f}",
        f"{'':18} {'method':20} {'seconds':>9} {'fastest':>9} {'slowest':>9} {'speedup':>8} {'(rounds)':>13} "
        f"{'of ideal':>9} {'peak MiB':>9} {'difference':>11}",
    ]
    return "\n".join(lines + [_line(row) for row in comparison.rows])


def _line(row: Row) -> str:
    start = f"{row.measured:18} {row.method:20}"
    if row.timing is None:
        return f"{start} not run: {row.note}"
    seconds = row.timing.seconds
    middle, low, high = row.speedup or (float("nan"),) * 3
    rounds = f"{low:.2f}-{high:.2f}"
    share = f"{row.share_of_ideal:9.2f}" if row.share_of_ideal is not None else f"{'':9}"
    peak = f"{row.peak_mib:9,.0f}" if row.peak_mib is not None else f"{'':9}"
    difference = f"{row.difference:11.1e}" if row.difference is not None else ""
    return (
        f"{start} {row.timing.median:9.3f} {min(seconds):9.3f} {max(seconds):9.3f} {middle:7.2f}x {rounds:>13} "
        f"{share} {peak} {difference}"
    )


def write(output: Path, conditions: Conditions, comparisons: Sequence[Comparison]) -> None:
    """Write results and conditions as JSON, and the figure."""
    output.parent.mkdir(parents=True, exist_ok=True)
    content = {"conditions": asdict(conditions), "cases": [asdict(comparison) for comparison in comparisons]}
    output.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    draw(comparisons, str(conditions), output.with_suffix(".png"))


if __name__ == "__main__":
    main()
