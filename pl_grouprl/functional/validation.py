"""Validation scores from several answers per prompt: mean@k, best@k, majority@k and pass@k.

From n answers per prompt, `best` and `majority` of k < n are expectations over a random choice of k of them, in
closed form. The choice is
- without replacement (default): the unbiased estimator for k new answers (as pass@k, arXiv:2107.03374); for k = n it
  is simply the best answer, or the majority;
- or with replacement, which verl estimates by 1000 bootstrap samples, as `best@k/mean` and `maj@k/mean`: biased, since
  even for k = n some answers are drawn twice and others never.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache


def mean_at_k(scores: Sequence[Sequence[float]]) -> float:
    """Average the scores of each prompt, then the prompts.

    Args:
        scores: The scores of each prompt's answers, any unit; prompts may differ in their number.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If there is no prompt, a prompt has no score, or a score is NaN.
    """
    _check_scores(scores)
    return _mean([_mean(row) for row in scores])


def best_at_k(scores: Sequence[Sequence[float]], k: int | None = None, *, replacement: bool = False) -> float:
    """Expected highest score among k answers of a prompt, averaged over prompts.

    Args:
        scores: The scores of each prompt's answers, any unit.
        k: Number of answers drawn; None for all of the prompt's answers.
        replacement: Draw with replacement, as verl's bootstrap does.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If a prompt has fewer than k answers, no score, or a NaN.
    """
    _check_scores(scores)
    return _mean([_expected_best(row, _draws(row, k), replacement) for row in scores])


def pass_at_k(passes: Sequence[Sequence[bool]], k: int) -> float:
    """Probability that at least one of k answers of a prompt passes, averaged over prompts.

    The unbiased estimate 1 - C(n - c, k) / C(n, k) from n answers of which c pass (arXiv:2107.03374, eq. 1).

    Args:
        passes: For each prompt, whether each of its answers passes.
        k: Number of answers drawn, without replacement.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If there is no prompt, or a prompt has fewer than k answers.
    """
    _check_scores(passes)
    failed = [len(row) - sum(map(bool, row)) for row in passes]
    return _mean(
        [
            1 - math.comb(num_failed, _draws(row, k)) / math.comb(len(row), k)
            for row, num_failed in zip(passes, failed, strict=True)
        ]
    )


def majority_at_k(
    scores: Sequence[Sequence[float]],
    answers: Sequence[Sequence[Hashable]],
    k: int | None = None,
    *,
    replacement: bool = False,
) -> float:
    """Expected score of the most frequent answer among k answers of a prompt, averaged over prompts.

    Ties are broken uniformly (verl takes the first drawn, which is the same in expectation). If equal answers have
    different scores, their mean counts.

    Args:
        scores: The scores of each prompt's answers, any unit.
        answers: The votes, one per score; None (no answer found) is a vote like any other.
        k: Number of answers drawn; None for all of the prompt's answers.
        replacement: Draw with replacement, as verl's bootstrap does.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If scores and answers differ in number, a prompt has fewer than k answers, no score, or a NaN.
    """
    _check_scores(scores)
    if [len(row) for row in scores] != [len(row) for row in answers]:
        raise ValueError(
            f"answers has {[len(row) for row in answers][:8]} entries per prompt and scores "
            f"{[len(row) for row in scores][:8]} (first 8 prompts); pass one answer per score."
        )
    return _mean(
        [
            _expected_majority(row, votes, _draws(row, k), replacement)
            for row, votes in zip(scores, answers, strict=True)
        ]
    )


def _expected_best(row: Sequence[float], k: int, replacement: bool) -> float:
    """Sum over ranks i of (i-th smallest score) * P(the best of k has rank i)."""
    n = len(row)

    def at_most(i: int) -> float:  # P(all k draws are among the i smallest)
        return (i / n) ** k if replacement else math.comb(i, k) / math.comb(n, k)

    return math.fsum(score * (at_most(i) - at_most(i - 1)) for i, score in enumerate(sorted(row), start=1))


def _expected_majority(row: Sequence[float], votes: Sequence[Hashable], k: int, replacement: bool) -> float:
    scores_of: dict[Hashable, list[float]] = {}
    for score, vote in zip(row, votes, strict=True):
        scores_of.setdefault(vote, []).append(score)
    counts = tuple(sorted(len(scores) for scores in scores_of.values()))
    wins = _win_probabilities(counts, k, replacement)
    return math.fsum(_mean(scores) * wins[len(scores)] for scores in scores_of.values())


@lru_cache(maxsize=4096)
def _win_probabilities(counts: tuple[int, ...], k: int, replacement: bool) -> dict[int, float]:
    """Probability that an answer wins the vote of k draws, by how often it was given; `counts` is sorted."""

    def ways(count: int, drawn: int) -> float:  # up to a factor that depends on k alone
        return count**drawn / math.factorial(drawn) if replacement else math.comb(count, drawn)

    total = ways(sum(counts), k)
    frequency = Counter(counts)
    result = {}
    for count in frequency:
        others = list((frequency - Counter([count])).elements())
        most = k if replacement else min(count, k)
        result[count] = math.fsum(
            ways(count, drawn) * _ways_not_to_exceed(others, drawn, k - drawn, ways) / total
            for drawn in range(1, most + 1)
        )
    return result


def _ways_not_to_exceed(others: list[int], top: int, remaining: int, ways: Callable[[int, int], float]) -> float:
    """Count the ways to draw `remaining` votes from the other answers, none more than `top` times.

    If u of them are drawn exactly `top` times, a way counts 1 / (u + 1), as ties are broken at random.
    """
    table = {(0, 0): 1.0}  # (votes drawn, answers tied at the top) -> ways
    for count in others:
        grown: dict[tuple[int, int], float] = {}
        for (votes, ties), number in table.items():
            for drawn in range(min(top, remaining - votes) + 1):
                key = (votes + drawn, ties + (drawn == top))
                grown[key] = grown.get(key, 0.0) + number * ways(count, drawn)
        table = grown
    return sum(number / (ties + 1) for (votes, ties), number in table.items() if votes == remaining)


def _draws(row: Sequence[float], k: int | None) -> int:
    if k is None:
        return len(row)
    if not 1 <= k <= len(row):
        raise ValueError(f"k is {k}, but a prompt has {len(row)} answers; draw at least 1 and at most that many.")
    return k


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _check_scores(scores: Sequence[Sequence[float]]) -> None:
    if not scores:
        raise ValueError("scores is empty; pass the scores of at least one prompt.")
    for prompt, row in enumerate(scores):
        if not row:
            raise ValueError(f"scores[{prompt}] is empty; leave out prompts without answers.")
        if any(math.isnan(score) for score in row):
            raise ValueError(f"scores[{prompt}] has a NaN; leave out answers that no reward function scored.")
