"""Penalty for completions that repeat themselves."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal

from pl_grouprl.rewards.completion_text import written_ids, written_text
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options


def repeated_share(units: Sequence[Hashable], ngram_size: int) -> float:
    """Return the share of n-grams that occurred before: 1 - distinct / all (arXiv:2502.03373, appendix C.2).

    Args:
        units: Words or tokens.
        ngram_size: Units in one n-gram, at least 1. N-grams overlap.

    Returns:
        A number in [0, 1); 0 if there are fewer units than in one n-gram.
    """
    total = len(units) - ngram_size + 1
    if total < 1:
        return 0.0
    distinct = {tuple(units[start : start + ngram_size]) for start in range(total)}
    return 1 - len(distinct) / total


@checked_arguments
class RepetitionPenalty:
    """`max_penalty` times the share of repeated n-grams (arXiv:2502.03373, appendix C.2). Has TRL's signature.

    On words it agrees with open-r1's `get_repetition_penalty_reward`: words are separated by white space, and case is
    ignored. Languages without spaces between words need `unit="token"`. In an episode, only the text of the model
    counts, with all turns joined.

    Args:
        ngram_size: Words or tokens in one n-gram.
        max_penalty: Reward that a completion approaches as it repeats a single n-gram; not positive.
        unit: Count n-grams of words (`word`) or tokens (`token`).
    """

    def __init__(self, ngram_size: int, max_penalty: float, unit: Literal["word", "token"] = "word") -> None:
        check_options({"RepetitionPenalty.ngram_size": (ngram_size, ngram_size >= 1, "at least 1")})
        if not (math.isfinite(max_penalty) and max_penalty <= 0):
            raise ValueError(
                f"RepetitionPenalty.max_penalty is {max_penalty}; it is added to the reward and must be finite and not "
                "positive, for example -1.0."
            )
        if unit not in ("word", "token"):
            raise ValueError(f"RepetitionPenalty.unit is {unit!r}; it must be 'word' or 'token'.")
        self.ngram_size = ngram_size
        self.max_penalty = max_penalty
        self.unit = unit

    def __call__(
        self,
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        completion_mask: list[list[int]] | None = None,
        **columns: list[Any],
    ) -> list[float]:
        """Return the penalty of each completion, from max_penalty to 0."""
        sequences: list[Any] = written_ids(completion_ids, completion_mask)
        if self.unit == "word":
            sequences = [written_text(completion).lower().split() for completion in completions]
        # + 0.0 turns -0.0 into 0.0.
        return [self.max_penalty * repeated_share(units, self.ngram_size) + 0.0 for units in sequences]
