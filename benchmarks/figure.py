"""The table as a figure: speedups against the ideal, and memory."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from benchmarks.compare import Comparison


def draw(comparisons: Sequence[Comparison], conditions: str, path: Path) -> None:
    """Draw one line of panels per case: speedup of each pass, peak memory of each pass."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 3.4 * len(comparisons) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(comparisons), 2, squeeze=False)
    for comparison, (left, right) in zip(comparisons, axes, strict=True):
        case, rows = comparison.case, [row for row in comparison.rows if row.timing is not None]
        methods = list(dict.fromkeys(row.method for row in rows))
        for shift, measured in enumerate(dict.fromkeys(row.measured for row in rows)):
            own = [row for row in rows if row.measured == measured]
            places = [methods.index(row.method) + 0.4 * shift for row in own]
            speedups = [row.speedup or (0.0, 0.0, 0.0) for row in own]
            spread = [[middle - low for middle, low, _ in speedups], [high - middle for middle, _, high in speedups]]
            left.barh(places, [middle for middle, *_ in speedups], 0.38, xerr=spread, label=measured)
            right.barh(places, [row.peak_mib or 0.0 for row in own], 0.38, label=measured)
        left.axvline(comparison.ideal_ratio, color="black", linestyle="--", label="ideal (operations)")
        shape = f"P={case.prefix}, R={case.rollout}, G={case.group_size}, groups={case.groups}"
        left.set_title(f"{case.name}: {shape}", fontsize=9)
        left.set_xlabel("times faster than repeated, packed", fontsize=8)
        right.set_xlabel("peak memory beyond weights and batch, MiB", fontsize=8)
        right.legend(*left.get_legend_handles_labels(), fontsize=7, loc="lower right")
        for axis in (left, right):
            axis.set_yticks([place + 0.2 for place in range(len(methods))], methods, fontsize=8)
            axis.invert_yaxis()
    figure.supxlabel(textwrap.fill(conditions, 150), fontsize=6)
    figure.savefig(path, dpi=120)
