"""The metrics of a run as one picture."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from pl_grouprl.callbacks.metric_history import Point
from pl_grouprl.utilities.writes import write_whole

PANELS: Mapping[str, Sequence[str]] = {
    "reward": ("reward",),
    "validation": ("val/*",),
    "token ratio, measured speedup": ("prefix/token_ratio", "episode/token_ratio", "prefix/measured_speedup"),
    "tools: calls per rollout, failed share": ("tools/call_frequency", "tools/failure_frequency"),
    "entropy (nats per token)": ("entropy",),
    "KL to the reference": ("kl",),
    "completion length (tokens)": ("completions/mean_length",),
    "value loss": ("value/loss",),
    "explained variance of the returns": ("value/explained_variance",),
    "token groups: compression, ends by cause": ("token_group/compression_ratio", "token_group/ended_by_*"),
    "token groups: threshold": ("token_group/threshold",),
    "gradient norm": ("grad_norm", "grad_norm/*"),
    "seconds per step": ("time/*",),
    "tokens per second": ("perf/tokens_per_second",),
}
"""Title and metrics of each panel; a trailing star matches any ending."""

_NOT_SCORES = ("val/episode/", "val/tools/")
"""Metrics of validation that would flatten the scores in its panel; those of training have their panels."""

_EXTRA_NUMBER = re.compile(r"val/rewards/[^/]+/(?!mean$)")
"""Further numbers of a reward's dictionary, which have any unit."""

NEVER_CUT = ("reward", "validation")
"""Panels that show every point, because they are used to judge a run."""

_CUT_FROM = 100
_COLUMNS = 3
_MOST_LINES = 8


def draw_curves(points: Mapping[str, Sequence[Point]], path: Path) -> None:
    """Draw every panel with data, over optimizer steps, into one PNG file. Without any data, write no file.

    Args:
        points: (step, value) pairs of each metric.
        path: The file; its folder is created.

    Raises:
        OSError: If it cannot be written; an earlier file stays.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    filled = {title: names for title, wanted in PANELS.items() if (names := select(points, wanted))}
    if not filled:
        return
    columns = min(_COLUMNS, len(filled))
    rows = math.ceil(len(filled) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    for position, (title, names) in enumerate(filled.items(), start=1):
        axes = figure.add_subplot(rows, columns, position)
        for name in names:
            steps, values = zip(*points[name], strict=True)
            axes.plot(steps, values, label=name, marker="." if len(steps) < 40 else None, linewidth=1.5)
        limits = robust_limits([value for name in names for _, value in points[name]])
        if limits is not None and title not in NEVER_CUT:
            axes.set_ylim(*limits)
            title += ", peaks cut off"
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("optimizer step", fontsize=8)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.3)
        if len(names) > 1:
            axes.legend(fontsize=7)
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


def robust_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Axis limits for values that a few peaks would flatten.

    Returns:
        The range without the outermost 1 % at each end, plus a margin; None for 100 values or fewer, and if the whole
        range is at most three times as wide, so nothing needs to be cut off.
    """
    if len(values) <= _CUT_FROM:
        return None
    ordered = sorted(values)
    cut = len(ordered) // 100
    low, high = ordered[cut], ordered[-1 - cut]
    if ordered[-1] - ordered[0] <= 3 * (high - low) or low == high:
        return None
    margin = 0.1 * (high - low)
    return low - margin, high + margin


def select(points: Mapping[str, Sequence[Point]], wanted: Sequence[str]) -> list[str]:
    """Names that match those wanted, with stars resolved, at most eight. Of equal lines only the first is shown."""
    shown = [name for name in points if not (name.startswith(_NOT_SCORES) or _EXTRA_NUMBER.match(name))]
    names = [
        name
        for pattern in wanted
        for name in shown
        if (name.startswith(pattern[:-1]) if pattern.endswith("*") else name == pattern)
    ]
    lines: dict[tuple[Point, ...], str] = {}
    for name in names:
        lines.setdefault(tuple((step, round(value, 6)) for step, value in points[name]), name)
    return list(lines.values())[:_MOST_LINES]
