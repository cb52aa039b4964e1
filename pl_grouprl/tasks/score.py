"""Reward for answers to tasks of reasoning-gym, by the library's own scorers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pl_grouprl.tasks.answer_format import extract_answer, is_only_answer
from pl_grouprl.tasks.entries import decode_entry
from pl_grouprl.tasks.harmless import is_harmless
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.optional import REASONING_GYM_AVAILABLE, require

_EXTRA_INFO = ("task", "config", "entry", "answer_format")


@checked_arguments
class ReasoningGymScore:
    """The score, from 0 to 1, that reasoning-gym gives to the answer in a completion. Has verl's signature.

    The answer is looked for in the form that the row asks for (`ReasoningGym.answer_format`). The score is 0 if there
    is none, or the library's scorer cannot read it. Several scorers give partial credit to an answer that is nearly
    right, or right in another form.

    Some scorers evaluate answers as Python code. They get only literals or formulas of elementary functions, without
    large powers; any other answer counts as none. Simplifying a formula may still take long, so run scorers in reward
    workers with a time limit.

    Args:
        exact: 1 for a full score, 0 for anything less.
        only_answer: 0 for a completion that says anything before or after its answer. Otherwise a policy may learn to
            write on after the answer, which costs it nothing.
    """

    reads_final_answer = True
    """Of an episode, the content of the last assistant message is the completion."""

    def __init__(self, exact: bool = False, only_answer: bool = False) -> None:
        require(REASONING_GYM_AVAILABLE, "ReasoningGymScore", "tasks")
        self.exact = exact
        self.only_answer = only_answer
        self._tasks: dict[tuple[str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the library's objects, which are made again."""
        return vars(self) | {"_tasks": {}}

    def set_up(self) -> None:
        """Import the library."""
        import reasoning_gym  # noqa: F401

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Refuse a row that is not from `ReasoningGym`.

        Raises:
            ValueError: If it lacks a part of `extra_info`.
        """
        info = columns.get("extra_info") or {}
        missing = [name for name in _EXTRA_INFO if name not in info]
        if missing:
            raise ValueError(
                f"ReasoningGymScore: `extra_info` of the row lacks {missing}; use rows made by ReasoningGym."
            )
        self._task(info)
        decode_entry(info["entry"])

    def __call__(
        self,
        data_source: str,
        solution_str: str,
        extra_info: dict[str, Any],
        ground_truth: str | None = None,
    ) -> float:
        """Score one completion.

        Args:
            data_source: Not used.
            solution_str: The completion.
            extra_info: As `ReasoningGym` writes it.
            ground_truth: Not used: the entry in `extra_info` has the answer.
        """
        entry = decode_entry(extra_info["entry"])
        template = extra_info["answer_format"]
        answer = extract_answer(template, solution_str, _num_lines(entry))
        if answer is None or (self.only_answer and not is_only_answer(template, solution_str, answer)):
            return 0.0
        readable = answer if answer == entry["answer"] or is_harmless(extra_info["task"], answer) else None
        task = self._task(extra_info)
        try:
            score = float(task.score_answer(readable, entry))
        except MemoryError:  # a failure, which is counted
            raise
        except Exception:  # scorers expect answers of some form, and completions may have any
            return 0.0
        return float(score >= 1) if self.exact else score

    def extract_answer(self, text: str, columns: Mapping[str, Any]) -> str | None:
        """The answer in a completion, for majority votes; None if the completion is not in the form of its row."""
        info = columns["extra_info"]
        return extract_answer(info["answer_format"], text, _num_lines(decode_entry(info["entry"])))

    def _task(self, info: Mapping[str, Any]) -> Any:
        key = (info["task"], info["config"])
        if key not in self._tasks:
            from reasoning_gym.factory import create_dataset

            self._tasks[key] = create_dataset(key[0], **json.loads(key[1]))
        return self._tasks[key]


def _num_lines(entry: Mapping[str, Any]) -> int | None:
    """Lines of the reference; an answer has as many. None if there is no reference."""
    reference = entry["answer"]
    return None if reference is None else str(reference).strip().count("\n") + 1
