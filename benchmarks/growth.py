"""Whether cost is linear in the tokens of a group: G rollouts of one prompt, with G from 4 to 64.

A rollout token attends to the prompt and to earlier tokens of its own rollout, so if only G varies, operations are
linear in the tokens G*R + P. The line a + b*(G*R + P) has an intercept because prompt tokens and rollout tokens cost
different amounts; it is fitted by least squares of relative deviations. README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from benchmarks.cases import QWEN3_0_6B, Case
from benchmarks.compare import FORWARDS, PASSES, Plan, compare
from benchmarks.figure import draw_growth
from benchmarks.methods import METHODS, find_method
from benchmarks.options import add_memory, add_shape, begin, change, make_parser, positive, write_json

CASES = {
    "cpu": Case("Qwen3 shape", prefix=1024, rollout=128),
    "gpu": replace(QWEN3_0_6B, prefix=4096),
}


@dataclass(frozen=True)
class Line:
    """A straight line through points, and how well it fits.

    Attributes:
        intercept: Its value at 0 tokens.
        slope: Increase per token.
        deviations: Deviation of each point, relative to the line.
    """

    intercept: float
    slope: float
    deviations: list[float]

    @property
    def largest(self) -> float:
        """The largest absolute deviation."""
        return max(map(abs, self.deviations))


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Parse the command line, measure, print, and write JSON and PNG after each size."""
    options = parse(arguments)
    conditions = begin(options)
    case = change(CASES[options.profile], options)
    methods = [find_method(options.method)]
    plan = Plan(methods, options.measured, options.rounds, options.clock, options.memory, differences=False)
    end = time.monotonic() + 60 * options.minutes
    result: dict[str, Any] = {"case": asdict(case), "method": options.method, "measured": options.measured, "rows": []}
    print(f"{options.measured} with {options.method}: {replace(case, group_size=0)}", flush=True)
    group_sizes = sorted(set(options.group_sizes))
    for number, size in enumerate(group_sizes):
        if number and time.monotonic() > end:
            print(f"G = {size} and more left out: --minutes {options.minutes:g} are over.")
            break
        seconds = (end - time.monotonic()) / (len(group_sizes) - number)
        result["rows"].append(measure(replace(case, group_size=size), plan, seconds))
        result["lines"] = fit_all(result["rows"])
        write_json(options.output, conditions, result)
    print(table(result))
    draw_growth(result, str(conditions), options.output)
    return result


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = make_parser(__doc__, minutes=4.0)
    shared = [method.name for method in METHODS if method.sharing == "shared"]
    parser.add_argument("--group-sizes", nargs="+", type=positive, default=[4, 8, 16, 32, 64], metavar="G")
    parser.add_argument("--method", choices=shared, default="cascade", help="default: cascade")
    parser.add_argument("--pass", dest="measured", choices=list(PASSES), default="update", help="default: update")
    add_memory(parser)
    add_shape(parser, CASES["cpu"], without=("group_size",))
    return parser.parse_args(arguments)


def measure(case: Case, plan: Plan, seconds: float) -> dict[str, Any]:
    """One size: seconds, MiB and operations."""
    (row,) = compare(case, plan, seconds).rows
    flops = FORWARDS[plan.measured] * case.operations("shared") / 1e12
    tokens = case.layout.num_tokens
    measured: dict[str, Any] = {"group_size": case.group_size, "tokens": tokens, "teraflops": flops, "note": row.note}
    if row.timing is not None:
        measured |= {"seconds": row.timing.median, "rounds": row.timing.seconds, "peak_mib": row.peak_mib}
    return measured


def fit_all(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """A line for each quantity measured at three sizes or more; through two points any line is exact."""
    lines = {}
    for quantity in ("seconds", "peak_mib", "teraflops"):
        points = [(row["tokens"], row[quantity]) for row in rows if row.get(quantity)]
        if len(points) > 2:
            line = fit([x for x, _ in points], [y for _, y in points])
            lines[quantity] = asdict(line) | {"largest_deviation": line.largest}
    return lines


def fit(tokens: Sequence[float], costs: Sequence[float]) -> Line:
    """The line a + b*tokens that minimises the sum of squares of (cost - line) / cost."""
    weights = [1 / cost**2 for cost in costs]
    total = sum(weights)
    centre = sum(w * x for w, x in zip(weights, tokens, strict=True)) / total
    height = sum(w * y for w, y in zip(weights, costs, strict=True)) / total
    points = list(zip(weights, tokens, costs, strict=True))
    slope = sum(w * (x - centre) * (y - height) for w, x, y in points) / sum(
        w * (x - centre) ** 2 for w, x, _ in points
    )
    intercept = height - slope * centre
    return Line(intercept, slope, [y / (intercept + slope * x) - 1 for _, x, y in points])


def table(result: dict[str, Any]) -> str:
    """Sizes with their deviations from the lines."""
    titles = "".join(f" {name:>9} {'of line':>8}" for name in ("seconds", "peak MiB", "TFLOP"))
    lines = [f"{'G':>4} {'tokens':>8}{titles} {'s/TFLOP':>8}"]
    seen = {quantity: iter(line["deviations"]) for quantity, line in result.get("lines", {}).items()}
    for row in result["rows"]:
        cells = [f"{row['group_size']:4} {row['tokens']:8,}"]
        for quantity, kind in (("seconds", "9.3f"), ("peak_mib", "9,.0f"), ("teraflops", "9.3f")):
            cells.append(format(row[quantity], kind) if row.get(quantity) else f"{'':9}")
            cells.append(f"{next(seen[quantity]):+8.1%}" if quantity in seen and row.get(quantity) else f"{'':8}")
        cells.append(f"{row['seconds'] / row['teraflops']:8.2f}" if row.get("seconds") else "")
        lines.append(" ".join(cells) + (f"  not run: {row['note']}" if row["note"] else ""))
    for quantity, line in result.get("lines", {}).items():
        lines.append(
            f"{quantity}: {line['intercept']:.4g} + {line['slope']:.4g} * (G*R + P), "
            f"largest deviation {line['largest_deviation']:.1%}"
        )
    return "\n".join(lines)
