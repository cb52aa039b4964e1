"""Time, operations and memory against P/R for several group sizes and prompts, as in the figure of Prefix Grouper.

Columns are prompt lengths P; lines are group sizes G, dashed with repeated prompts (packed, without padding) and solid
with shared prompts, as in arXiv:2506.05433. Cases run from cheapest to most expensive, so a run that is out of time
lacks the largest. Operations are counted without a run, also for the real sizes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from benchmarks.cases import QWEN3_0_6B, QWEN3_4B, Case
from benchmarks.compare import FORWARDS, PASSES, Comparison, Measured, Plan, compare
from benchmarks.figure import draw_sweep
from benchmarks.methods import BASELINE, METHODS, find_method
from benchmarks.options import add_memory, add_shape, begin, change, make_parser, positive, write_json
from pl_grouprl.packing import Sharing

CASES = {
    "cpu": Case(
        "small Qwen3 shape, 1 layer", hidden=128, layers=1, heads=2, kv_heads=1, intermediate=384, vocabulary=1024
    ),
    "gpu": replace(QWEN3_0_6B, name="Qwen3-0.6B shape, 4 layers", layers=4),
}
SHARINGS: tuple[Sharing, ...] = ("repeated", "shared")
PREFIXES = {"cpu": [512, 1024, 2048], "gpu": [4096, 8192, 16384]}
REAL = (QWEN3_4B, PREFIXES["gpu"])
"""The real shape and prompts, whose operations are only counted."""


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON and PNG after each case."""
    options = parse(arguments)
    conditions = begin(options)
    case = change(CASES[options.profile], options)
    prefixes = options.prefixes or PREFIXES[options.profile]
    methods = [find_method(BASELINE), find_method(options.method)]
    plan = Plan(methods, options.measured, options.rounds, options.clock, options.memory, differences=False)
    result: dict[str, Any] = {"case": asdict(case), "method": options.method, "measured": options.measured}
    real, real_prefixes = REAL
    result["counted"] = [
        {"name": real.name} | count(own, options.measured)
        for own in grid(real, real_prefixes, options.ratios, options.group_sizes)
    ]
    result["rows"] = []
    cases = sorted(
        grid(case, prefixes, options.ratios, options.group_sizes), key=lambda own: own.operations("repeated")
    )
    print(f"{options.measured}: {case}\n{HEADER}")
    end = time.monotonic() + 60 * options.minutes
    for number, own in enumerate(cases):
        if number and time.monotonic() > end:
            print(f"{len(cases) - number} of {len(cases)} cases left out: --minutes {options.minutes:g} are over.")
            break
        row = count(own, options.measured) | figures(compare(own, plan, end - time.monotonic()), options.method)
        print(line(row), flush=True)
        result["rows"].append(row)
        write_json(options.output, conditions, result)
    draw_sweep(result, str(conditions), options.output)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = make_parser(__doc__, rounds=1, minutes=5.0)
    shared = [method.name for method in METHODS if method.sharing == "shared"]
    parser.add_argument("--prefixes", nargs="+", type=positive, metavar="P", help=f"cpu: {PREFIXES['cpu']}")
    parser.add_argument("--ratios", nargs="+", type=positive, default=[1, 2, 4, 8], metavar="P/R")
    parser.add_argument("--group-sizes", nargs="+", type=positive, default=[2, 4, 8, 16], metavar="G")
    parser.add_argument("--method", choices=shared, default="cascade", help="of the shared runs (default: cascade)")
    parser.add_argument("--pass", dest="measured", choices=list(PASSES), default="update", help="default: update")
    add_memory(parser)
    add_shape(parser, CASES["cpu"], without=("prefix", "rollout", "group_size"))
    return parser.parse_args(arguments)


def grid(case: Case, prefixes: Sequence[int], ratios: Sequence[int], group_sizes: Sequence[int]) -> list[Case]:
    """All combinations."""
    sizes = [(p, max(p // ratio, 1), g) for p in prefixes for ratio in ratios for g in group_sizes]
    return [replace(case, prefix=p, rollout=r, group_size=g) for p, r, g in sizes]


def count(case: Case, measured: Measured) -> dict[str, Any]:
    """Coordinates in the figure, and operations of the repeated and the shared run in units of 1e12."""
    place = {"prefix": case.prefix, "ratio": case.prefix / case.rollout, "group_size": case.group_size}
    both = {name: FORWARDS[measured] * case.operations(name) / 1e12 for name in SHARINGS}
    return place | {"teraflops": both, "token_ratio": case.layout.token_ratio}


def figures(comparison: Comparison, method: str) -> dict[str, Any]:
    """Seconds and MiB of both runs; a run that failed is left out, with the reason."""
    rows = {"repeated": comparison.row(BASELINE), "shared": comparison.row(method)}
    ran = {name: row for name, row in rows.items() if row is not None}
    return {
        "seconds": {name: row.timing.median for name, row in ran.items() if row.timing},
        "peak_mib": {name: row.peak_mib for name, row in ran.items() if row.peak_mib is not None},
        "notes": [row.note for row in comparison.rows if row.note],
    }


HEADER = (
    f"{'P':>6} {'P/R':>4} {'G':>3} {'seconds repeated':>17} {'shared':>8} {'ratio':>6} {'ideal':>6} "
    f"{'MiB repeated':>13} {'shared':>8}"
)


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    seconds, flops, peak = row["seconds"], row["teraflops"], row["peak_mib"]
    place = f"{row['prefix']:6} {row['ratio']:4.0f} {row['group_size']:3}"
    cells = [
        f"{seconds.get('repeated', float('nan')):17.3f} {seconds.get('shared', float('nan')):8.3f}",
        f"{seconds['repeated'] / seconds['shared'] if len(seconds) == 2 else float('nan'):6.2f}",
        f"{flops['repeated'] / flops['shared']:6.2f}",
        f"{peak.get('repeated', float('nan')):13,.0f} {peak.get('shared', float('nan')):8,.0f}",
    ]
    return " ".join([place, *cells, *row["notes"]])
