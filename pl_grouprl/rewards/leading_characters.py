"""Reward for the share of correct leading characters."""

from __future__ import annotations

from pl_grouprl.rewards.references import ReferenceGrader


def leading_correct_share(completion: str, answer: str) -> float:
    """Return the share of correct characters before the first wrong one.

    The share is of the longer of the two strings, so extra characters after the answer lower it, and it is 1 only if
    both are equal. `sevex` for `seven` gives 4/5, `sevens` 5/6, `even` 0.
    """
    longest = max(len(completion), len(answer))
    if longest == 0:
        return 1.0
    right = 0
    for ours, theirs in zip(completion, answer, strict=False):
        if ours != theirs:
            break
        right += 1
    return right / longest


class LeadingCorrectCharacters(ReferenceGrader):
    """Share of correct leading characters; see `leading_correct_share`. Has verl's signature.

    Partly correct completions earn a reward too, so a policy that is rarely exactly right still has a signal. Of a list
    of references, the nearest counts.
    """

    def score(self, text: str, reference: str) -> float:
        """Score one completion."""
        return leading_correct_share(text, reference)
