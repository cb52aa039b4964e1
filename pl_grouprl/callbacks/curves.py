"""Keeps the metrics of a run by step, and draws them as one picture."""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pl_grouprl.utilities.checkpoint_files import write_whole

# Keeps the metrics of a run by step, independently of loggers; saved in checkpoints.

Point = tuple[int, float]


class MetricHistory:
    """Values of each metric with their optimizer steps, in order."""

    def __init__(self) -> None:
        self.points: dict[str, list[Point]] = {}

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a value of each metric. Non-finite values are skipped; a second value for a step replaces the first."""
        for name, value in metrics.items():
            number = float(value)
            if not math.isfinite(number):
                continue
            points = self.points.setdefault(name, [])
            if points and points[-1][0] == step:
                points.pop()
            points.append((step, number))

    def statistics(self, name: str) -> dict[str, float]:
        """Return first, last, lowest, highest and mean value, and the lowest over the last quarter of the steps.

        The quarter counts the steps from this metric's first value to its last.
        """
        points = self.points[name]
        values = [value for _, value in points]
        start, end = points[0][0], points[-1][0]
        late = [value for step, value in points if step >= end - (end - start) / 4]
        return {
            "first": values[0],
            "last": values[-1],
            "min": min(values),
            "max": max(values),
            "mean": math.fsum(values) / len(values),
            "min_last_quarter": min(late),
            "count": len(values),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return plain lists of numbers."""
        return {name: [list(point) for point in points] for name, points in self.points.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self.points = {name: [(int(step), float(value)) for step, value in points] for name, points in state.items()}


# Draws the metrics of a run as one picture, and those of several runs panel by panel.

Points = Mapping[str, Sequence[Point]]
"""(step, value) pairs of each metric."""

PANELS: Mapping[str, Sequence[str]] = {
    "reward": ("reward",),
    "validation": ("val/*",),
    "completion length (tokens)": ("completions/mean_length",),
    "entropy (nats per token)": ("entropy",),
    "KL to the reference": ("kl",),
    "sampler and trainer: KL by first token of a bin": ("sampling/kl", "sampling/kl_at_token/*"),
    "sampler and trainer: KL by turn": ("sampling/kl_at_turn/*",),
    "sampler and trainer: share of tokens beyond 2 %": ("sampling/beyond_2_percent",),
    "sampler and trainer: largest ratio": ("sampling/largest_ratio",),
    "gradient norm": ("grad_norm", "grad_norm/*"),
    "seconds per step": ("time/*",),
    "token ratio, measured speedup": ("prefix/token_ratio", "episode/token_ratio", "prefix/measured_speedup"),
    "tokens per second": ("perf/tokens_per_second",),
    "shares: truncated, equal rewards, clipped": (
        "completions/clipped_ratio",
        "frac_reward_zero_std",
        "clip_ratio/region_mean",
    ),
    "tools: calls per rollout, failed share": ("tools/call_frequency", "tools/failure_frequency"),
    "value loss": ("value/loss",),
    "explained variance of the returns": ("value/explained_variance",),
    "token groups: compression, ends by cause": ("token_group/compression_ratio", "token_group/ended_by_*"),
    "token groups: threshold": ("token_group/threshold",),
}
"""Title and metrics of each panel; a trailing star matches any ending."""

SPREADS = {"reward": ("reward_std", "reward_min", "reward_max", "standard deviation within a group")}
"""Metrics drawn with a band of plus and minus another metric, two that bound the band where logged, and its label."""

RANGES = {"completions/mean_length": ("completions/min_length", "completions/max_length", "shortest to longest")}
"""Metrics drawn with a band from one metric to another, and the band's label."""

STACKED = "seconds per step"
"""The panel whose metrics add up."""

_SUM, _REST = "time/step", "time/other"
"""The sum of the stacked metrics, and the part to which small parts are added."""

_NOT_SCORES = re.compile(r"val/episode/|val/tools/|val/rewards/[^/]+/(?!mean$)")
"""Validation metrics omitted from its panel, where they would flatten the scores: statistics of episodes, and extra
numbers that a reward returned in a dictionary."""

NEVER_CUT = ("reward", "validation")
"""Panels that show every point, because they are used to judge a run."""

LEAST_HEIGHTS = {
    "sampler and trainer: KL by first token of a bin": 1e-4,
    "sampler and trainer: KL by turn": 1e-4,
    "sampler and trainer: share of tokens beyond 2 %": 0.01,
    "sampler and trainer: largest ratio": 0.02,
}
"""Height of the axis of panels where smaller differences are rounding and should look flat."""

FROM_ZERO = ("token ratio, measured speedup", "tokens per second")
"""Panels whose axis begins at zero, so small changes look small."""

UNSMOOTHED = ("validation", "token ratio, measured speedup")
"""Panels without a running mean: their values are few, or hardly vary."""

_COLUMNS = 3
_MOST_LINES = 8
_SMOOTHED_FROM = 30
"""From this number of points on, a running mean is drawn over the values, which are faint."""

_SPARSE = 4
"""Next to a long line, this many points or fewer are drawn as dots."""

COLORS = ("#2563eb", "#e8590c", "#2b8a3e", "#c2255c", "#7048e8", "#0c8599", "#f08c00", "#495057")

_DASHES: tuple[Any, ...] = ("-", (0, (3, 2)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))
_STYLES = [
    (color, _DASHES[(place + shift) % len(_DASHES)])
    for shift in range(len(_DASHES))
    for place, color in enumerate(COLORS)
]
"""Colors and dashes of lines in order, so that lines that coincide are all visible."""


def draw_curves(points: Points, path: Path, title: str = "") -> None:
    """Draw every panel with data, over optimizer steps, into one PNG file. Without any data, write no file.

    Args:
        points: (step, value) pairs of each metric.
        path: The file; its folder is created.
        title: Heading of the picture.

    Raises:
        OSError: If it cannot be written; an earlier file stays.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    titles = filled_panels([points])
    if not titles:
        return
    columns = min(_COLUMNS, len(titles))
    rows = math.ceil(len(titles) / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows + 0.4 * bool(title)), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=13, x=0.01, ha="left", parse_math=False)
    for position, panel in enumerate(titles, start=1):
        draw_panel([figure.add_subplot(rows, columns, position)], panel, {"": points})
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_whole(path, picture.getvalue())


def filled_panels(runs: Sequence[Points]) -> list[str]:
    """Titles of the panels for which one of the runs has data."""
    return [title for title, wanted in PANELS.items() if any(select(points, wanted) for points in runs)]


def other_metrics(runs: Sequence[Points]) -> list[str]:
    """Sorted names of the metrics of any run that no panel shows, such as a subclass's."""
    bands = {name for names in (SPREADS | RANGES).values() for name in names}
    patterns = [pattern for wanted in PANELS.values() for pattern in wanted]
    names = {name for points in runs for name in points} - bands
    return sorted(name for name in names if not any(_matches(name, pattern) for pattern in patterns))


def panel_figure(title: str, runs: Mapping[str, Points]) -> Any:
    """Draw one panel of several runs: overlaid if each has one line, otherwise side by side on the same scale.

    Args:
        title: A title in `PANELS`, or the name of a metric; at least one run has data for it.
        runs: (step, value) pairs of each metric, by the names of the runs.

    Returns:
        A `matplotlib.figure.Figure`.
    """
    from matplotlib.figure import Figure

    wanted = PANELS.get(title, (title,))
    overlaid = title != STACKED and all(len(select(points, wanted)) <= 1 for points in runs.values())
    if not overlaid:
        runs = {run: points for run, points in runs.items() if select(points, wanted)}
    count = 1 if overlaid else len(runs)
    columns = min(_COLUMNS, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(5 * columns, 3.2 * rows), layout="constrained")
    axes: list[Any] = []
    for position in range(1, count + 1):
        first = axes[0] if axes else None
        axes.append(figure.add_subplot(rows, columns, position, sharex=first, sharey=first))
    draw_panel(axes, title, runs)
    return figure


def draw_panel(axes: Sequence[Any], title: str, runs: Mapping[str, Points]) -> None:
    """Draw one panel of several runs, all in one axes or each in its own.

    Args:
        axes: One `matplotlib.axes.Axes`, or as many as runs, which share their scales.
        title: A title in `PANELS`, or the name of a metric.
        runs: (step, value) pairs of each metric, by the names of the runs; "" is a run that needs no name.
    """
    if title == STACKED:
        for ax, (run, points) in zip(axes, runs.items(), strict=True):
            parts = stacked_parts(points)
            steps = sorted({step for part in parts.values() for step in part})
            seconds = [[part.get(step, 0.0) for step in steps] for part in parts.values()]
            drawn = ax.stackplot(steps, seconds, baseline="zero", colors=COLORS, alpha=0.85, linewidth=0)
            _finish(ax, f"{title}\n{run}" if run else title, "", drawn, short_labels(list(parts)), columns=3)
        return
    wanted = PANELS.get(title, (title,))
    names = {run: select(points, wanted) for run, points in runs.items()}
    values = [value for run, points in runs.items() for name in names[run] for _, value in points[name]]
    least = LEAST_HEIGHTS.get(title, 0.0)
    is_whole = title in NEVER_CUT or max(values, default=0.0) - min(values, default=0.0) < least
    limits = None if is_whole else robust_limits(values)
    heading = title if limits is None else f"{title}, peaks cut off"
    if len(axes) < len(runs):
        lines = [(points, name, run) for run, points in runs.items() for name in names[run]]
        _draw_lines(axes[0], title, heading, lines)
    else:
        for ax, (run, points) in zip(axes, runs.items(), strict=True):
            labels = short_labels(names[run]) if len(names[run]) > 1 else [""]
            lines = [(points, name, label) for name, label in zip(names[run], labels, strict=False)]
            _draw_lines(ax, title, f"{heading}\n{run}" if run else heading, lines)
    scaled = axes[0]  # after all lines are drawn; the others follow
    if limits is not None:
        scaled.set_ylim(*limits)
    if title in FROM_ZERO:
        scaled.set_ylim(0, 1.05 * scaled.get_ylim()[1])
    if not any(values):
        scaled.set_ylim(-0.0005, 0.01)  # the line lies above the edge
    low, high = scaled.get_ylim()
    if high - low < least:
        scaled.set_ylim(low - least / 20, low + least)
    if high >= 10_000:
        scaled.yaxis.set_major_formatter("{x:,.0f}")


def _draw_lines(axes: Any, panel: str, heading: str, lines: Sequence[tuple[Points, str, str]]) -> None:
    """Draw lines, each given by its run, metric and label."""
    longest = max((len(points[name]) for points, name, _ in lines), default=0)
    is_long = longest >= _SMOOTHED_FROM
    smooth = is_long and panel not in UNSMOOTHED
    drawn, note = [], ""
    for (points, name, _), (color, dashes) in zip(lines, itertools.cycle(_STYLES), strict=False):
        steps, values = (list(own) for own in zip(*points[name], strict=True))
        edges: list[tuple[int, float, float]] = []
        if name in SPREADS:
            spread, least, most = (dict(points.get(band, ())) for band in SPREADS[name][:3])
            edges = [
                (step, max(least.get(step, -math.inf), value - std), min(most.get(step, math.inf), value + std))
                for step, value in points[name]
                if (std := spread.get(step)) is not None
            ]
        elif name in RANGES and points.keys() >= set(RANGES[name][:2]):
            both = zip(*(points[edge] for edge in RANGES[name][:2]), strict=True)
            edges = [(step, least, most) for (step, least), (_, most) in both]
        if edges:
            axes.fill_between(*zip(*edges, strict=True), color=color, alpha=0.12, linewidth=0)
            note = f" (band: {(SPREADS | RANGES)[name][-1]})"
        if is_long and len(values) <= _SPARSE:
            drawn += axes.plot(steps, values, "o", color=color)
            continue
        if smooth:
            axes.plot(steps, values, color=color, alpha=0.3, linewidth=1)
            half = max(3, longest // 15) // 2
            near = [values[max(0, place - half) : place + half + 1] for place in range(len(values))]
            values = [math.fsum(some) / len(some) for some in near]
        marker = None if is_long else "."
        drawn += axes.plot(steps, values, color=color, marker=marker, linewidth=1.8, linestyle=dashes)
    labels = [label for _, _, label in lines if label]
    _finish(axes, heading, note, drawn, labels, columns=2)


def _finish(axes: Any, heading: str, note: str, drawn: Sequence[Any], labels: Sequence[str], columns: int) -> None:
    axes.set_title(heading, fontsize=10, loc="left", fontweight="bold", linespacing=1.4, parse_math=False)
    axes.set_xlabel(f"optimizer step{note}", fontsize=8)
    axes.locator_params(axis="x", integer=True)
    axes.tick_params(labelsize=8, length=0)
    axes.grid(alpha=0.25, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#adb5bd")
    axes.margins(x=0.02)
    if labels:  # below the axes; a label may have dollar signs, or begin with an underscore
        below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.2)}
        legend = axes.legend(drawn, labels, fontsize=7, frameon=False, ncols=columns, handlelength=3, **below)
        for text in legend.get_texts():
            text.set_parse_math(False)


def stacked_parts(points: Points) -> dict[str, dict[int, float]]:
    """Seconds of each part by step, longest part first; parts below 1 % of the time are added to `other`."""
    parts = {name: dict(values) for name, values in points.items() if name.startswith("time/") and name != _SUM}
    totals = {name: math.fsum(part.values()) for name, part in parts.items()}
    large = sorted((name for name in parts if name != _REST), key=lambda name: -totals[name])
    large = [name for name in large[: _MOST_LINES - 1] if totals[name] >= 0.01 * sum(totals.values())]
    rest: dict[int, float] = {}
    for name in parts.keys() - set(large):
        for step, value in parts[name].items():
            rest[step] = rest.get(step, 0.0) + value
    return {name: parts[name] for name in large} | ({_REST: rest} if rest else {})


def short_labels(names: Sequence[str]) -> list[str]:
    """The names without the prefix that all of them share, such as `val/`."""
    heads = {name.partition("/")[0] for name in names}
    shared = len(heads) == 1 and all("/" in name for name in names)
    return [name.partition("/")[2] if shared else name for name in names]


def robust_limits(values: Sequence[float]) -> tuple[float, float] | None:
    """Axis limits for values that a few peaks would flatten.

    Returns:
        The range without the outermost 1 % at each end, plus a margin; None for 100 values or fewer, or if the full
        range is at most three times as wide, so nothing needs to be cut off.
    """
    if len(values) <= 100:
        return None
    ordered = sorted(values)
    cut = len(ordered) // 100
    low, high = ordered[cut], ordered[-1 - cut]
    if ordered[-1] - ordered[0] <= 3 * (high - low) or low == high:
        return None
    margin = 0.1 * (high - low)
    return low - margin, high + margin


def select(points: Points, wanted: Sequence[str]) -> list[str]:
    """Names that match those wanted, with stars resolved, at most eight. Of equal lines only the first is shown."""
    names = [name for pattern in wanted for name in points if _matches(name, pattern)]
    lines: dict[tuple[Point, ...], str] = {}
    for name in names:
        lines.setdefault(tuple((step, round(value, 6)) for step, value in points[name]), name)
    return list(lines.values())[:_MOST_LINES]


def _matches(name: str, pattern: str) -> bool:
    if not pattern.endswith("*"):
        return name == pattern
    return name.startswith(pattern[:-1]) and not _NOT_SCORES.match(name)
