"""Reward for a numeric answer after worked steps, as in GSM8K."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pl_grouprl.utilities.arguments import checked_arguments

_NUMBER = r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"
_MARKED = re.compile(rf"####\s*(?:\$\s*)?({_NUMBER})")
_ANY = re.compile(_NUMBER)


def extract_number(text: str, method: Literal["strict", "flexible"] = "strict") -> Decimal | None:
    """Return the final number of a solution.

    Args:
        text: A solution with its worked steps.
        method: `strict` takes the number after the last `####`; `flexible` the last number anywhere.

    Returns:
        The number (thousands separators are ignored), or None if there is none.
    """
    found = (_MARKED if method == "strict" else _ANY).findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", ""))
    except InvalidOperation:
        return None


@checked_arguments
class NumericAnswer:
    """1 if the final number of the completion equals the reference, else 0. Has verl's signature.

    Numbers are compared by value: 42, 42.0 and $42 are equal. The reference may be the bare number or a whole
    GSM8K solution that ends in `#### 42`. Nothing is evaluated: an expression such as 6*7 is not a number.

    Args:
        method: `strict` requires the form `#### 42`; `flexible` takes the last number of the completion.
        format_score: Reward for a wrong number in the required form.
    """

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    def __init__(self, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0) -> None:
        if method not in ("strict", "flexible"):
            raise ValueError(f"NumericAnswer.method is {method!r}; it must be 'strict' or 'flexible'.")
        self.method = method
        self.format_score = format_score

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float:
        """Score one completion.

        Raises:
            ValueError: If the reference contains no number.
        """
        reference = extract_number(str(ground_truth), "strict")
        if reference is None:
            reference = extract_number(str(ground_truth), "flexible")
        if reference is None:
            raise ValueError(f"NumericAnswer: the reference {ground_truth!r} contains no number; check the data.")
        answer = extract_number(solution_str, self.method)  # type: ignore[arg-type]
        if answer is None:
            return 0.0
        return 1.0 if answer == reference else self.format_score

    def extract_answer(self, text: str) -> str | None:
        """The number in a completion in normal form, for majority votes; None if there is none."""
        number = extract_number(text, self.method)  # type: ignore[arg-type]
        if number is None:
            return None
        written = f"{number:f}"
        written = written.rstrip("0").rstrip(".") if "." in written else written
        return "0" if written == "-0" else written
