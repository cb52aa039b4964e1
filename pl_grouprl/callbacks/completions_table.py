"""Tables of prompts, completions and rewards: on the console, in the loggers, and after evaluations."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_grouprl.callbacks.checkpoints import claim, is_trial, run_folder
from pl_grouprl.loggers import Table, log_table, markdown_of
from pl_grouprl.rewards.base import content_text
from pl_grouprl.types import Messages, RolloutGroup
from pl_grouprl.utilities.checkpoint_files import OptionalWrites, append_whole
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.options import check_fields
from pl_grouprl.utilities.text import output_encoding, printable

Row = dict[str, Any]

CONSOLE_WIDTH = 120

_PREFIXES = {"validate": "val_", "test": "test_"}
"""Prefixes of the file's and tables' names, by stage; `fit` has none."""


@dataclass(eq=False, repr=False)
class CompletionsTable(Callback):
    """Show completions of the policy at the first optimizer step and every `every_n_steps` steps.

    Works with any module with an attribute `last_rollouts`, as in `GRPO`: a list of `RolloutGroup`, or an object whose
    `groups` is one. Shows rank 0's rows, and all turns of an episode: `call(...) -> result | answer`. Every completion
    of the chosen groups is appended as a line to `completions.jsonl` in the run folder (episodes with their `messages`)
    and added to the table `completions` of each logger; the messages of episodes go to another table, `episodes`. Rows
    of earlier steps stay; see `pl_grouprl.loggers.log_table`. A failure to write is a warning.

    `validate` and `test` write the completions of all prompts of all ranks, with the `answer` that counts in maj@k, to
    `val_completions.jsonl` or `test_completions.jsonl` and to tables of the same names, and show those of the first
    prompts; `group` is then the number of the prompt. For this, the module's validation and test steps must return
    `groups` and `answers`, as in `GRPO`.

    Attributes:
        every_n_steps: Optimizer steps between tables.
        num_groups: Number of prompts to show, from the start of the batch.
        num_completions: Completions per prompt on the console and in TensorBoard, spread evenly from the highest to
            the lowest reward; the file and other loggers get all of them.
        max_characters: Longer prompts and completions are shortened in the middle on the console and in TensorBoard.
        filename: Name of the file in the run folder; no file if None.
        console: Print the table.

    Raises:
        ValueError: If a count is out of range.
    """

    every_n_steps: int = 10
    num_groups: int = 2
    num_completions: int = 4
    max_characters: int = 60
    filename: str | None = "completions.jsonl"
    console: bool = True

    def __post_init__(self) -> None:
        counts = ("every_n_steps", "num_groups", "num_completions", "max_characters")
        check_fields(self, **{name: (getattr(self, name) >= 1, "at least 1") for name in counts})
        self._file: Path | None = None
        self._writes = OptionalWrites("CompletionsTable")
        self._next_step = 0
        self._prefix = ""
        self._num_prompts: int | None = None  # so far in an evaluation

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reserve the file in the run folder."""
        self._prefix = _PREFIXES.get(stage, "")
        self._num_prompts = 0 if stage in _PREFIXES else None
        if stage not in ("fit", *_PREFIXES):
            return
        self._next_step = 0
        self._writes = OptionalWrites("CompletionsTable")
        folder = None if self.filename is None else run_folder(trainer)
        self._file = None if folder is None else folder / f"{self._prefix}{self.filename}"
        if self._file is not None:
            claim(trainer, self._file, self)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Write the table if it is due."""
        step = trainer.global_step
        if not trainer.is_global_zero or step < self._next_step:
            return
        rollouts: Any = pl_module.last_rollouts
        groups: Sequence[RolloutGroup] | None = getattr(rollouts, "groups", rollouts)
        if not groups:
            return
        self._next_step = (step // self.every_n_steps + 1) * self.every_n_steps
        tokenizer = getattr(pl_module, "tokenizer", None)
        by_group = [
            completion_rows(group, index, step, tokenizer) for index, group in enumerate(groups[: self.num_groups])
        ]
        rows = [row for group_rows in by_group for row in group_rows]
        shown = [row for group_rows in by_group for row in _spread(group_rows, self.num_completions)]
        self._write(trainer, rows, shown, f"Completions at step {step}", in_text=shown)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Append the completions of the batch; show those of the first prompts."""
        if self._num_prompts is None or not (isinstance(outputs, Mapping) and "groups" in outputs):
            return
        tokenizer, device = getattr(pl_module, "tokenizer", None), trainer.strategy.root_device
        by_group = evaluation_rows(outputs, tokenizer, device, self._num_prompts)
        self._num_prompts += len(by_group)
        if trainer.is_global_zero:
            rows = [row for of_group in by_group for row in of_group]
            chosen = by_group[: self.num_groups] if batch_idx == 0 else []
            shown = [row for of_group in chosen for row in _spread(of_group, self.num_completions)]
            self._write(trainer, rows, shown, "Completions", in_text=rows)

    on_test_batch_end = on_validation_batch_end

    def _write(
        self, trainer: Trainer, rows: Sequence[Row], shown: Sequence[Row], title: str, *, in_text: Sequence[Row]
    ) -> None:
        """Write all rows to the file and the loggers, `shown` to the console, `in_text` to text-only loggers."""
        if self._file is not None:
            lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
            with self._writes.to(self._file):
                append_whole(
                    self._file, lines.encode("utf-8", "backslashreplace")
                )  # JSON's escape for a lone surrogate
        if self.console and shown:
            with self._writes.to("the console"):
                trainer.print(render_table(shown, self.max_characters, title))
        step, text = trainer.global_step, markdown_table(in_text, self.max_characters)
        tables = [
            completions_table(rows, step, f"{self._prefix}completions", text),
            episodes_table(rows, step, f"{self._prefix}episodes"),
        ]
        log_tables(trainer, tables, self._writes)


def _spread(rows: list[Row], count: int) -> list[Row]:
    """Choose rows evenly from the highest to the lowest reward; a missing reward counts as the lowest."""
    ranked = sorted(rows, key=lambda row: -float("inf") if row["reward"] is None else row["reward"], reverse=True)
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


# Rows: one per completion.


def completion_rows(group: RolloutGroup, index: int, step: int, tokenizer: Any = None) -> list[Row]:
    """Make one row per completion of a group.

    Args:
        group: The prompt and its rollouts.
        index: Number of the group in the batch.
        step: Optimizer steps done.
        tokenizer: Decodes tokens that have no text yet; without it, token ids are shown.

    Returns:
        The rows. `num_tokens` counts the tokens that the model wrote; rows of episodes have `messages` and `turns`, and
        those with a `Rollout.episode` also `episode`.
    """

    def decode(token_ids: Sequence[int]) -> str:
        if tokenizer is None:
            return " ".join(map(str, token_ids))
        return tokenizer.decode(token_ids, skip_special_tokens=True)

    rows = []
    for rollout in group.rollouts:
        prompt: Any = (rollout.prompt or group.prompt) or decode(group.prompt_ids)
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in prompt)
        row = {
            "step": step,
            "group": group.group_id if group.group_id is not None else index,
            "data_source": group.data_source,
            "prompt": prompt,
            "completion": rollout.text if rollout.text is not None else decode(rollout.completion_ids),
            "reward": rollout.reward,
            "rewards": dict(rollout.rewards),
            "num_tokens": rollout.num_sampled_tokens,
            "finish_reason": rollout.finish_reason,
        }
        if rollout.token_rewards is not None:
            row["token_rewards"] = rollout.token_rewards
        if rollout.episode is not None:
            row["episode"] = rollout.episode
        if rollout.messages is not None:
            row |= {"turns": rollout.num_turns, "messages": rollout.messages}
        rows.append(row)
    return rows


def evaluation_rows(outputs: Mapping[str, Any], tokenizer: Any, device: Any, first: int = 0) -> list[list[Row]]:
    """Return the rows of each prompt of all ranks' batches, in the order of the prompts. Collective.

    Args:
        outputs: Result of this rank's step: `groups`, whose `group_id` is the position of their prompt in the batch
            over all ranks, and their `answers`.
        tokenizer: As for `completion_rows`.
        device: As for `gather_plain`.
        first: Number of the batch's first prompt in the evaluation.
    """
    of_this_rank = []
    for place, (group, answers) in enumerate(zip(outputs["groups"], outputs["answers"], strict=True)):
        position = place if group.group_id is None else group.group_id
        of_rollouts = [answer for answer, e in zip(answers, group.episodes, strict=True) for _ in e.rows]
        rows = completion_rows(group, position, 0, tokenizer)
        for row, answer in zip(rows, of_rollouts, strict=True):
            del row["step"]
            row |= {"answer": answer, "group": first + position}
        of_this_rank.append([position, json.dumps(rows, default=str)])
    gathered = sorted(pair for pairs in gather_plain(of_this_rank, device) for pair in pairs)
    return [json.loads(rows) for _, rows in gathered]


def turns_line(messages: Messages) -> str:
    """Join the turns of an episode in one line, such as `Let me see. look_up(key="a") -> 41 | It is 41.`."""

    def written(value: Any) -> str:
        return json.dumps(value, ensure_ascii=False, default=str)

    turns: list[str] = []
    before = None
    for message in messages:
        content = content_text(message).strip()
        calls = []
        for call in message.get("tool_calls") or ():
            function = call.get("function", call)
            arguments = function.get("arguments")
            if isinstance(arguments, dict):
                inside = ", ".join(f"{name}={written(value)}" for name, value in arguments.items())
            else:
                inside = written(arguments)
            calls.append(f"{function['name']}({inside})")
        if message["role"] == "tool" and turns:
            turns[-1] += f"{', ' if before == 'tool' else ' -> '}{content}"
        else:
            turns.append(" ".join(filter(None, (content, ", ".join(calls)))))
        before = message["role"]
    return " | ".join(turns)


# Text for the console and for text-only loggers.


def render_table(rows: Sequence[Row], max_characters: int, title: str = "Completions") -> str:
    """Draw the rows as a table of plain characters that standard output can encode."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    columns = _columns(rows)
    table = Table(title=title, title_justify="left")
    for name in columns:
        is_text, is_number = name in ("prompt", "completion"), name in ("turns", "reward", "tokens")
        table.add_column(name, ratio=2 if is_text else None, justify="right" if is_number else "left")
    previous: Row | None = None
    for row in rows:
        cells = _cells(row, columns, max_characters)
        if previous is not None and row["group"] != previous["group"]:
            table.add_section()
        elif previous is not None and row["prompt"] == previous["prompt"]:
            cells[0] = ""
        table.add_row(*(Text(cell) for cell in cells))  # as Text, so brackets in a completion are not markup
        previous = row
    encoding, drawn = output_encoding(), io.BytesIO()
    with io.TextIOWrapper(drawn, encoding, "backslashreplace", newline="\n", write_through=True) as file:
        Console(file=file, width=CONSOLE_WIDTH, force_terminal=False).print(table)  # frames that the encoding has
        return drawn.getvalue().decode(encoding).rstrip("\n")


def markdown_table(rows: Sequence[Row], max_characters: int) -> str:
    """Write the rows as a Markdown table, which TensorBoard renders."""
    names = _columns(rows)
    return markdown_of(names, [_cells(row, names, max_characters) for row in rows])


def _columns(rows: Sequence[Row]) -> list[str]:
    optional = [name for name in ("episode", "turns") if any(name in row for row in rows)]
    return ["prompt", "completion", *optional, "reward", "tokens", "end"]


def _cells(row: Row, columns: Sequence[str], max_characters: int) -> list[str]:
    completion = turns_line(row["messages"]) if "messages" in row else row["completion"]
    cells = {
        "prompt": printable_line(row["prompt"], max_characters),
        "completion": printable_line(completion, max_characters),
        "episode": str(row.get("episode", "")),
        "turns": str(row.get("turns", "")),
        "reward": "" if row["reward"] is None else f"{row['reward']:.3f}",
        "tokens": str(row["num_tokens"]),
        "end": row["finish_reason"] or "",
    }
    return [cells[name] for name in columns]


def printable_line(text: str, max_characters: int) -> str:
    """Make a text one printable line: escape control characters, and cut out the middle if it is too long."""
    line = printable(text)
    if len(line) <= max_characters:
        return line
    head = (max_characters - 1) * 2 // 3
    tail = max_characters - 1 - head
    return f"{line[:head]}…{line[len(line) - tail :]}"


def source_table(metrics: Mapping[str, Any], prefix: str) -> str:
    """The metrics `{prefix}/{data_source}/{name}@{k}` as text, a line per data source; empty if there are none."""
    order = ("mean", "best", "maj", "pass")
    by_source: dict[str, dict[str, float]] = {}
    for name, value in metrics.items():
        source, _, metric = name.removeprefix(f"{prefix}/").rpartition("/")
        if source and name.startswith(f"{prefix}/") and metric.partition("@")[0] in order and "@" in metric:
            by_source.setdefault(source, {})[metric] = float(value)
    if not by_source:
        return ""
    found = {metric for values in by_source.values() for metric in values}
    columns = sorted(found, key=lambda metric: (order.index(metric.partition("@")[0]), int(metric.partition("@")[2])))
    rows = [["data source", *columns]]
    for source, values in sorted(by_source.items()):
        rows.append([source, *(f"{values[column]:.3f}" if column in values else "" for column in columns)])
    width, widths = max(len(row[0]) for row in rows), [max(7, len(column)) for column in columns]
    lines = ["  ".join([row[0].ljust(width), *map(str.rjust, row[1:], widths)]) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


# Tables for loggers.

COMPLETION_COLUMNS = (
    *("step", "group", "data_source", "prompt", "completion", "episode", "turns", "reward", "rewards", "num_tokens"),
    *("finish_reason", "answer"),
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

    def cell(value: Any) -> Any:
        if value is None or isinstance(value, int | float):
            return value
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False, default=str) if value else None
        return value and value.encode("utf-8", "backslashreplace").decode()  # loggers reject lone surrogates

    return [[cell(row.get(name)) for name in columns] for row in rows]
