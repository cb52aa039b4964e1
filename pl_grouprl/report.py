"""One self-contained HTML page of a run, or of several: `python -m pl_grouprl.report RUN... [--output FILE]`."""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from pl_grouprl.callbacks.completions_table import turns_line
from pl_grouprl.callbacks.curves import MetricHistory, filled_panels, other_metrics, panel_figure
from pl_grouprl.callbacks.run_summary import VALIDATION_PREFIXES
from pl_grouprl.utilities.checkpoint_files import write_whole

Row = dict[str, Any]

OPTIONS_FILES = ("config.yaml", "options.json")
"""Files with options: of the command line, and of `RunSummary`; they name options differently."""


_SHOWN_OF_COMPLETION = itemgetter("step", "prompt", "completion", "reward", "num_tokens", "finish_reason")
"""Required keys of a completion; the page shows them."""


@dataclass(frozen=True)
class RecordedRun:
    """The contents of a run folder.

    Attributes:
        name: Distinguishes it from the other runs of the page.
        folder: The run folder.
        history: Metrics by optimizer steps done, from `metrics.csv`.
        options: Options by dotted name, from one of `OPTIONS_FILES`; empty without such a file.
        completions: Rows of `completions.jsonl`; empty without that file.
        training_seconds: From `summary.json`; None if the run has not ended.
    """

    name: str
    folder: Path
    history: MetricHistory
    options: Mapping[str, Any] = field(default_factory=dict)
    completions: Sequence[Row] = ()
    training_seconds: float | None = None

    @property
    def steps(self) -> int:
        """The last step with a metric."""
        return max(points[-1][0] for points in self.history.points.values())


def read_runs(folders: Sequence[str | Path]) -> list[RecordedRun]:
    """Read several runs. Each is named by the last two parts of its path, or as many as distinguish it from the others.

    Raises:
        ValueError: If a folder is passed twice.
        OSError: If one is not a run folder.
    """
    paths = [Path(folder).resolve() for folder in folders]
    twice = next((path for path in paths if paths.count(path) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is passed twice; pass each run once.")
    depth = next(d for d in itertools.count(2) if len({path.parts[-d:] for path in paths}) == len(paths))
    in_all = [file for file in OPTIONS_FILES if all((path / file).is_file() for path in paths)]
    return [
        read_run(Path(folder), str(Path(*path.parts[-depth:])), in_all[:1] or OPTIONS_FILES)
        for folder, path in zip(folders, paths, strict=True)
    ]


def read_run(folder: Path, name: str | None = None, options_files: Sequence[str] = OPTIONS_FILES) -> RecordedRun:
    """Read a run folder.

    Args:
        folder: The folder, with the `metrics.csv` of Lightning's `CSVLogger`.
        name: Name of the run on the page; by default, the folder's name.
        options_files: Names of files with options; the first that the folder has is read.

    Raises:
        FileNotFoundError: If there is no `metrics.csv`; names the run folders below, if any.
        ValueError: If it has no metrics yet, or a file is damaged.
    """
    metrics = folder / "metrics.csv"
    if not metrics.is_file():
        below = sorted(path.parent for path in folder.glob("*/metrics.csv"))
        written = "a CSVLogger writes it every `flush_logs_every_n_steps` steps, and at the end"
        remedy = written if folder.is_dir() else "there is no such folder"
        if below:
            remedy = f"pass one of {', '.join(map(str, below))}"
        raise FileNotFoundError(f"{folder} has no metrics.csv; {remedy}.")
    history = _history(metrics)
    if not history.points:
        raise ValueError(f"{metrics} has no metrics yet.")
    options: dict[str, Any] = {}
    if path := next((folder / file for file in options_files if (folder / file).is_file()), None):
        with _naming_file(path, "a configuration"):
            text = path.read_text(encoding="utf-8")
            config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
            options = dict(_flat("", config)) if config else {}
    completions: list[Row] = []
    if (path := folder / "completions.jsonl").is_file():
        with _naming_file(path, "a file of completions"):
            completions = [json.loads(line) for line in _whole_lines(path)]
            for row in completions:
                _SHOWN_OF_COMPLETION(row)
    seconds = None
    if (path := folder / "summary.json").is_file():
        with _naming_file(path, "a summary"):
            seconds = float(json.loads(path.read_text(encoding="utf-8"))["training_seconds"])
    return RecordedRun(name or folder.name, folder, history, options, completions, seconds)


@contextmanager
def _naming_file(path: Path, kind: str) -> Iterator[None]:
    """Add the path and the expected kind to errors in a file's contents."""
    try:
        yield
    except (ValueError, TypeError, LookupError, csv.Error, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not {kind} ({reason}); restore it or move it away.") from error


def _whole_lines(path: Path) -> list[str]:
    """The lines of a file that may still be written: the last may be unfinished."""
    with path.open(encoding="utf-8", newline="\n") as lines:  # no other character ends a line
        return [line for line in lines if line.endswith("\n")]


def _history(path: Path) -> MetricHistory:
    """Read the metrics. Lightning counts the current step from 0; the history counts the steps done."""
    history = MetricHistory()
    with _naming_file(path, "a file of metrics by step"):
        rows = []
        for row in csv.DictReader(_whole_lines(path)):
            step = int(row.pop("step"))
            values = {name: float(value) for name, value in row.items() if value and name != "epoch"}
            if values:
                rows.append((step, values))
        # Rows of a validation before the first step come first, and have the step of what follows.
        training = (
            number
            for number, (_, values) in enumerate(rows)
            if not all(name.startswith(VALIDATION_PREFIXES) for name in values)
        )
        first = next(training, len(rows))
        steps = {0, *(step for step, _ in rows[first : first + 1])}
        before = next((number for number, (step, _) in enumerate(rows[:first]) if step not in steps), first)
        for number, (step, values) in enumerate(rows):
            history.record(step if number < before else step + 1, values)
    return history


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, with dotted names."""
    inner = value.items() if isinstance(value, Mapping) else list(enumerate(value)) if isinstance(value, list) else ()
    if not inner:
        yield name, value
    for key, item in inner:
        yield from _flat(f"{name}.{key}" if name else str(key), item)


def different_options(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Values of the options in which the runs differ, by name; None where a run has no such option.

    Runs whose options were not recorded are not compared.
    """
    names = dict.fromkeys(name for run in runs for name in run.options)
    values = {name: [run.options.get(name) for run in runs] for name in names}
    known = [number for number, run in enumerate(runs) if run.options]
    return {name: own for name, own in values.items() if any(own[number] != own[known[0]] for number in known)}


# The page: a self-contained HTML file that needs no network.

GENERATOR = '<meta name="generator" content="pl_grouprl.report">'
"""Marks pages written by this module; only these are replaced."""

_MOST_STEPS, _MOST_ROWS = 6, 16

_FIGURES = (
    ("reward", "reward", "{first:.3f} → {last:.3f}"),
    ("val/reward", "validation reward", "{first:.3f} → {last:.3f} (best {max:.3f})"),
    ("completions/mean_length", "completion length", "{first:.1f} → {last:.1f} tokens"),
    ("entropy", "entropy", "{first:.3f} → {last:.3f} nats per token"),
    ("value/explained_variance", "explained variance of the critic", "{first:.3f} → {last:.3f}"),
    ("token_group/compression_ratio", "compression", "mean {mean:.3f}, last {last:.3f}"),
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
    times = [
        "not ended" if run.training_seconds is None else timedelta(seconds=round(run.training_seconds)) for run in runs
    ]
    overview: list[list[Any]] = [["folder", *(run.folder for run in runs)], ["last step", *(run.steps for run in runs)]]
    overview.append(["training time", *times])
    for metric, name, form in _FIGURES:
        if any(metric in own for own in points):
            figures = (
                form.format(**run.history.statistics(metric)) if metric in run.history.points else "" for run in runs
            )
            overview.append([name, *figures])
    sections = [f"<h1>{escape(title)}</h1>", _table(["", *(run.name for run in runs)], overview, "overview")]
    sections.append(f"<h2>Curves</h2>{_panels(runs, filled_panels(points))}")
    if names := other_metrics(points):
        panels = _panels(runs, names)
        sections.append(f"<details><summary>Other metrics ({len(names)})</summary>{panels}</details>")
    if len(runs) > 1:
        rows = [[name, *values] for name, values in different_options(runs).items()]
        unknown = [escape(run.name) for run in runs if not run.options]
        sections.append("<h2>Options that differ</h2>")
        if unknown:
            sections[-1] += f"<p>Not recorded: {', '.join(unknown)} (no {' or '.join(OPTIONS_FILES)}).</p>"
        if rows:
            sections[-1] += _table(["option", *(run.name for run in runs)], rows, "options")
        elif not unknown:
            sections[-1] += "<p>None.</p>"
    sections += [_completions(run) for run in runs if run.completions]
    for run in runs:
        if run.options:
            table = _table(["option", "value"], [[name, value] for name, value in run.options.items()], "options")
            sections.append(f"<details><summary>All options of {escape(run.name)}</summary>{table}</details>")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{GENERATOR}\n'
        f'<meta name="viewport" content="width=device-width"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


def _panels(runs: Sequence[RecordedRun], titles: Iterable[str]) -> str:
    """Each panel as SVG with text as text, one grid column wide per axes, up to the full width."""
    from matplotlib import rc_context

    points = {run.name if len(runs) > 1 else "": run.history.points for run in runs}
    panels = []
    for title in titles:
        figure, drawing = panel_figure(title, points), io.StringIO()
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "report", "font.family": "sans-serif"}):
            figure.savefig(drawing, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        svg = drawing.getvalue()
        svg = svg[svg.index("<svg") :]  # HTML has no XML declaration
        width = ("one", "two", "all")[min(len(figure.axes), 3) - 1]
        panels.append(f'<figure class="{width}" aria-label="{escape(title)}">{svg}</figure>')
    return f'<div class="panels">{"".join(panels)}</div>'


def _completions(run: RecordedRun) -> str:
    """The completions of a few steps; only the last step is expanded."""
    steps = sorted({row["step"] for row in run.completions})
    if len(steps) > _MOST_STEPS:
        steps = [steps[round(i * (len(steps) - 1) / (_MOST_STEPS - 1))] for i in range(_MOST_STEPS)]
    parts = []
    for step in steps:
        rows = [row for row in run.completions if row["step"] == step]
        cells, before = [], None
        for row in rows[:_MOST_ROWS]:
            text = turns_line(row["messages"]) if "messages" in row else row["completion"]
            reward = "" if row["reward"] is None else f"{row['reward']:.3f}"
            prompt = "" if row["prompt"] == before else row["prompt"]  # shown only where it changes
            before = row["prompt"]
            cells.append([prompt, text, reward, row["num_tokens"], row["finish_reason"]])
        note = f" ({_MOST_ROWS} of {len(rows)})" if len(rows) > _MOST_ROWS else ""
        table = _table(["prompt", "completion", "reward", "tokens", "end"], cells, "completions")
        is_open = " open" if step == steps[-1] else ""
        parts.append(f"<details{is_open}><summary>Step {step}{note}</summary>{table}</details>")
    return f"<h2>Completions of {escape(run.name)}</h2>{''.join(parts)}"


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]], kind: str) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = ""
    for row in rows:
        cells = ("" if value is None else escape(str(value)) for value in row)
        body += f"<tr>{''.join(f'<td><div>{cell}</div></td>' for cell in cells)}</tr>\n"
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


_STYLE = """
:root { color-scheme: light dark; --ink: #212529; --quiet: #495057; --page: #f8f9fa; --card: #fff; --head: #f1f3f5;
  --line: #e9ecef; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #dee2e6; --quiet: #adb5bd; --page: #16181d; --card: #1f2229; --head: #2a2e37; --line: #343a46; }
  figure svg { filter: invert(.88) hue-rotate(180deg); }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); margin: 0 auto;
  padding: clamp(.75rem, 3vw, 1.5rem); max-width: 1440px; }
h1 { font-size: 1.5rem; overflow-wrap: anywhere; } h2 { font-size: 1.15rem; margin: 2rem 0 .75rem; }
.panels { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 1rem;
  grid-auto-flow: dense; }
figure { margin: 0; padding: .5rem; overflow-x: auto; }
figure, .scroll { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
figure.all { grid-column: 1 / -1; } figure.two { grid-column: span 2; }
figure svg { width: 100%; height: auto; display: block; }
@media (max-width: 57rem) {
  .panels { grid-template-columns: 100%; } figure.two { grid-column: auto; } figure.two svg { min-width: 40rem; }
  figure.all svg { min-width: 60rem; } .overview td { white-space: normal !important; }
}
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem; border-bottom: 1px solid var(--head); }
th { background: var(--head); font-weight: 600; } td div { overflow-wrap: anywhere; min-width: 4.5rem; }
.overview td:first-child, .options td:first-child { color: var(--quiet); white-space: nowrap; }
.options td { font-family: ui-monospace, monospace; font-size: .8rem; }
.completions td:nth-child(-n+2) div { white-space: pre-wrap; max-height: 14rem; overflow-y: auto; }
.completions td:first-child { width: 40%; }
.completions td:nth-child(3), .completions td:nth-child(4) { text-align: right; }
details { margin: .5rem 0; } summary { cursor: pointer; padding: .3rem 0; font-weight: 600; }
"""


def main(args: Sequence[str] | None = None) -> None:
    """Write the page and print its path."""
    parser = argparse.ArgumentParser(
        "python -m pl_grouprl.report", description="Write one HTML page of a run, or of several side by side."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder, such as runs/grpo_pg/version_0")
    parser.add_argument("--output", default="report.html", help="the file to write (default: %(default)s)")
    options = parser.parse_args(args)
    try:
        path = write_report(read_runs(options.runs), Path(options.output))
    except (OSError, ValueError) as error:
        sys.exit(f"{parser.prog}: {error}")
    print(f"Report: {path}")


if __name__ == "__main__":
    main()
