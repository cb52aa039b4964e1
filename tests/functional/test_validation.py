import itertools
import math

import pytest

from pl_grouprl.functional.validation import best_at_k, majority_at_k, mean_at_k, pass_at_k

SCORES = [1.0, 0.0, 0.5, 0.0, 0.25]
ANSWERS = ["a", "b", "c", "b", None]


def _draws(n, k, replacement):
    """Every ordered draw of k out of n, all equally likely."""
    return itertools.product(range(n), repeat=k) if replacement else itertools.permutations(range(n), k)


def _best(scores, draw, _):
    return max(scores[i] for i in draw)


def _majority(scores, draw, answers):
    votes = [answers[i] for i in draw]
    winner = max(votes, key=votes.count)  # the one drawn first among equals
    return scores[draw[votes.index(winner)]]


def _enumerate(value, scores, answers, k, replacement):
    values = [value(scores, draw, answers) for draw in _draws(len(scores), k, replacement)]
    return math.fsum(values) / len(values)


def test_mean_is_over_prompts_of_means():
    assert mean_at_k([[1.0, 0.0], [1.0, 1.0, 1.0, 0.0]]) == (0.5 + 0.75) / 2


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
def test_expectations_equal_enumeration(k, replacement):
    best = best_at_k([SCORES], k, replacement=replacement)
    assert best == pytest.approx(_enumerate(_best, SCORES, ANSWERS, k, replacement), abs=1e-12)
    majority = majority_at_k([SCORES], [ANSWERS], k, replacement=replacement)
    assert majority == pytest.approx(_enumerate(_majority, SCORES, ANSWERS, k, replacement), abs=1e-12)


@pytest.mark.parametrize("answers", [["a"] * 4, list("abcd"), list("aabb"), list("aaab"), list("aabc")])
@pytest.mark.parametrize("replacement", [False, True])
def test_majority_for_other_patterns_of_votes(answers, replacement):
    scores = [0.1, 0.2, 0.4, 0.8]
    for k in (1, 2, 3, 4):
        expected = _enumerate(_majority, scores, answers, k, replacement)
        assert majority_at_k([scores], [answers], k, replacement=replacement) == pytest.approx(expected, abs=1e-12)


def test_all_answers_by_hand():
    # Best of all answers: 1 and 0.5. Majority: "b" scores 0; "x" and "y" tie, so the mean of 0.5 and 0.1.
    scores, answers = [SCORES, [0.5, 0.1]], [ANSWERS, ["x", "y"]]
    assert best_at_k(scores) == 0.75
    assert majority_at_k(scores, answers) == pytest.approx((0.0 + 0.3) / 2)
    # One right answer of four: pass@2 is 1 - C(3, 2) / C(4, 2) = 1/2; drawn with replacement 1 - (3/4)^4.
    assert best_at_k([[0.0, 1.0, 0.0, 0.0]], 2) == pytest.approx(0.5)
    assert best_at_k([[0.0, 1.0, 0.0, 0.0]], replacement=True) == pytest.approx(1 - 0.75**4)


@pytest.mark.parametrize("k", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("correct", range(6))
def test_pass_at_k_equals_enumeration(correct, k):
    passes = [number < correct for number in range(5)]
    draws = list(itertools.combinations(passes, k))
    assert pass_at_k([passes], k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_by_hand():
    # Of 3 answers one passes, of 4 two: at k = 2 1 - 1/3 and 1 - 1/6; at k = 1 the shares.
    passes = [[False, True, False], [True, False, False, True]]
    assert pass_at_k(passes, 2) == pytest.approx((2 / 3 + 5 / 6) / 2)
    assert pass_at_k(passes, 1) == pytest.approx((1 / 3 + 1 / 2) / 2)
    # The share of draws with a pass, and not 1 - (1 - c / n)^k, which takes draws to be independent.
    assert pass_at_k([[True] + [False] * 199], 100) == pytest.approx(0.5)


def test_many_answers_stay_exact():
    """64 answers, all different: any of them wins, so the majority is worth the mean."""
    scores = [i / 64 for i in range(64)]
    assert majority_at_k([scores], [range(64)], 16) == pytest.approx(sum(scores) / 64)
    assert best_at_k([scores], 64) == 63 / 64


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: mean_at_k([]), "at least one data point"),
        (lambda: mean_at_k([[math.nan]]), r"scores\[0\]"),
        (lambda: best_at_k([[1.0], []]), r"scores\[1\]"),
        (lambda: pass_at_k([[True], []], 1), r"scores\[1\]"),
        *((lambda k=k: best_at_k([[1.0, 0.0]], k), f"k is {k}") for k in (0, 3)),
        *((lambda k=k: pass_at_k([[True, False]], k), f"k is {k}") for k in (0, 3)),
        (lambda: majority_at_k([[1.0, 0.0]], [["a"]]), "shorter"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()
