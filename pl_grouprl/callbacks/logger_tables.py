"""Tables of completions, episodes and summaries for the loggers of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch import Trainer

from pl_grouprl.callbacks.evaluation_report import Row
from pl_grouprl.callbacks.run_folder import is_trial
from pl_grouprl.callbacks.turns import turns_line
from pl_grouprl.loggers import Table, log_table
from pl_grouprl.utilities.writes import OptionalWrites

COMPLETION_COLUMNS = (
    "step",
    "group",
    "data_source",
    "prompt",
    "completion",
    "episode",
    "turns",
    "reward",
    "rewards",
    "num_tokens",
    "finish_reason",
    "answer",
)
MESSAGE_COLUMNS = ("step", "group", "rollout", "position", "role", "content", "tool_calls", "reward")
SUMMARY_COLUMNS = ("metric", "first", "last", "min", "max", "mean", "min_last_quarter", "count")


def log_tables(trainer: Trainer, tables: Sequence[Table], writes: OptionalWrites) -> None:
    """Add tables to every logger; rank 0 only. Empty tables and `fast_dev_run` log nothing."""
    if is_trial(trainer):
        return
    for logger in trainer.loggers:
        for table in tables:
            if table.rows:
                with writes.to(logger.log_dir or logger.name, Exception):
                    log_table(logger, table)


def completions_table(rows: Sequence[Row], step: int, name: str, markdown: str) -> Table:
    """A row per completion; an episode's `completion` is all its turns on one line.

    Args:
        rows: Results of `completion_rows`.
        step: Optimizer steps done.
        name: Name of the table.
        markdown: What text-only loggers show.
    """
    plain = [
        row | {"step": step} | ({"completion": turns_line(row["messages"])} if "messages" in row else {})
        for row in rows
    ]
    return Table(name, step, COMPLETION_COLUMNS, _values(plain, COMPLETION_COLUMNS), markdown)


def episodes_table(rows: Sequence[Row], step: int, name: str) -> Table:
    """A row per message of each episode; `rollout` numbers the rollouts of a group.

    Args:
        rows: As for `completions_table`.
        step: Optimizer steps done.
        name: Name of the table.
    """
    messages: list[Row] = []
    counts: dict[Any, int] = {}
    for row in rows:
        rollout = counts[row["group"]] = counts.get(row["group"], -1) + 1
        place = {"step": step, "group": row["group"], "rollout": rollout, "reward": row["reward"]}
        messages += [
            {**message, "position": position, **place} for position, message in enumerate(row.get("messages", ()))
        ]
    return Table(name, step, MESSAGE_COLUMNS, _values(messages, MESSAGE_COLUMNS))


def summary_table(statistics: Mapping[str, Mapping[str, float]], step: int) -> Table:
    """A row per metric of a run, with the figures of `summary.json`."""
    rows = [{"metric": name, **values} for name, values in statistics.items()]
    return Table("summary", step, SUMMARY_COLUMNS, _values(rows, SUMMARY_COLUMNS))


def _values(rows: Sequence[Row], columns: Sequence[str]) -> list[list[Any]]:
    """The values of the columns; any that is not a string or number is written as JSON."""
    return [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, str):
        value = json.dumps(value, ensure_ascii=False, default=str) if value else None
    return value and value.encode("utf-8", "backslashreplace").decode()  # loggers refuse lone surrogates
