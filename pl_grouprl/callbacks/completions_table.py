"""A table of prompts, completions and rewards: on the console, in the loggers, and appended to a file."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pl_grouprl.callbacks.evaluation_report import EvaluationRows, Row
from pl_grouprl.callbacks.logger_tables import completions_table, episodes_table, log_tables
from pl_grouprl.callbacks.run_folder import claim, run_folder
from pl_grouprl.callbacks.turns import turns_line
from pl_grouprl.loggers.tables import markdown_of
from pl_grouprl.types import Messages, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.text import output_encoding, printable
from pl_grouprl.utilities.writes import OptionalWrites, append_whole

CONSOLE_WIDTH = 120

_PREFIXES = {"validate": "val_", "test": "test_"}
"""Prefixes of the file's and tables' names, by stage; `fit` has none."""

_LAYOUT: dict[str, dict[str, Any]] = {
    "prompt": {"ratio": 2},
    "completion": {"ratio": 2},
    **{name: {"justify": "right"} for name in ("turns", "reward", "tokens")},
}


@checked_arguments
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

    Args:
        every_n_steps: Optimizer steps between tables.
        num_groups: Number of prompts to show, from the start of the batch.
        num_completions: Completions per prompt on the console and in TensorBoard, spread evenly from the highest to
            the lowest reward; the file and other loggers get all of them.
        max_characters: Longer prompts and completions are shortened in the middle on the console and in TensorBoard.
        filename: Name of the file in the run folder; None writes none.
        console: Print the table.

    Raises:
        ValueError: If a count is out of range.
    """

    def __init__(
        self,
        every_n_steps: int = 10,
        num_groups: int = 2,
        num_completions: int = 4,
        max_characters: int = 60,
        filename: str | None = "completions.jsonl",
        console: bool = True,
    ) -> None:
        counts = {
            "every_n_steps": every_n_steps,
            "num_groups": num_groups,
            "num_completions": num_completions,
            "max_characters": max_characters,
        }
        check_options({f"CompletionsTable.{name}": (count, count >= 1, "at least 1") for name, count in counts.items()})
        self.every_n_steps = every_n_steps
        self.num_groups = num_groups
        self.num_completions = num_completions
        self.max_characters = max_characters
        self.filename = filename
        self.console = console
        self._file: Path | None = None
        self._writes = OptionalWrites("CompletionsTable")
        self._next_step = 0
        self._prefix = ""
        self._evaluation: EvaluationRows | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reserve the file in the run folder, and refuse a module without rollouts."""
        self._prefix = _PREFIXES.get(stage, "")
        self._evaluation = EvaluationRows() if stage in _PREFIXES else None
        if stage not in ("fit", *_PREFIXES):
            return
        if stage == "fit" and not hasattr(pl_module, "last_rollouts"):
            raise TypeError(
                f"CompletionsTable needs a module with an attribute `last_rollouts`, and {type(pl_module).__name__} "
                "has none; set it to the list of RolloutGroup of the step, or leave the callback out."
            )
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
        if not trainer.is_global_zero or trainer.global_step < self._next_step:
            return
        rollouts: Any = pl_module.last_rollouts
        groups: Sequence[RolloutGroup] | None = getattr(rollouts, "groups", rollouts)
        if not groups:
            return
        self._next_step = (trainer.global_step // self.every_n_steps + 1) * self.every_n_steps
        groups = groups[: self.num_groups]
        tokenizer = getattr(pl_module, "tokenizer", None)
        step = trainer.global_step
        by_group = [completion_rows(group, index, step, tokenizer) for index, group in enumerate(groups)]
        rows = [row for group_rows in by_group for row in group_rows]
        self._write(rows)
        shown = [row for group_rows in by_group for row in _spread(group_rows, self.num_completions)]
        self._show(trainer, shown, f"Completions at step {step}")
        self._log(trainer, rows, shown)

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
        if self._evaluation is None or not (isinstance(outputs, Mapping) and "groups" in outputs):
            return
        tokenizer = getattr(pl_module, "tokenizer", None)
        rows = self._evaluation.of_batch(
            outputs, lambda group, index: completion_rows(group, index, 0, tokenizer), trainer.strategy.root_device
        )
        if not trainer.is_global_zero:
            return
        self._write([{name: value for name, value in row.items() if name != "step"} for row in rows])
        if batch_idx == 0:
            groups = [[row for row in rows if row["group"] == number] for number in range(self.num_groups)]
            shown = [row for group_rows in groups for row in _spread(group_rows, self.num_completions)]
            self._show(trainer, shown, "Completions")
        self._log(trainer, rows, rows)

    on_test_batch_end = on_validation_batch_end

    def _show(self, trainer: Trainer, rows: Sequence[Row], title: str) -> None:
        if self.console:
            with self._writes.to("the console"):
                trainer.print(render_table(rows, self.max_characters, title))

    def _log(self, trainer: Trainer, rows: Sequence[Row], shown: Sequence[Row]) -> None:
        step, text = trainer.global_step, markdown_table(shown, self.max_characters)
        tables = [
            completions_table(rows, step, f"{self._prefix}completions", text),
            episodes_table(rows, step, f"{self._prefix}episodes"),
        ]
        log_tables(trainer, tables, self._writes)

    def _write(self, rows: Sequence[Row]) -> None:
        if self._file is None:
            return
        lines = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
        with self._writes.to(self._file):
            append_whole(self._file, lines.encode("utf-8", "backslashreplace"))  # JSON's escape for a lone surrogate


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
    prompt = prompt_text(group, tokenizer)
    return [
        {
            "step": step,
            "group": group.group_id if group.group_id is not None else index,
            "data_source": group.data_source,
            "prompt": prompt if rollout.prompt is None else _join_messages(rollout.prompt),
            "completion": rollout.text if rollout.text is not None else _decode(rollout.completion_ids, tokenizer),
            "reward": rollout.reward,
            "rewards": dict(rollout.rewards),
            "num_tokens": rollout.num_sampled_tokens,
            "finish_reason": rollout.finish_reason,
            **({} if rollout.token_rewards is None else {"token_rewards": rollout.token_rewards}),
            **({} if rollout.episode is None else {"episode": rollout.episode}),
            **_of_episode(rollout),
        }
        for rollout in group.rollouts
    ]


def _of_episode(rollout: Rollout) -> Row:
    return {} if rollout.messages is None else {"turns": rollout.num_turns, "messages": rollout.messages}


def prompt_text(group: RolloutGroup | Prompt, tokenizer: Any = None) -> str:
    """Return the prompt as one string: the data set's, with messages joined, or its tokens decoded."""
    if isinstance(group.prompt, str) and group.prompt:
        return group.prompt
    if group.prompt:
        return _join_messages(group.prompt)  # type: ignore[arg-type]
    return _decode(group.prompt_ids if isinstance(group, RolloutGroup) else group.token_ids, tokenizer)


def _join_messages(messages: Messages) -> str:
    return "\n".join(f"{message.get('role', '')}: {message.get('content', '')}" for message in messages)


def render_table(rows: Sequence[Row], max_characters: int, title: str = "Completions") -> str:
    """Draw the rows as a table of plain characters that standard output can encode."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left")
    for name in _columns(rows):
        table.add_column(name, **_LAYOUT.get(name, {}))
    previous: Row | None = None
    for row in rows:
        is_new = previous is None or row["group"] != previous["group"]
        if is_new and previous is not None:
            table.add_section()
        cells = _cells(row, _columns(rows), max_characters)
        if not is_new and previous is not None and row["prompt"] == previous["prompt"]:
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
        "reward": _reward(row),
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


def _spread(rows: list[Row], count: int) -> list[Row]:
    """Choose rows evenly from the highest to the lowest reward; a missing reward counts as the lowest."""
    ranked = sorted(rows, key=lambda row: -float("inf") if row["reward"] is None else row["reward"], reverse=True)
    if len(ranked) <= count:
        return ranked
    if count == 1:
        return ranked[:1]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def _reward(row: Row) -> str:
    return "" if row["reward"] is None else f"{row['reward']:.3f}"


def _decode(token_ids: Sequence[int], tokenizer: Any) -> str:
    if tokenizer is None:
        return " ".join(str(token) for token in token_ids)
    return tokenizer.decode(token_ids, skip_special_tokens=True)
