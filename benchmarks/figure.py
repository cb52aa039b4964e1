"""Draws tables as figures. Without matplotlib, prints a line that says so."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.compare import Comparison
from benchmarks.methods import missing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#666666"
COLOURS = (BLUE, ORANGE, GREEN, PURPLE)
"""Distinguishable for colour-blind readers (Okabe and Ito, 2008)."""
MARKERS = ("o", "s", "^", "D")
LABELS = {"seconds": "seconds", "peak_mib": "peak memory, MiB", "teraflops": "operations, TFLOP"}


def draw_comparisons(comparisons: Sequence[Comparison], conditions: str, output: Path | None) -> None:
    """Two panels per case: speedup over the packed repeated run against the ideal, and peak memory."""
    comparisons = [own for own in comparisons if any(row.timing for row in own.rows)]
    if not comparisons or (figure := _new(output, (11, 2.9 * len(comparisons) + 0.7))) is None:
        return
    axes = figure.subplots(len(comparisons), 2, squeeze=False)
    for comparison, (left, right) in zip(comparisons, axes, strict=True):
        case, rows = comparison.case, [row for row in comparison.rows if row.timing is not None]
        names = [row.method for row in rows]
        speedups = [row.speedup or (0.0, 0.0, 0.0) for row in rows]
        spread = [[middle - low for middle, low, _ in speedups], [high - middle for middle, _, high in speedups]]
        bars = left.barh(names, [middle for middle, *_ in speedups], xerr=spread, color=BLUE)
        left.bar_label(bars, fmt="%.2f", label_type="center", color="white", fontsize=8)
        left.axvline(comparison.ideal_ratio, color="black", linestyle="--", label="ideal: operations")
        left.set_title(
            f"{comparison.measured}, {case.name}: P={case.prefix}, R={case.rollout}, G={case.group_size}", fontsize=9
        )
        left.set_xlabel("times faster than repeated, packed", fontsize=8)
        bars = right.barh(names, [row.peak_mib or 0.0 for row in rows], color=ORANGE)
        right.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
        right.set_xlabel("peak memory beyond weights, batch and optimizer state, MiB", fontsize=8)
        base = comparison.row("repeated, packed")
        if base is not None and base.peak_mib:
            right.axvline(base.peak_mib / comparison.token_ratio, color="black", linestyle="--", label="ideal: tokens")
            right.legend(fontsize=7)
        for axis in (left, right):
            axis.margins(x=0.12)
            axis.tick_params(labelsize=8)
            axis.invert_yaxis()
        left.legend(fontsize=7)
    _save(figure, conditions, output)


def draw_growth(result: dict[str, Any], conditions: str, output: Path | None) -> None:
    """Time and memory against tokens, with the fitted lines."""
    quantities = [name for name in ("seconds", "peak_mib") if name in result.get("lines", {})]
    if not quantities or (figure := _new(output, (10, 4))) is None:
        return
    for axis, quantity in zip(figure.subplots(1, len(quantities), squeeze=False)[0], quantities, strict=True):
        line, rows = result["lines"][quantity], [row for row in result["rows"] if row.get(quantity)]
        tokens = [row["tokens"] for row in rows]
        fitted = [line["intercept"] + line["slope"] * x for x in tokens]
        label = f"a + b (G R + P), off by {100 * line['largest_deviation']:.1f} % at most"
        axis.plot(tokens, fitted, color=GREY, linestyle="--", label=label)
        axis.plot(tokens, [row[quantity] for row in rows], "o", color=BLUE, label="measured")
        for row in rows:
            place = {"textcoords": "offset points", "xytext": (6, -11), "fontsize": 8}
            axis.annotate(f"G={row['group_size']}", (row["tokens"], row[quantity]), **place)
        axis.set_xlabel("tokens, G R + P")
        axis.set_ylabel(LABELS[quantity])
        axis.set_ylim(bottom=0)
        axis.margins(x=0.16)
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    case = result["case"]
    figure.suptitle(
        f"{result['measured']}, {case['name']}: P={case['prefix']}, R={case['rollout']}, {result['method']}",
        fontsize=10,
    )
    _save(figure, conditions, output)


def draw_sweep(result: dict[str, Any], conditions: str, output: Path | None) -> None:
    """Rows: time, operations, memory, operations at the real size. Columns: prompts. Lines: group sizes."""
    if not result["rows"] or (figure := _new(output, (11, 12))) is None:
        return
    panels = [("seconds", "rows"), ("teraflops", "rows"), ("peak_mib", "rows"), ("teraflops", "counted")]
    prefixes = {source: sorted({row["prefix"] for row in result[source]}) for source in ("rows", "counted")}
    sizes = sorted({row["group_size"] for row in result["rows"]})
    axes = figure.subplots(len(panels), max(map(len, prefixes.values())), squeeze=False, sharey="row")
    for (quantity, source), across in zip(panels, axes, strict=True):
        for axis, prefix in zip(across, prefixes[source], strict=False):
            rows = [row for row in result[source] if row["prefix"] == prefix]
            _lines(axis, rows, quantity, sizes)
            axis.set_title(f"P = {prefix:,}", fontsize=9)
        name = result["case"]["name"] if source == "rows" else result["counted"][0]["name"]
        how = "counted" if quantity == "teraflops" else "measured"
        across[0].set_ylabel(f"{LABELS[quantity]}\n{name}, {how}", fontsize=8)
        for axis in across[len(prefixes[source]) :]:
            axis.set_visible(False)
    handles = _legend(sizes)
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8, frameon=False)
    _save(figure, conditions, output)


def _lines(axis: Axes, rows: Sequence[dict[str, Any]], quantity: str, sizes: Sequence[int]) -> None:
    for number, size in enumerate(sizes):
        for name, style in (("repeated", "--"), ("shared", "-")):
            own = sorted((row["ratio"], row[quantity][name]) for row in rows
                         if row["group_size"] == size and name in row[quantity])  # fmt: skip
            look: dict[str, Any] = {
                "color": COLOURS[number % 4],
                "marker": MARKERS[number % 4],
                "markersize": 4,
                "linewidth": 1.4,
            }
            axis.plot([x for x, _ in own], [y for _, y in own], linestyle=style, **look)
    ratios = sorted({row["ratio"] for row in rows})
    if any(row[quantity] for row in rows):
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
    axis.set_xticks(ratios, [f"{ratio:g}" for ratio in ratios])
    axis.tick_params(labelsize=8)
    axis.set_xlabel("P/R", fontsize=8)
    axis.grid(alpha=0.3)


def _legend(sizes: Sequence[int]) -> list[Any]:
    from matplotlib.lines import Line2D

    groups = [
        Line2D([], [], color=COLOURS[number % 4], marker=MARKERS[number % 4], label=f"G = {size}")
        for number, size in enumerate(sizes)
    ]
    repeated = Line2D([], [], color="black", linestyle="--", label="repeated, packed")
    return [*groups, repeated, Line2D([], [], color="black", linestyle="-", label="shared")]


def draw_branching(runs: Sequence[dict[str, Any]], conditions: str, output: Path | None) -> None:
    """Validation of each run against the tokens that it sampled; one colour per arm."""
    if not runs or (figure := _new(output, (7, 4))) is None:
        return
    axis, arms = figure.subplots(), list(dict.fromkeys(run["arm"] for run in runs))
    for run in runs:
        curve, colour = run["curve"], COLOURS[arms.index(run["arm"]) % len(COLOURS)]
        label = run["arm"] if run is next(own for own in runs if own["arm"] == run["arm"]) else None
        axis.plot(
            [at["tokens"] / 1000 for at in curve], [at["reward"] for at in curve], color=colour, alpha=0.8, label=label
        )
    axis.set_xlabel("sampled tokens, thousands (those before a branch point once)", fontsize=8)
    axis.set_ylabel("validation accuracy; a line per seed", fontsize=8)
    axis.legend(fontsize=8)
    _save(figure, conditions, output)


def _new(output: Path | None, size: tuple[float, float]) -> Figure | None:
    """An empty figure; None if none is requested or matplotlib is missing."""
    if output is None:
        return None
    if note := missing("matplotlib"):
        print(f"no figure: {note}")
        return None
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Figure, conditions: str, output: Path | None) -> None:
    assert output is not None
    figure.supxlabel(textwrap.fill(conditions, 160), fontsize=6)
    figure.savefig(output.with_suffix(".png"), dpi=120)
