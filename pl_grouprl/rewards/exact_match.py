"""Reward for completions that equal the reference answer."""

from __future__ import annotations

from typing import Any

from pl_grouprl.utilities.arguments import checked_arguments


@checked_arguments
class ExactMatch:
    """1 if the completion equals the reference, else 0. Has verl's signature.

    Args:
        strip: Ignore white space at both ends.
        ignore_case: Ignore upper and lower case.
    """

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    def __init__(self, strip: bool = True, ignore_case: bool = False) -> None:
        self.strip = strip
        self.ignore_case = ignore_case

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float:
        """Score one completion against its reference (compared as a string)."""
        return float(self.extract_answer(solution_str) == self.extract_answer(str(ground_truth)))

    def extract_answer(self, text: str) -> str:
        """The text as it is compared; in majority votes, equal texts count as one answer."""
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
