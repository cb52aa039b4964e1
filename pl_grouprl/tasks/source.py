"""Rows of tasks that reasoning-gym generates, in splits without common questions."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pl_grouprl.tasks.answer_format import ANSWER, QUESTION, check_template, is_recovered, text_around, write_answer
from pl_grouprl.tasks.generator import generate
from pl_grouprl.tasks.task_options import divide, read_tasks
from pl_grouprl.types import Messages
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.optional import REASONING_GYM_AVAILABLE, require
from pl_grouprl.utilities.options import check_options


@checked_arguments
class ReasoningGym:
    """Rows of tasks from the library reasoning-gym, to be rewarded by `ReasoningGymScore`.

    No question occurs twice, be it in the same split, in different splits or among the worked examples. The same
    arguments give the same rows on every machine, and `val` and `test` do not depend on `size`.

    Rows have the columns `prompt`, `answer` (the library's; None for tasks without a single right answer),
    `data_source` (the task's name, with `_level_1` and so on if there are levels), `level` (from 0) and `extra_info`,
    which the reward reads.

    Args:
        tasks: A task's name, a list of names, or a mapping of names to options of their generators. An option `weight`
            (1 by default) is the task's share of the rows. A list of options in place of one makes levels of rising
            difficulty, for the callback `Curriculum`; every task must then have as many.
        size: Number of rows of the split `train`, over all tasks and levels.
        val_size: Number of rows of the split `val`.
        test_size: Number of rows of the split `test`.
        seed: Determines all rows.
        levels: Take this many levels of difficulty from the library's own curriculum of each task; options of a task
            then set only what the curriculum leaves open.
        system_prompt: The first message; None for none.
        question_format: What surrounds a question: text with `{question}`.
        answer_format: What surrounds an answer, in the examples and where the reward looks for it: text with
            `{answer}`, such as `Answer: {answer}` or `<answer>{answer}</answer>`. By default the answer is the whole
            completion.
        num_examples: Number of worked examples before each question, as earlier turns of the conversation; the same for
            all prompts of a task.
        chat: If False, prompts are strings (for a model without chat template): system prompt, examples and question,
            separated by blank lines, each answer on a line after its question.

    Raises:
        ModuleNotFoundError: If reasoning-gym is not installed.
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        tasks: str | list[str] | dict[str, Any],
        size: int = 4096,
        seed: int = 0,
        *,
        val_size: int = 256,
        test_size: int = 256,
        levels: int | None = None,
        system_prompt: str | None = None,
        question_format: str = QUESTION,
        answer_format: str = ANSWER,
        num_examples: int = 0,
        chat: bool = True,
    ) -> None:
        require(REASONING_GYM_AVAILABLE, "ReasoningGym", "tasks")
        self.tasks = read_tasks(tasks, levels)
        num_levels = levels or len(next(iter(self.tasks.values()))["configs"])
        fewest = len(self.tasks) * num_levels
        sizes = {"size": size, "val_size": val_size, "test_size": test_size}
        allowed = f"0, or at least {fewest}: a row for each of {len(self.tasks)} tasks and {num_levels} levels"
        check_options(
            {f"ReasoningGym.{name}": (n, n == 0 or n >= fewest, allowed) for name, n in sizes.items()}
            | {
                "ReasoningGym.seed": (seed, seed >= 0, "0 or larger"),
                "ReasoningGym.num_examples": (num_examples, num_examples >= 0, "0 or larger"),
            }
        )
        check_template("ReasoningGym.question_format", question_format, QUESTION)
        check_template("ReasoningGym.answer_format", answer_format, ANSWER)
        _check_shown(answer_format, (system_prompt, question_format), num_examples)
        self.sizes = {"train": size, "val": val_size, "test": test_size}
        self.seed = seed
        self.levels = levels
        self.num_levels = num_levels
        self.system_prompt = system_prompt
        self.question_format = question_format
        self.answer_format = answer_format
        self.num_examples = num_examples
        self.chat = chat

    def rows(self, split: str) -> list[dict[str, Any]]:
        """Generate the rows of a split, in random order.

        Args:
            split: `train`, `val` or `test`.

        Raises:
            ValueError: If there is no such split, a task is unknown or refuses its options, there are too few different
                questions, an example has no answer, or an answer contains what surrounds it.
        """
        if split not in self.sizes:
            raise ValueError(f"ReasoningGym has no split {split!r}; it has {sorted(self.sizes)}.")
        generated = generate({**self._request(), "split": split})
        rows = [row for name, task in zip(self.tasks, generated, strict=True) for row in self._rows_of_task(name, task)]
        random.Random(f"{self.seed} {split}").shuffle(rows)
        return rows

    def _request(self) -> dict[str, Any]:
        """The request to `generate`, without the split."""
        weights = [task["weight"] for task in self.tasks.values() for _ in range(self.num_levels)]
        shares = {split: divide(size, weights) for split, size in self.sizes.items()}  # by task, then by level
        tasks = []
        for index, (name, task) in enumerate(self.tasks.items()):
            levels = slice(index * self.num_levels, (index + 1) * self.num_levels)
            counts = {split: numbers[levels] for split, numbers in shares.items()}
            counts["examples"] = [self.num_examples] + [0] * (self.num_levels - 1)  # of the easiest level
            tasks.append({"name": name, "configs": task["configs"], "counts": counts})
        return {"tasks": tasks, "seed": self.seed, "levels": self.levels}

    def _rows_of_task(self, name: str, generated: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        examples = self._examples(name, generated["examples"])
        self._check_answers(name, generated)
        for level, part in enumerate(generated["levels"]):
            for entry in part["entries"]:
                yield self._row(name, level, part["config"], entry, examples)

    def _examples(self, name: str, entries: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
        """The worked examples of a task: questions and answers as the model sees them."""
        if any(entry["answer"] is None for entry in entries):
            raise ValueError(
                f"ReasoningGym.num_examples is {self.num_examples}, and task {name!r} has no reference answers; set it "
                "to 0, or leave the task out."
            )
        return [(self._question(entry), write_answer(self.answer_format, entry["answer"])) for entry in entries]

    def _check_answers(self, name: str, generated: Mapping[str, Any]) -> None:
        """Refuse an answer that the reward would not find in its own form."""
        entries = [entry for part in generated["levels"] for entry in part["entries"]]
        for answer in (entry["answer"] for entry in [*generated["examples"], *entries]):
            if answer is not None and not is_recovered(self.answer_format, str(answer)):
                raise ValueError(
                    f"ReasoningGym.answer_format is {self.answer_format!r}, in which an answer of task {name!r}, "
                    f"{answer!r}, could not be told from what surrounds it; use another, such as "
                    "'<answer>{answer}</answer>'."
                )

    def _question(self, entry: Mapping[str, Any]) -> str:
        return self.question_format.replace(QUESTION, entry["question"])

    def _row(
        self,
        name: str,
        level: int,
        config: Mapping[str, Any],
        entry: Mapping[str, Any],
        examples: Sequence[tuple[str, str]],
    ) -> dict[str, Any]:
        write = self._messages if self.chat else self._text
        return {
            "prompt": write(examples, self._question(entry)),
            "answer": entry["answer"],
            "data_source": f"{name}_level_{level}" if self.num_levels > 1 else name,
            "level": level,
            "extra_info": {
                "task": name,
                "config": json.dumps(config),
                "entry": entry["entry"],
                "answer_format": self.answer_format,
            },
        }

    def _messages(self, examples: Sequence[tuple[str, str]], question: str) -> Messages:
        turns = [] if self.system_prompt is None else [("system", self.system_prompt)]
        turns += [turn for q, a in examples for turn in (("user", q), ("assistant", a))]
        return [{"role": role, "content": content} for role, content in [*turns, ("user", question)]]

    def _text(self, examples: Sequence[tuple[str, str]], question: str) -> str:
        before = [] if self.system_prompt is None else [self.system_prompt]
        return "\n\n".join([*before, *(f"{q}\n{a}" for q, a in examples), f"{question}\n"])


def _check_shown(answer_format: str, texts: Sequence[str | None], num_examples: int) -> None:
    """Refuse an answer format that neither these texts nor examples show to the model."""
    parts = text_around(answer_format)
    if num_examples == 0 and not all(any(part in (text or "") for text in texts) for part in parts):
        raise ValueError(
            f"ReasoningGym.answer_format is {answer_format!r}, and nothing tells the model so: say it in system_prompt "
            "or question_format, or set num_examples."
        )
