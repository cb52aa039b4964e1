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
from statistics import fmean


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
    return fmean([fmean(row) for row in scores])


def best_at_k(scores: Sequence[Sequence[float]], k: int | None = None, *, replacement: bool = False) -> float:
    """Expected highest score among k answers of a prompt, averaged over prompts.

    Args:
        scores: The scores of each prompt's answers, any unit.
        k: Number of answers drawn; defaults to all of the prompt's answers.
        replacement: Draw with replacement, as verl's bootstrap does.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If a prompt has fewer than k answers, no score, or a NaN.
    """
    _check_scores(scores)
    expected = []
    for row in scores:
        n, draws = len(row), _draws(row, k)
        # Probability that all draws are among the i smallest scores.
        at_most = [(i / n) ** draws if replacement else math.comb(i, draws) / math.comb(n, draws) for i in range(n + 1)]
        weighted = [score * (at_most[i] - at_most[i - 1]) for i, score in enumerate(sorted(row), start=1)]
        expected.append(math.fsum(weighted))
    return fmean(expected)


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
    chances = []
    for row in passes:
        failed, draws = sum(not passed for passed in row), _draws(row, k)
        chances.append(1 - math.comb(failed, draws) / math.comb(len(row), draws))
    return fmean(chances)


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
        k: Number of answers drawn; defaults to all of the prompt's answers.
        replacement: Draw with replacement, as verl's bootstrap does.

    Returns:
        The mean over prompts.

    Raises:
        ValueError: If scores and answers differ in number, a prompt has fewer than k answers, no score, or a NaN.
    """
    _check_scores(scores)
    expected = []
    for row, votes in zip(scores, answers, strict=True):
        scores_of: dict[Hashable, list[float]] = {}
        for score, vote in zip(row, votes, strict=True):
            scores_of.setdefault(vote, []).append(score)
        counts = tuple(sorted(len(same) for same in scores_of.values()))
        wins = _win_probabilities(counts, _draws(row, k), replacement)
        expected.append(math.fsum(fmean(same) * wins[len(same)] for same in scores_of.values()))
    return fmean(expected)


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


def _check_scores(scores: Sequence[Sequence[float]]) -> None:
    for prompt, row in enumerate(scores):
        if not row or any(math.isnan(score) for score in row):
            raise ValueError(f"scores[{prompt}] is empty or has a NaN; omit prompts and answers without a score.")
