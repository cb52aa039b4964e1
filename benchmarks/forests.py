"""Forests of any depth: a decoder on the shared forest, against repeated rows and the ideal.

The baseline is `repeated, packed`: one causal sequence per leaf, in one row without padding. `python -m benchmarks
forests --help` lists the options; README.md says how to read the table.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.cases import QWEN3_0_6B, Case
from benchmarks.forest_shapes import SHAPES
from benchmarks.measure import Timing, cuda_peak_mib, in_fresh_process, resident_peak_mib, time_in_turns
from benchmarks.options import add_memory, add_shape, begin, change, make_parser, write_json
from pl_grouprl.attention import find_decoder, shared_prefix
from pl_grouprl.models import ModelCost
from pl_grouprl.packing import SharedPrefixLayout

BASELINE = "repeated, packed"
METHODS = (BASELINE, "cascade", "flex")
PASSES = ("forward", "forward+backward")
MOST_SCORES = 2**27
"""On CPU, FlexAttention computes all scores [H, T, T] at once; it is left out if there are more than this."""
MODELS = {
    "cpu": Case("Qwen3 shape", hidden=256, layers=2, heads=4, kv_heads=2, head_dim=64, intermediate=768),
    "gpu": QWEN3_0_6B,
}
LAYOUT_SIZES = ("prefix", "rollout", "group_size", "groups", "shortest")
COLUMNS = (
    f"{'pass':17} {'method':17} {'seconds':>8} {'(rounds)':>13} {'speedup':>8} {'of ideal':>9} {'peak MiB':>9} "
    f"{'of ideal':>9}"
)


@dataclass
class Row:
    """One method in one pass.

    Attributes:
        measured: One of `PASSES`.
        method: One of `METHODS`.
        note: Why it did not run.
        seconds: Of each round.
        median: Of the seconds.
        speedup: Over the baseline: median, smallest, largest over the rounds.
        time_of_ideal: That median over the ratio of operations; for the baseline, over 1.
        peak_mib: Activations and workspace.
        memory_of_ideal: How many times less than the baseline's, over the ratio of tokens; for the baseline, over 1.
    """

    measured: str
    method: str
    note: str | None = None
    seconds: list[float] | None = None
    median: float | None = None
    speedup: tuple[float, float, float] | None = None
    time_of_ideal: float | None = None
    peak_mib: float | None = None
    memory_of_ideal: float | None = None


def main(arguments: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Parse the command line, measure, print, and write JSON after each shape."""
    options = parse(arguments)
    conditions = begin(options)
    case = change(MODELS[options.profile], options)
    end = time.monotonic() + 60 * options.minutes
    results: list[dict[str, Any]] = []
    for number, name in enumerate(options.shapes):
        if results and time.monotonic() > end:
            print(f"\n{len(options.shapes) - number} shapes left out: --minutes {options.minutes:g} are over.")
            break
        results.append(measure(name, case, options))
        print(table(results[-1]), flush=True)
        write_json(options.output, conditions, {"model": vars(case), "shapes": [_plain(result) for result in results]})
    return results


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Options of the command line."""
    parser = make_parser(__doc__, minutes=20.0)
    parser.add_argument(
        "--shapes",
        nargs="+",
        type=_shapes,
        default=[list(SHAPES)],
        metavar="NAME",
        help=", ".join(SHAPES) + "; the first word of a name for all that begin with it",
    )
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES)
    add_memory(parser)
    add_shape(parser, MODELS["cpu"], without=LAYOUT_SIZES)
    options = parser.parse_args(arguments)
    options.shapes = [name for names in options.shapes for name in names]
    return options


def _shapes(name: str) -> list[str]:
    """The shapes of that name, or whose names begin with that word."""
    found = [shape for shape in SHAPES if name in (shape, shape.partition("-")[0])]
    if not found:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SHAPES)}, nor the first word of one")
    return found


def measure(name: str, case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """All passes and methods on one shape."""
    layout = SHAPES[name]()
    gc.collect()  # the previous model
    decoder = make_decoder(case, layout)
    cost = ModelCost.of(decoder)
    result: dict[str, Any] = {
        "shape": name,
        "depth": max(layout.depths),
        "segments": len(layout.segments),
        "tokens": layout.num_tokens,
        "token_ratio": layout.token_ratio,
        "forward_gflop": cost.shared(layout) / 1e9,
        "ideal_ratio": cost.repeated(layout) / cost.shared(layout),
        "rows": [],
    }
    for measured in options.passes:
        rows = [Row(measured, method, _refusal(method, measured, case, layout)) for method in METHODS]
        _fill_in(rows, layout, case, decoder, options)
        _relate(rows, result["ideal_ratio"], layout.token_ratio)
        result["rows"] += rows
    return result


def _fill_in(
    rows: list[Row], layout: SharedPrefixLayout, case: Case, decoder: Any, options: argparse.Namespace
) -> None:
    """Measure time and memory of the rows that can run."""
    runs: dict[str, Callable[[], None]] = {}
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {}
    for row in rows:
        if row.note is not None:
            continue
        run = _prepared(decoder, _without_plans(layout), row.method, row.measured)
        context = partial(shared_prefix, decoder, _backend(row.method))
        try:
            with context():
                run()  # plans, compiles
                if case.device == "cuda":
                    row.peak_mib = cuda_peak_mib(run)
            if case.device == "cpu" and options.memory:
                arguments = case, _without_plans(layout), row.method, row.measured, torch.get_num_threads()
                row.peak_mib = in_fresh_process(_peak_of_fresh_process, *arguments)
        except RuntimeError as error:  # out of memory, or no such kernel here; continue with the other methods
            row.note = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
            continue
        runs[row.method], contexts[row.method] = run, context
    timings = time_in_turns(runs, options.rounds, clock=options.clock, contexts=contexts)
    for row in rows:
        if row.method in timings:
            row.seconds, row.median = timings[row.method].seconds, timings[row.method].median


def _relate(rows: list[Row], ideal_ratio: float, token_ratio: float) -> None:
    """Fill in the figures that are relative to the baseline."""
    base = next((row for row in rows if row.method == BASELINE and row.seconds), None)
    for row in rows:
        if base is None or not row.seconds:
            continue
        row.speedup = Timing(row.seconds).speedup_over(Timing(base.seconds or []))
        row.time_of_ideal = row.speedup[0] / (1.0 if row is base else ideal_ratio)
        if row.peak_mib and base.peak_mib:
            row.memory_of_ideal = base.peak_mib / row.peak_mib / (1.0 if row is base else token_ratio)


def make_decoder(case: Case, layout: SharedPrefixLayout) -> Any:
    """The decoder of a case, with enough positions for a layout."""
    return find_decoder(replace(case, prefix=max(layout.repeated_lengths), rollout=1).make_model())


def _without_plans(layout: SharedPrefixLayout) -> SharedPrefixLayout:
    """A copy without what earlier passes derived from it."""
    return SharedPrefixLayout([segment.length for segment in layout.segments], [s.parent for s in layout.segments])


def _backend(method: str) -> str:
    return "cascade" if method == BASELINE else method


def _refusal(method: str, measured: str, case: Case, layout: SharedPrefixLayout) -> str | None:
    if method != "flex" or case.device != "cpu":
        return None
    if measured != "forward":
        return "FlexAttention has no backward pass on CPU"
    scores = case.heads * layout.num_tokens**2
    return f"dense scores of {scores / 2**20:,.0f} M elements" if scores > MOST_SCORES else None


def _prepared(decoder: Any, layout: SharedPrefixLayout, method: str, measured: str) -> Callable[[], None]:
    """The pass as a function, on random tokens."""
    if method == BASELINE:  # every sequence is a root without children: one causal varlen call
        layout = SharedPrefixLayout(layout.repeated_lengths, [None] * len(layout.repeated_lengths))
    torch.manual_seed(0)
    row = torch.randint(decoder.config.vocab_size, (1, layout.num_tokens), device=decoder.device)
    return partial(_forward if measured == "forward" else _train, decoder, row, layout)


def _forward(decoder: Any, row: Tensor, layout: SharedPrefixLayout) -> None:
    with torch.no_grad():
        decoder(input_ids=row, prefix_layout=layout, use_cache=False)


def _train(decoder: Any, row: Tensor, layout: SharedPrefixLayout) -> None:
    decoder(input_ids=row, prefix_layout=layout, use_cache=False).last_hidden_state.sum().backward()
    decoder.zero_grad(set_to_none=True)


def _peak_of_fresh_process(case: Case, layout: SharedPrefixLayout, method: str, measured: str, threads: int) -> float:
    torch.set_num_threads(threads)
    decoder = make_decoder(case, layout)
    with shared_prefix(decoder, _backend(method)):
        _prepared(decoder, SharedPrefixLayout.from_groups([(64, [16, 16])]), method, measured)()  # loading
        return resident_peak_mib(_prepared(decoder, layout, method, measured))


def table(result: dict[str, Any]) -> str:
    """The rows of a shape as text."""
    head = (
        f"\n{result['shape']}: depth {result['depth']}, {result['segments']} segments, {result['tokens']} tokens, "
        f"forward {result['forward_gflop']:.1f} GFLOP\nideal: operations x{result['ideal_ratio']:.2f}, memory (tokens) "
        f"x{result['token_ratio']:.2f}"
    )
    return "\n".join([head, COLUMNS, *map(_line, result["rows"])])


def _line(row: Row) -> str:
    start = f"{row.measured:17} {row.method:17}"
    if row.seconds is None:
        return f"{start} not run: {row.note}"
    figures: list[tuple[Any, str, int]] = [
        (row.median, ".3f", 8),
        (f"{min(row.seconds):.3f}-{max(row.seconds):.3f}", "", 13),
        (None if row.speedup is None else row.speedup[0], ".2f", 8),
        (row.time_of_ideal, ".2f", 9),
        (row.peak_mib, ",.0f", 9),
        (row.memory_of_ideal, ".2f", 9),
    ]
    cells = [f"{'' if figure is None else format(figure, kind):>{width}}" for figure, kind, width in figures]
    return f"{start} {' '.join(cells)}"


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    return result | {"rows": [vars(row) for row in result["rows"]]}
