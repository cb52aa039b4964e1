"""The tables of `scoring` and `update`: each method's time and memory, and how close it comes to the ideal.

README.md says how to read them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cases import Case, profile_cases
from benchmarks.compare import Comparison, Measured, Plan, Row, compare
from benchmarks.figure import draw_comparisons
from benchmarks.methods import BASELINE, METHODS, find_method
from benchmarks.options import SHAPE_OPTIONS, add_memory, add_shape, begin, change, make_parser, write_json

DEFAULT_METHODS = {
    "cpu": [method.name for method in METHODS],
    "gpu": ["repeated, padded", BASELINE, "prefix_grouper", "cascade", "flex"],
}
COLUMNS = (
    f"{'method':20} {'seconds':>9} {'(rounds)':>15} {'speedup':>8} {'(rounds)':>11} {'of ideal':>9} {'of fastest':>10} "
    f"{'tokens/s':>9} {'MFU':>5} {'peak MiB':>9} {'memory':>7} {'difference':>10}"
)


def scoring(arguments: Sequence[str] | None = None) -> list[Comparison]:
    """Scoring groups, as for old log-probabilities: forward without gradient, prompts shared and repeated."""
    return run("scoring", scoring.__doc__, arguments)


def update(arguments: Sequence[str] | None = None) -> list[Comparison]:
    """Updating on groups: forward, backward and an AdamW step, prompts shared and repeated."""
    return run("update", update.__doc__, arguments)


def run(measured: Measured, description: str | None, arguments: Sequence[str] | None) -> list[Comparison]:
    """Parse the command line, measure, print, and write JSON and PNG after each case."""
    options = parse(description, arguments)
    conditions = begin(options)
    cases = list(dict.fromkeys(change(case, options) for case in profile_cases(options.profile)))
    methods = [find_method(name) for name in options.methods or DEFAULT_METHODS[options.profile]]
    plan = Plan(methods, measured, options.rounds, options.clock, options.memory)
    end = time.monotonic() + options.minutes * 60
    comparisons: list[Comparison] = []
    for number, case in enumerate(cases):
        seconds = (end - time.monotonic()) / (len(cases) - number)  # an equal share of the remaining time
        if seconds < 0:
            print(f"\n{len(cases) - number} cases left out: --minutes {options.minutes:g} are over.")
            break
        comparisons.append(compare(case, plan, seconds))
        print(table(comparisons[-1]), flush=True)
        write_json(options.output, conditions, {"cases": [asdict(comparison) for comparison in comparisons]})
    draw_comparisons(comparisons, str(conditions), options.output)
    return comparisons


def parse(description: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line; those that describe a case override the profile's."""
    parser = make_parser(description)
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, metavar="NAME", help=", ".join(names))
    add_memory(parser)
    add_shape(parser, Case(""))
    return parser.parse_args(arguments)


def table(comparison: Comparison) -> str:
    """The rows of a case as text."""
    case, flops = comparison.case, comparison.teraflops
    shapes = ", ".join(f"{name} {getattr(case, name)}" for name in SHAPE_OPTIONS)
    lines = [
        "",
        f"{comparison.measured}, {case.name}: {shapes}, device {case.device}, "
        f"activation checkpointing {case.checkpointing}",
        f"ideal: tokens x{comparison.token_ratio:.2f}, operations x{comparison.ideal_ratio:.2f} "
        f"({flops['repeated']:.2f} over {flops['shared']:.2f} TFLOP)",
        f"peak MiB: activations and workspace; {_allocated_before(comparison)} are allocated before",
        COLUMNS,
        *map(_line, comparison.rows),
        f"of fastest: against {comparison.fastest_repeated!r}",
    ]
    return "\n".join([*lines, *_of_optimizer(comparison)])


def _of_optimizer(comparison: Comparison) -> list[str]:
    """The optimizer's share of each method; it is the same for all and not part of the ideal."""
    if comparison.optimizer is None:
        return []
    step = comparison.optimizer.median
    shares = [
        f"{row.method} {100 * step / row.timing.median:.1f} %" for row in comparison.rows if row.timing is not None
    ]
    return [f"optimizer: {step:.4f} s of each row, not part of the ideal: {', '.join(shares)}"]


def _allocated_before(comparison: Comparison) -> str:
    """What is the same for all methods, and therefore not part of any peak."""
    if comparison.measured == "scoring":
        return "weights and batch"
    return f"weights, batch, the optimizer's state and the gradients ({comparison.gradient_mib:.0f} MiB)"


def _line(row: Row) -> str:
    if row.timing is None:
        return f"{row.method:20} not run: {row.note}"
    seconds = row.timing.seconds
    middle, low, high = row.speedup or (None, None, None)
    figures: list[tuple[Any, str, int]] = [
        (row.timing.median, ".3f", 9),
        (f"{min(seconds):.3f}-{max(seconds):.3f}", "", 15),
        (middle, ".2f", 8),
        (None if low is None else f"{low:.2f}-{high:.2f}", "", 11),
        (row.share_of_ideal, ".2f", 9),
        (row.share_of_fastest, ".2f", 10),
        (row.tokens_per_second, ",.0f", 9),
        (row.utilization, ".2f", 5),
        (row.peak_mib, ",.0f", 9),
        (row.memory_share, ".2f", 7),
        (row.difference, ".1e", 10),
    ]
    cells = [f"{'' if figure is None else format(figure, kind):>{width}}" for figure, kind, width in figures]
    return f"{row.method:20} {' '.join(cells)}"
