"""The report of `compare_algorithms.py`: a figure, a table, and everything as JSON."""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Iterable, Sequence
from itertools import cycle, groupby
from pathlib import Path
from typing import Any, NamedTuple

Run = dict[str, Any]
"""One training run, as plain values: see `compare_algorithms.run_or_read`."""

PARTS = ("rollout", "reward", "old_logprobs", "ref_logprobs", "values", "update")
"""Timed parts of a step: names of the metrics `time/...`."""

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
"""Okabe and Ito's colours, which colour-blind readers can distinguish."""

_LABEL_GAP = 0.055
"""Least distance of two labels, as a share of the axis."""


class Summary(NamedTuple):
    """The table row of an algorithm, over its seeds.

    Attributes:
        label: Its name.
        seeds: In order.
        first: Reward before training, mean over the seeds.
        final: Reward at the last validation, of each seed.
        tokens: Trained tokens per optimizer step, mean.
        positions: Advantages computed per optimizer step, mean.
        compression: Share of the trained tokens that share another token's advantage; 0 without token groups.
        seconds: Median over all optimizer steps, by part.
        critic_seconds: Median of the critic's forward and backward alone; None without a critic.
    """

    label: str
    seeds: list[int]
    first: float
    final: list[float]
    tokens: float
    positions: float
    compression: float
    seconds: dict[str, float]
    critic_seconds: float | None


class Curve(NamedTuple):
    """An algorithm's reward at each validation that all of its seeds have: means, and the range over the seeds."""

    label: str
    color: str
    steps: list[int]
    seconds: list[float]
    mean: list[float]
    low: list[float]
    high: list[float]


def write_report(runs: Sequence[Run], folder: Path) -> str:
    """Write `comparison.png`, `comparison.md` and `comparison.json`.

    Args:
        runs: Sorted by label.
        folder: Where to.

    Returns:
        The Markdown text.
    """
    by_label = [list(own) for _, own in groupby(runs, key=lambda run: run["label"])]
    summaries = [summarize(own) for own in by_label]
    folder.mkdir(parents=True, exist_ok=True)
    text = markdown(summaries, runs)
    (folder / "comparison.md").write_text(text, encoding="utf-8")
    parts = {"summary": [own._asdict() for own in summaries], "runs": runs}
    lines = (f'"{name}": [\n' + ",\n".join(map(json.dumps, rows)) + "\n]" for name, rows in parts.items())
    (folder / "comparison.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    curves = [curve(own, color) for own, color in zip(by_label, cycle(COLORS), strict=False)]
    draw(curves, runs, folder / "comparison.png")
    return text


def summarize(runs: Sequence[Run]) -> Summary:
    """Sum up the runs of one algorithm."""
    tokens, positions = (_mean(value for run in runs for value in run[name]) for name in ("tokens", "positions"))
    critic = [value for run in runs for value in run["critic_update_seconds"]]
    grouped = all(run["algorithm"] == "GroupPPO" for run in runs)
    return Summary(
        label=runs[0]["label"],
        seeds=[run["seed"] for run in runs],
        first=_mean(run["curve"][0]["reward"] for run in runs),
        final=[run["curve"][-1]["reward"] for run in runs],
        tokens=tokens,
        positions=positions,
        compression=1 - positions / tokens if grouped else 0.0,
        seconds={
            part: statistics.median(value for run in runs for value in run["seconds"][part])
            for part in (*PARTS, "rest", "step")
        },
        critic_seconds=statistics.median(critic) if critic else None,
    )


def curve(runs: Sequence[Run], color: str) -> Curve:
    """Join the curves of one algorithm."""
    shared = set.intersection(*({point["step"] for point in run["curve"]} for run in runs))
    columns = [[point for point in run["curve"] if point["step"] in shared] for run in runs]
    at_each = list(zip(*columns, strict=True))
    rewards = [[point["reward"] for point in points] for points in at_each]
    return Curve(
        runs[0]["label"],
        color,
        sorted(shared),
        [_mean(point["seconds"] for point in points) for points in at_each],
        [_mean(own) for own in rewards],
        [min(own) for own in rewards],
        [max(own) for own in rewards],
    )


# The table.


def markdown(summaries: Sequence[Summary], runs: Sequence[Run]) -> str:
    """Both tables and what is needed to read them."""
    rewards = [
        [
            own.label,
            f"{own.first:.3f}",
            f"{_mean(own.final):.3f}",
            f"{min(own.final):.3f} to {max(own.final):.3f}",
            str(len(own.final)),
            f"{own.tokens:.0f}",
            f"{own.positions:.0f}",
            f"{own.compression:.2f}",
        ]
        for own in summaries
    ]
    names = ["", "before", "final", "over the seeds", "seeds", "tokens", "advantage positions", "compression"]
    seconds = [
        [own.label, *(_seconds(own.seconds[part]) for part in own.seconds), _seconds(own.critic_seconds)]
        for own in summaries
    ]
    return "\n".join(
        [
            f"Validation reward (`{runs[0]['options']['metric']}`) before training and after "
            f"{_steps(runs)} optimizer steps; trained tokens and advantage positions per step:",
            "",
            *table(names, rewards),
            "",
            "Advantage positions: GRPO computes one advantage for each rollout, PPO one for each token, GROUP PPO one "
            "for each token group. Compression: the share of the tokens that token groups leave without an advantage "
            "of their own. It is not a reduction in time.",
            "",
            "Seconds per optimizer step, medians over all steps and seeds (so parts need not add up to the step):",
            "",
            *table(["", *(part.replace("_", " ") for part in summaries[0].seconds), "critic alone"], seconds),
            "",
            "`update` is forward, backward and optimizer of policy and critic. `critic alone` is the critic's forward "
            "and backward in it, timed by itself after the last step. `rest` is everything else in a step, such as "
            "estimating advantages. Validation, checkpoints and creating the base policy are not included.",
            "",
            f"Conditions: {conditions(runs)}.",
            "",
        ]
    )


def table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table, aligned as plain text too."""
    widths = [max(len(cell) for cell in column) for column in zip(names, *rows, strict=True)]

    def line(cells: Iterable[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return [line(names), rule, *map(line, rows)]


def conditions(runs: Sequence[Run]) -> str:
    """The machine and versions; values that differ between runs are shown as a range."""
    parts = []
    for name in runs[0]["conditions"]:
        values = sorted({run["conditions"][name] for run in runs})
        shown = f"{values[0]}" if len(values) == 1 else f"{values[0]} to {values[-1]}"
        parts.append(f"{name.replace('_', ' ')} {shown}")
    return ", ".join(parts)


# The figure.


def draw(curves: Sequence[Curve], runs: Sequence[Run], path: Path) -> None:
    """Draw the reward over optimizer steps, and over seconds of training."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    by_step, by_second = figure.subplots(1, 2, sharey=True)
    for axes, name in ((by_step, "steps"), (by_second, "seconds")):
        for own in curves:
            places = getattr(own, name)
            axes.fill_between(places, own.low, own.high, color=own.color, alpha=0.15, linewidth=0)
            axes.plot(places, own.mean, color=own.color, linewidth=2)
            axes.plot(places[-1], own.mean[-1], "o", color=own.color, markersize=5, clip_on=False)
        axes.set_xlim(0, 1.01 * max(getattr(own, name)[-1] for own in curves))
        axes.locator_params(axis="x", steps=[1, 2, 5, 10])
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.25)
        axes.tick_params(labelsize=9, length=0)
    low, high = min(min(own.low) for own in curves), max(max(own.high) for own in curves)
    margin = 0.04 * ((high - low) or 1.0)
    by_step.set_ylim(low - margin, high + margin)
    by_step.set_xlabel("optimizer steps")
    by_second.set_xlabel("seconds of training, validation left out")
    _name_ends(by_step, curves)
    _name_durations(by_second, curves)
    title = f"Validation reward ({_metric(runs)})"
    figure.suptitle(f"{title}: {_band(runs)}", x=0.01, ha="left", fontsize=11)
    figure.supxlabel(textwrap.fill(conditions(runs), 220), fontsize=6, color="gray", x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def _name_ends(axes: Any, curves: Sequence[Curve]) -> None:
    """Write each name next to the end of its line, without overlaps."""
    low, high = axes.get_ylim()
    ordered = sorted(curves, key=lambda own: own.mean[-1])
    heights = spread([(own.mean[-1] - low) / (high - low) for own in ordered], _LABEL_GAP)
    for own, height in zip(ordered, heights, strict=True):
        text = f"{own.label} {own.mean[-1]:.2f}"
        axes.text(
            1.03, height, text, color=own.color, transform=axes.transAxes, va="center", fontsize=10, weight="bold"
        )


def _name_durations(axes: Any, curves: Sequence[Curve]) -> None:
    """Draw a vertical line down from the end of each curve, and write name and seconds next to it."""
    from matplotlib.patheffects import withStroke

    for number, own in enumerate(reversed(curves)):
        axes.vlines(own.seconds[-1], axes.get_ylim()[0], own.mean[-1], color=own.color, linewidth=1, linestyle=":")
        text = f"{own.label} {own.seconds[-1]:.0f} s "
        axes.text(
            own.seconds[-1],
            0.04 + _LABEL_GAP * number,
            text,
            color=own.color,
            transform=axes.get_xaxis_transform(),
            ha="right",
            va="center",
            fontsize=10,
            weight="bold",
            path_effects=[withStroke(linewidth=4, foreground="white")],
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights at least `gap` apart, none above 1, in one pass up and one down."""
    placed: list[float] = []
    for height in heights:
        placed.append(max(height, placed[-1] + gap) if placed else height)
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], placed[i + 1] - gap if i + 1 < len(placed) else 1.0)
    return placed


def _metric(runs: Sequence[Run]) -> str:
    """The metric without common prefix and suffix: `exact match` for `val/rewards/exact_match/mean`."""
    metric = runs[0]["options"]["metric"]
    return metric.removeprefix("val/").removeprefix("rewards/").removesuffix("/mean").replace("_", " ")


def _band(runs: Sequence[Run]) -> str:
    seeds = len({run["seed"] for run in runs})
    return f"mean of {seeds} seeds, band from the lowest seed to the highest" if seeds > 1 else "one seed"


def _steps(runs: Sequence[Run]) -> str:
    steps = sorted({run["curve"][-1]["step"] for run in runs})
    return str(steps[0]) if len(steps) == 1 else f"{steps[0]} to {steps[-1]}"


def _seconds(value: float | None) -> str:
    if not value:
        return "-"
    return f"{value:.2f}" if value >= 1 else f"{value:.3f}"


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(values)
