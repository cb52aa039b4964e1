"""Writes the page: a self-contained HTML file that needs no network."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any

from pl_grouprl.callbacks.curves import filled_panels, other_metrics, panel_figure
from pl_grouprl.callbacks.turns import turns_line
from pl_grouprl.report.run import OPTIONS_FILES, RecordedRun, Row, different_options
from pl_grouprl.utilities.writes import write_whole

GENERATOR = '<meta name="generator" content="pl_grouprl.report">'
"""Marks pages written by this module; only these are replaced."""

_MOST_STEPS = 6
_MOST_ROWS = 16

_FIGURES = (
    ("reward", "reward", "{first:.3f} → {last:.3f}"),
    ("val/reward", "validation reward", "{first:.3f} → {last:.3f} (best {max:.3f})"),
    ("completions/mean_length", "completion length", "{first:.1f} → {last:.1f} tokens"),
    ("entropy", "entropy", "{first:.3f} → {last:.3f} nats per token"),
    ("prefix/token_ratio", "token ratio", "mean {mean:.2f}"),
    ("time/step", "seconds per step", "mean {mean:.2f}"),
    ("perf/tokens_per_second", "tokens per second", "mean {mean:,.0f}"),
)
"""Metrics in the table at the top: name, label, and the format of their statistics."""


def write_report(runs: Sequence[RecordedRun], path: Path) -> Path:
    """Write the page of one or several runs.

    Args:
        runs: At least one, with different names.
        path: The file. An earlier report is replaced.

    Returns:
        The file.

    Raises:
        FileExistsError: If the file exists and is not a report.
        OSError: If it cannot be written.
    """
    if path.is_dir() or (path.is_file() and GENERATOR not in path.read_text("utf-8", "replace")[:1000]):
        raise FileExistsError(f"{path} exists and is not a report; pass another file as --output.")
    write_whole(path, report_page(runs).encode("utf-8", "backslashreplace"))
    return path


def report_page(runs: Sequence[RecordedRun]) -> str:
    """The page as text."""
    title = " · ".join(run.name for run in runs)
    points = [run.history.points for run in runs]
    sections = [
        f"<h1>{escape(title)}</h1>",
        _overview(runs),
        f"<h2>Curves</h2>{_panels(runs, filled_panels(points))}",
        _other_metrics(runs, other_metrics(points)),
        _different(runs) if len(runs) > 1 else "",
        *(_completions(run) for run in runs if run.completions),
        *(_all_options(run) for run in runs if run.options),
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(filter(None, sections)) + "\n</body></html>\n"
    )


def _overview(runs: Sequence[RecordedRun]) -> str:
    rows: list[list[Any]] = [["folder", *(run.folder for run in runs)], ["last step", *(run.steps for run in runs)]]
    rows.append(["training time", *(_duration(run.training_seconds) for run in runs)])
    for metric, name, form in _FIGURES:
        if any(metric in run.history.points for run in runs):
            rows.append([name, *(_figure(run, metric, form) for run in runs)])
    return _table(["", *(run.name for run in runs)], rows, "overview")


def _duration(seconds: float | None) -> str:
    return "not ended" if seconds is None else str(timedelta(seconds=round(seconds)))


def _figure(run: RecordedRun, metric: str, form: str) -> str:
    return form.format(**run.history.statistics(metric)) if metric in run.history.points else ""


def _panels(runs: Sequence[RecordedRun], titles: Iterable[str]) -> str:
    """Each panel as SVG, one grid column wide per axes, up to the full width."""
    points = {run.name: run.history.points for run in runs}
    panels = []
    for title in titles:
        figure = panel_figure(title, points)
        width = ("one", "two", "all")[min(len(figure.axes), 3) - 1]
        panels.append(f'<figure class="{width}" aria-label="{escape(title)}">{_svg(figure)}</figure>')
    return f'<div class="panels">{"".join(panels)}</div>'


def _other_metrics(runs: Sequence[RecordedRun], names: Sequence[str]) -> str:
    """A panel for each metric that the curves leave out, folded."""
    if not names:
        return ""
    return f"<details><summary>Other metrics ({len(names)})</summary>{_panels(runs, names)}</details>"


def _svg(figure: Any) -> str:
    """A figure as an SVG element, with text as text rather than paths."""
    from matplotlib import rc_context

    drawing = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif"}):
        figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = drawing.getvalue()
    return text[text.index("<svg") :]  # HTML has no XML declaration


def _different(runs: Sequence[RecordedRun]) -> str:
    rows = [[name, *values] for name, values in different_options(runs).items()]
    unknown = [escape(run.name) for run in runs if not run.options]
    found = _table(["option", *(run.name for run in runs)], rows, "options") if rows else "<p>None.</p>"
    if unknown:
        note = f"<p>Not recorded: {', '.join(unknown)} (no {' or '.join(OPTIONS_FILES)}).</p>"
        found = note + (found if rows else "")
    return f"<h2>Options that differ</h2>{found}"


def _completions(run: RecordedRun) -> str:
    """The completions of a few steps; only the last step is expanded."""
    steps = sorted({row["step"] for row in run.completions})
    if len(steps) > _MOST_STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
    parts = []
    for step in steps:
        rows = [row for row in run.completions if row["step"] == step]
        cells = [_completion_cells(row) for row in rows[:_MOST_ROWS]]
        note = f" ({_MOST_ROWS} of {len(rows)})" if len(rows) > _MOST_ROWS else ""
        table = _table(
            ["prompt", "completion", "reward", "tokens", "end"], _without_repeated_prompts(cells), "completions"
        )
        is_open = " open" if step == steps[-1] else ""
        parts.append(f"<details{is_open}><summary>Step {step}{note}</summary>{table}</details>")
    return f"<h2>Completions of {escape(run.name)}</h2>{''.join(parts)}"


def _completion_cells(row: Row) -> list[Any]:
    text = turns_line(row["messages"]) if "messages" in row else row["completion"]
    reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
    return [row["prompt"], text, reward, row["num_tokens"], row["finish_reason"]]


def _without_repeated_prompts(rows: Sequence[list[Any]]) -> list[list[Any]]:
    """The rows; a prompt is shown only where it changes."""
    previous = [None, *(row[0] for row in rows)]
    return [["" if row[0] == before else row[0], *row[1:]] for row, before in zip(rows, previous, strict=False)]


def _all_options(run: RecordedRun) -> str:
    table = _table(["option", "value"], [[name, value] for name, value in run.options.items()], "options")
    return f"<details><summary>All options of {escape(run.name)}</summary>{table}</details>"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = ["".join(f"<td><div>{_text(value)}</div></td>" for value in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>\n" for line in lines)
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def _text(value: Any) -> str:
    return "" if value is None else escape(str(value))


_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #212529; background: #f8f9fa; margin: 0 auto; padding: 1.5rem;
  max-width: 1440px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 1rem;
  grid-auto-flow: dense; }
figure { margin: 0; padding: .5rem; background: #fff; border: 1px solid #e9ecef; border-radius: 8px; }
figure.all { grid-column: 1 / -1; } figure.two { grid-column: span 2; }
@media (max-width: 57rem) { .panels { grid-template-columns: 1fr; } figure.two { grid-column: auto; } }
figure svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; background: #fff; border: 1px solid #e9ecef; border-radius: 8px; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid #f1f3f5; }
th { background: #f1f3f5; font-weight: 600; } td div { overflow-wrap: anywhere; }
.overview td:first-child, .options td:first-child { color: #495057; white-space: nowrap; }
.options td { font-family: ui-monospace, monospace; font-size: .8rem; }
.completions td:nth-child(-n+2) div { white-space: pre-wrap; max-height: 14rem; overflow-y: auto; }
.completions td:first-child { width: 40%; }
.completions td:nth-child(3), .completions td:nth-child(4) { text-align: right; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .3rem 0; font-weight: 600; }
"""
