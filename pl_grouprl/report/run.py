"""Reads the files in a run folder."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml

from pl_grouprl.callbacks.metric_history import MetricHistory
from pl_grouprl.callbacks.run_summary import VALIDATION_PREFIXES

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
        name: Name of the run on the page; by default, that of the folder.
        options_files: Names of files with options; the first that the folder has is read.

    Raises:
        FileNotFoundError: If there is no `metrics.csv`; names the run folders below, if any.
        ValueError: If it has no metrics yet, or a file is damaged.
    """
    metrics = folder / "metrics.csv"
    if not metrics.is_file():
        below = sorted(path.parent for path in folder.glob("*/metrics.csv"))
        remedy = "a CSVLogger writes it every `flush_logs_every_n_steps` steps, and at the end"
        if below:
            remedy = f"pass one of {', '.join(map(str, below))}"
        raise FileNotFoundError(f"{folder} has no metrics.csv; {remedy}.")
    history = _history(metrics)
    if not history.points:
        raise ValueError(f"{metrics} has no metrics yet.")
    return RecordedRun(
        name=name or folder.name,
        folder=folder,
        history=history,
        options=_options([folder / file for file in options_files]),
        completions=_completions(folder / "completions.jsonl"),
        training_seconds=_training_seconds(folder / "summary.json"),
    )


def different_options(runs: Sequence[RecordedRun]) -> dict[str, list[Any]]:
    """Values of the options in which the runs differ, by name; None where a run has no such option.

    Of runs whose options were not recorded nothing is known: they are left out of the comparison.
    """
    names = dict.fromkeys(name for run in runs for name in run.options)
    values = {name: [run.options.get(name) for run in runs] for name in names}
    known = [number for number, run in enumerate(runs) if run.options]
    return {name: own for name, own in values.items() if any(own[number] != own[known[0]] for number in known)}


@contextmanager
def _naming_file(path: Path, kind: str) -> Iterator[None]:
    """Add the path and the expected kind to errors in a file's contents."""
    try:
        yield
    except (ValueError, TypeError, LookupError, csv.Error, yaml.YAMLError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(f"{path} is not {kind} ({reason}); restore it or move it away.") from error


def _whole_lines(path: Path) -> list[str]:
    """The complete lines; a running or killed run may have left the last one unfinished."""
    with path.open(encoding="utf-8", newline="\n") as file:  # no other character ends a line
        return [line for line in file if line.endswith("\n")]


def _history(path: Path) -> MetricHistory:
    """Read the metrics. Lightning counts the current step from 0; the history counts the steps done."""
    history = MetricHistory()
    with _naming_file(path, "a file of metrics by step"):
        rows = [(int(row.pop("step")), _values(row)) for row in csv.DictReader(_whole_lines(path))]
        rows = [(step, values) for step, values in rows if values]
        before = _rows_before_training(rows)
        for number, (step, values) in enumerate(rows):
            history.record(step if number < before else step + 1, values)
    return history


def _values(row: Mapping[str, str]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value and name != "epoch"}


def _rows_before_training(rows: Sequence[tuple[int, Mapping[str, float]]]) -> int:
    """The number of rows that a validation before the first step wrote; they have the step of what follows."""
    training = (number for number, (_, values) in enumerate(rows) if not _is_validation(values))
    first = next(training, len(rows))
    steps = {0, rows[first][0]} if first < len(rows) else {0}
    return next((number for number, (step, _) in enumerate(rows[:first]) if step not in steps), first)


def _is_validation(values: Mapping[str, float]) -> bool:
    return all(name.startswith(VALIDATION_PREFIXES) for name in values)


def _options(paths: Sequence[Path]) -> dict[str, Any]:
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        return {}
    with _naming_file(path, "a configuration"):
        text = path.read_text(encoding="utf-8")
        config = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        return dict(_flat("", config)) if config else {}


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of nested mappings and lists, with dotted names."""
    inner = value.items() if isinstance(value, Mapping) else list(enumerate(value)) if isinstance(value, list) else ()
    if not inner:
        yield name, value
    for key, item in inner:
        yield from _flat(f"{name}.{key}" if name else str(key), item)


def _completions(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    with _naming_file(path, "a file of completions"):
        rows = [json.loads(line) for line in _whole_lines(path)]
        for row in rows:
            _SHOWN_OF_COMPLETION(row)
    return rows


def _training_seconds(path: Path) -> float | None:
    if not path.is_file():
        return None
    with _naming_file(path, "a summary"):
        return float(json.loads(path.read_text(encoding="utf-8"))["training_seconds"])
