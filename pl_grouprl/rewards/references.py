"""Graders that compare a completion with the reference answer of its row, or with each of several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pl_grouprl.rewards.conventions import ground_truth_of
from pl_grouprl.utilities.text import shorten


def accepted_answers(reference: Any) -> list[str]:
    """Return the texts that count as right answers.

    Args:
        reference: A string or a number; or a list, tuple, set or array of those, any of which is right. A float is
            accepted as Python writes it (`42.0`) and without trailing zeros and rounding errors (`42`).

    Raises:
        ValueError: If it is anything else, which no text could equal.
    """
    reference = reference.tolist() if hasattr(reference, "tolist") else reference
    answers = list(reference) if isinstance(reference, list | tuple | set | frozenset) else [reference]
    if not answers or any(answer is None or isinstance(answer, Mapping | list | tuple | bytes) for answer in answers):
        raise ValueError(
            f"the reference {shorten(reference)} is not an answer that a completion could equal; write a string, a "
            "number, or a list of those, any of which counts as right."
        )
    return [
        text
        for answer in answers
        for text in ([str(answer), f"{answer:.15g}"] if isinstance(answer, float) else [str(answer)])
    ]


class ReferenceGrader:
    """Base of graders with verl's signature: the highest score of a completion against any accepted answer."""

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    ground_truth_column: str | None = None

    def score(self, text: str, reference: str) -> float:
        """Score a completion against one accepted answer."""
        raise NotImplementedError

    def check_reference(self, reference: str) -> None:
        """Raise ValueError for a reference that no completion could equal."""

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Refuse a row whose reference no completion could equal.

        Raises:
            ValueError: Names the reference and the remedy.
        """
        for reference in accepted_answers(ground_truth_of(columns, self.ground_truth_column)):
            self.check_reference(reference)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float | None:
        """Score one completion; the reference may be a list of accepted answers.

        Raises:
            ValueError: If the reference is neither a string, nor a number, nor a list of those.
        """
        return max(self.score(solution_str, reference) for reference in accepted_answers(ground_truth))
