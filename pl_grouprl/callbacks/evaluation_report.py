"""Reports a validation or test: a row per completion, and a table of metrics per data source."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain

Row = dict[str, Any]

_METRICS = ("mean", "best", "maj", "pass")


class EvaluationRows:
    """Numbers the prompts of an evaluation from 0, over all its batches and ranks."""

    def __init__(self) -> None:
        self._num_prompts = 0

    def of_batch(
        self, outputs: Mapping[str, Any], rows_of: Callable[[RolloutGroup, int], list[Row]], device: Any
    ) -> list[Row]:
        """Return one row per completion of all ranks' batches, in the order of the prompts. Collective.

        Args:
            outputs: Result of this rank's step: `groups`, whose `group_id` is the position of their prompt in the batch
                over all ranks, and their `answers`.
            rows_of: Creates the rows of a group, given the group and that position.
            device: As for `gather_plain`.
        """
        of_this_rank = []
        for place, (group, answers) in enumerate(zip(outputs["groups"], outputs["answers"], strict=True)):
            position = place if group.group_id is None else group.group_id
            of_rollouts = [answer for answer, e in zip(answers, group.episodes, strict=True) for _ in e.rows]
            rows = [row | {"answer": answer} for row, answer in zip(rows_of(group, position), of_rollouts, strict=True)]
            of_this_rank.append([position, json.dumps(rows, default=str)])
        of_all_ranks = sorted(pair for pairs in gather_plain(of_this_rank, device) for pair in pairs)
        first = self._num_prompts
        self._num_prompts += len(of_all_ranks)
        return [row | {"group": first + position} for position, rows in of_all_ranks for row in json.loads(rows)]


def source_table(metrics: Mapping[str, Any], prefix: str) -> str:
    """The metrics `{prefix}/{data_source}/{name}@{k}` as text, a line per data source; empty if there are none."""
    by_source = _metrics_by_source(metrics, prefix)
    if not by_source:
        return ""
    columns = sorted({metric for values in by_source.values() for metric in values}, key=_column_order)
    width = max(len("data source"), *map(len, by_source))
    lines = ["  ".join([f"{'data source':<{width}}", *(f"{column:>7}" for column in columns)])]
    for source, values in sorted(by_source.items()):
        cells = [f"{values[column]:.3f}" if column in values else "" for column in columns]
        row = zip(columns, cells, strict=True)
        lines.append("  ".join([f"{source:<{width}}", *(f"{cell:>{max(7, len(column))}}" for column, cell in row)]))
    return "\n".join(line.rstrip() for line in lines)


def _metrics_by_source(metrics: Mapping[str, Any], prefix: str) -> dict[str, dict[str, float]]:
    by_source: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, metric = name.removeprefix(f"{prefix}/").rpartition("/")
        if source and name.startswith(f"{prefix}/") and metric.partition("@")[0] in _METRICS and "@" in metric:
            by_source.setdefault(source, {})[metric] = float(value)
    return by_source


def _column_order(metric: str) -> tuple[int, int]:
    name, _, k = metric.partition("@")
    return _METRICS.index(name), int(k)
