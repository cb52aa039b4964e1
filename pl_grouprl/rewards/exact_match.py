"""Reward for completions that equal the reference answer."""

from __future__ import annotations

import unicodedata

from pl_grouprl.rewards.references import ReferenceGrader
from pl_grouprl.utilities.arguments import checked_arguments


@checked_arguments
class ExactMatch(ReferenceGrader):
    """1 if the completion equals the reference, or one of a list of references, else 0. Has verl's signature.

    References are compared as strings. Two encodings of a character (`é` as one code point or two), and of the end of a
    line, are equal.

    Args:
        strip: Ignore white space at both ends.
        ignore_case: Ignore upper and lower case.
    """

    def __init__(self, strip: bool = True, ignore_case: bool = False) -> None:
        self.strip = strip
        self.ignore_case = ignore_case

    def score(self, text: str, reference: str) -> float:
        """Score one completion."""
        return float(self.extract_answer(text) == self.extract_answer(reference))

    def extract_answer(self, text: str) -> str:
        """The text as it is compared; in majority votes, equal texts count as one answer."""
        text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text
