"""The reward functions that come with the package."""

import pytest

from pl_grouprl.rewards import ExactMatch, LeadingCorrectCharacters, NumericAnswer
from pl_grouprl.rewards.answers import extract_number


@pytest.mark.parametrize(
    ("completion", "share"),
    [
        ("seven", 1.0),
        ("sevex", 0.8),
        ("sevens", 5 / 6),
        ("sev", 0.6),
        ("even", 0.0),
        ("", 0.0),
        ("sxven", 0.2),
    ],
)
def test_leading_correct_characters(completion, share):
    assert LeadingCorrectCharacters()("", completion, "seven") == pytest.approx(share)


def test_leading_correct_characters_of_nothing():
    assert LeadingCorrectCharacters()("", "", "") == 1.0


@pytest.mark.parametrize(
    ("options", "completion", "reward"),
    [
        ({}, "Paris", 1.0),
        ({}, " Paris\n", 1.0),
        ({"strip": False}, " Paris", 0.0),
        ({}, "paris", 0.0),
        ({"ignore_case": True}, "paris", 1.0),
        ({}, "Paris.", 0.0),
    ],
)
def test_exact_match(options, completion, reward):
    assert ExactMatch(**options)("", completion, "Paris") == reward


def test_exact_match_compares_numbers_as_text():
    assert ExactMatch()("", "42", 42) == 1.0


@pytest.mark.parametrize(
    ("text", "method", "number"),
    [
        ("6 * 7 = 42\n#### 42", "strict", "42"),
        ("#### 1,234,567", "strict", "1234567"),
        ("#### $-3.50", "strict", "-3.50"),
        ("#### 1 then #### 2", "strict", "2"),
        ("the answer is 42", "strict", None),
        ("first 7, then 42.", "flexible", "42"),
        ("costs $1,200.", "flexible", "1200"),
        ("half: .5", "flexible", ".5"),
        ("no number", "flexible", None),
        ("", "flexible", None),
    ],
)
def test_extract_number(text, method, number):
    found = extract_number(text, method)
    assert str(found) == (str(found.__class__(number)) if number is not None else "None")


@pytest.mark.parametrize(
    ("options", "completion", "reward"),
    [
        ({}, "so #### 42", 1.0),
        ({}, "so #### 42.0", 1.0),
        ({}, "so 42", 0.0),
        ({"method": "flexible"}, "so 42", 1.0),
        ({"format_score": 0.1}, "#### 41", 0.1),
        ({"format_score": 0.1}, "41", 0.0),
        ({}, "#### 6*7", 0.0),
    ],
)
@pytest.mark.parametrize("reference", ["42", 42, "Six sevens are 42.\n#### 42"])
def test_numeric_answer(options, completion, reward, reference):
    assert NumericAnswer(**options)("", completion, reference) == reward


def test_numeric_answer_refuses_bad_options_and_references():
    with pytest.raises(ValueError, match="method is 'loose'"):
        NumericAnswer(method="loose")
    with pytest.raises(ValueError, match="'none' contains no number"):
        NumericAnswer()("", "#### 1", "none")
