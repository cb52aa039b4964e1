"""Reward for answers to reasoning-gym tasks, by the library's scorers."""

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
    """The score, from 0 to 1, that reasoning-gym gives the answer in a completion. Has verl's signature.

    The answer is found by the template in its row (`ReasoningGym.answer_format`). The score is 0 if there is none, or
    if the library's scorer cannot read it. Several scorers give partial credit for answers that are nearly right, or
    right in another form.

    Some scorers evaluate answers as Python code. They receive only literals, or formulas of elementary functions
    without large powers; any other answer is passed as None. Simplifying a formula may still take long, so run this
    reward in reward workers with a time limit.

    Args:
        exact: Return 1 for a full score, 0 for anything less.
        only_answer: Return 0 if there is text before or after the answer. Otherwise a policy may learn to keep writing
            after the answer, since that costs it nothing.
    """

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    def __init__(self, exact: bool = False, only_answer: bool = False) -> None:
        require(REASONING_GYM_AVAILABLE, "ReasoningGymScore", "tasks")
        self.exact = exact
        self.only_answer = only_answer
        self._scorers: dict[tuple[str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the library's objects, which are recreated when needed."""
        return vars(self) | {"_scorers": {}}

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
            raise ValueError(f"ReasoningGymScore: `extra_info` of the row lacks {missing}; use rows from ReasoningGym.")
        self._scorer(info)
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
            extra_info: As written by `ReasoningGym`.
            ground_truth: Not used; the entry in `extra_info` has the answer.
        """
        entry = decode_entry(extra_info["entry"])
        template = extra_info["answer_format"]
        answer = extract_answer(template, solution_str, _num_lines(entry))
        if answer is None or (self.only_answer and not is_only_answer(template, solution_str, answer)):
            return 0.0
        passed_on = answer if answer == entry["answer"] or is_harmless(extra_info["task"], answer) else None
        scorer = self._scorer(extra_info)
        try:
            score = float(scorer.score_answer(passed_on, entry))
        except MemoryError:  # counted as a failed reward rather than a score of 0
            raise
        except Exception:  # scorers expect a certain form, but an answer may have any
            return 0.0
        return float(score >= 1) if self.exact else score

    def extract_answer(self, text: str, columns: Mapping[str, Any]) -> str | None:
        """The answer in a completion, for majority votes; None if the completion does not follow its row's template."""
        info = columns["extra_info"]
        return extract_answer(info["answer_format"], text, _num_lines(decode_entry(info["entry"])))

    def _scorer(self, info: Mapping[str, Any]) -> Any:
        """The library's data set for a row's task, which scores its answers."""
        task, config = info["task"], info["config"]
        if (task, config) not in self._scorers:
            from reasoning_gym.factory import create_dataset

            self._scorers[task, config] = create_dataset(task, **json.loads(config))
        return self._scorers[task, config]


def _num_lines(entry: Mapping[str, Any]) -> int | None:
    """Number of lines in the reference, and therefore in an answer; None if there is no reference."""
    reference = entry["answer"]
    return None if reference is None else str(reference).strip().count("\n") + 1
