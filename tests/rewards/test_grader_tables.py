"""Every grader on what users write: signs, units, currencies, percent, thousands, exponents, lists, fences, encodings.

Each row has a text, a reference and the right reward, judged by hand. Rows marked `unsupported` pin what a grader does
with a form that it does not read.
"""

from __future__ import annotations

import numpy as np
import pytest

from pl_grouprl.rewards import ExactMatch, LeadingCorrectCharacters, NumericAnswer, check_columns
from pl_grouprl.types import Prompt

FLEXIBLE = [
    # signs
    ("The balance is -$12.", "-12", 1.0),
    ("The balance is -$12.", "12", 0.0),
    ("He owes $-12", "-12", 1.0),
    ("He owes $-12", "12", 0.0),
    (r"so $-12$", "-12", 1.0),
    (r"so \(-\$12\)", "-12", 1.0),
    ("The answer is \u221212.", "-12", 1.0),  # U+2212, the minus sign
    ("The answer is \u221212.", "12", 0.0),
    ("The answer is \u201312.", "-12", 1.0),  # an en dash
    ("The answer is \uff0d\uff11\uff12", "-12", 1.0),  # full width
    ("答案是-12", "-12", 1.0),
    ("答案是42。", "42", 1.0),
    ("=+5", "5", 1.0),
    ("-12", "\u221212", 1.0),
    ("12", "-$12", 0.0),
    ("**-12**", "-12", 1.0),
    ("-0", "0", 1.0),
    # a minus between two numbers is no sign
    ("It takes 10-20.", "20", 1.0),
    ("It takes 10-20.", "-20", 0.0),
    ("It takes 10\u201320 minutes", "20", 1.0),
    ("$10-$20", "20", 1.0),
    ("$10$-$20$", "20", 1.0),
    ("10%-20%", "20", 1.0),
    ("Total: 15-8", "8", 1.0),
    ("15-8=7", "7", 1.0),
    ("15 - 8", "8", 1.0),
    ("(3)-2", "2", 1.0),
    ("The result\u201442", "42", 1.0),  # an em dash
    ("Totals:\n- 12", "12", 1.0),  # a bullet
    # currencies and units
    ("costs $1,200.", "1200", 1.0),
    ("costs 1.200,50 €", "1200.5", 0.0),  # unsupported: decimal commas, which lists in English look like
    ("£ 3.50", "3.5", 1.0),
    ("₹1,00,000", "100000", 1.0),
    ("about 12 km/h", "12", 1.0),
    ("an area of 12 m^2", "12", 1.0),
    ("an area of 12 m^2", "2", 0.0),
    ("12 m²", "12", 1.0),
    ("$12 cm^{3}$", "12", 1.0),
    (r"$12\text{ cm}$", "12", 1.0),
    (r"90^\circ", "90", 1.0),
    ("$1.5 million", "1500000", 0.0),  # unsupported: words that scale
    # percent: a unit, or a hundredth
    ("50%", "50", 1.0),
    ("50%", "0.5", 1.0),
    (r"50\%", "50%", 1.0),
    ("50", "50%", 1.0),
    ("0.5", "50%", 1.0),
    ("50%", "0.5%", 0.0),
    ("0.5%", "50%", 0.0),
    ("50 percent", "0.5", 1.0),
    ("50", "0.5", 0.0),
    # thousands and lists
    ("1,234,567", "1234567", 1.0),
    (r"1{,}000", "1000", 1.0),
    (r"1\,000", "1000", 1.0),
    ("1\u202f000", "1000", 1.0),
    ("1'000", "1000", 1.0),
    ("1_000", "1000", 1.0),
    ("1,2,3", "123", 0.0),
    ("1,2,3", "3", 1.0),
    ("1 000", "1000", 0.0),  # unsupported: lists of numbers have spaces, too
    ("1,000.00", "1000", 1.0),
    # exponents
    ("The mass is 2e3.", "2000", 1.0),
    ("The mass is 2e3.", "3", 0.0),
    ("1.5E-3", "0.0015", 1.0),
    (r"1.5 \times 10^{3}", "1500", 1.0),
    ("1.5\u00d710³", "1500", 1.0),
    ("1.5 x 10^-3", "0.0015", 1.0),
    ("1.5*10**3", "1500", 1.0),
    ("8 = 2^3", "3", 0.0),
    ("1e999999999", "1", 0.0),
    # fractions
    ("3/4", "0.75", 1.0),
    ("1/4", "3/4", 0.0),
    ("3/4", "4", 0.0),
    ("1 1/2", "1.5", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
    (r"\boxed{-\dfrac{1}{2}}", "-0.5", 1.0),
    (r"2\frac{1}{2}", "2.5", 1.0),
    (r"\boxed{\frac{1}{2}}", "2", 0.0),
    ("1/0", "1", 0.0),
    ("0.333", "1/3", 0.0),
    # text around the number
    (r"\boxed{42}", "42", 1.0),
    ("_42_ or `42`", "42", 1.0),
    ("7*6=42", "42", 1.0),
    ("the 42nd", "42", 1.0),
    ("x_1 = 5 and x_2", "5", 1.0),
    ("half: .5", "0.5", 1.0),
    ("version 1.2.3", "0.3", 0.0),
    ("٤٢", "42", 1.0),
    ("42\r\n", "42", 1.0),
    ("\ufeff42", "42\ufeff", 1.0),
    ("forty-two", "42", 0.0),  # unsupported: numbers in words
    ("between 3 and 5", "3", 0.0),  # the last number counts
    ("", "42", 0.0),
    # references
    ("42", 42, 1.0),
    ("42", 42.0, 1.0),
    ("0.3", 0.1 + 0.2, 1.0),
    ("1000000000000000000000", 1e21, 1.0),
    ("12", [12, 13], 1.0),
    ("13", ["12", "13"], 1.0),
    ("14", np.array([12, 13]), 0.0),
    ("13", np.int64(13), 1.0),
    ("42", "42 apples", 1.0),
    ("42", "6 * 7 = <<6*7=42>>42\n#### 42", 1.0),
]

STRICT = [
    ("so he lost money\n#### -$12", "-12", 1.0),
    ("#### -$12", "12", 0.0),
    ("#### $-3.50", "-3.5", 1.0),
    ("#### +5", "5", 1.0),
    ("#### \u22123", "-3", 1.0),
    ("####42", "42", 1.0),
    ("####\n42", "42", 1.0),
    ("####-0.0", "0", 1.0),
    ("#### 42 apples", "42", 1.0),
    ("#### 1,000.00", "1000", 1.0),
    ("#### 2e3", "2000", 1.0),
    ("#### 3/4", "0.75", 1.0),
    ("#### 50%", "0.5", 1.0),
    ("#### 1 then #### 2", "2", 1.0),
    ("42", "42", 0.0),
    ("#### 6*7", "42", 0.0),
    ("#### - 12", "-12", 0.0),  # unsupported: a space after the sign
    ("#### **42**", "42", 0.0),  # unsupported, as in verl: anything between the mark and the number
]


@pytest.mark.parametrize(("text", "reference", "reward"), FLEXIBLE)
def test_numbers_anywhere(text, reference, reward):
    assert NumericAnswer("flexible")("", text, reference) == reward


@pytest.mark.parametrize(("text", "reference", "reward"), STRICT)
def test_numbers_after_the_mark(text, reference, reward):
    assert NumericAnswer()("", text, reference) == reward


@pytest.mark.parametrize(
    "reference",
    ["", "none", "10-20", "(1, 2)", "10^3 or 5", "1/0", None, [], {"target": "1"}, [[1, 2]], ["1", "x"], b"4"],
)
def test_references_without_a_single_number_are_refused(reference):
    with pytest.raises(ValueError, match=r"the reference .*; write "):
        NumericAnswer().check_row({"answer": reference})


EXACT = [
    ("Paris", "Paris", 1.0),
    (" Paris\n", "Paris", 1.0),
    ("Paris", " Paris\r\n", 1.0),
    ("\u00a0Paris", "Paris", 1.0),
    ("paris", "Paris", 0.0),
    ("Paris.", "Paris", 0.0),
    ("'Paris'", "Paris", 0.0),
    ("The answer is Paris", "Paris", 0.0),
    ("**Paris**", "Paris", 0.0),
    ("```\nParis\n```", "Paris", 0.0),
    ("New  York", "New York", 0.0),
    ("", "", 1.0),
    ("", "Paris", 0.0),
    (" ", "", 1.0),
    # several right answers
    ("Paris", ["Paris", "paris"], 1.0),
    ("paris", ("Paris", "paris"), 1.0),
    ("Rome", ["Paris", "paris"], 0.0),
    ("42", ["42"], 1.0),
    ("['42']", ["42"], 0.0),
    ("2", np.array([1, 2]), 1.0),
    ("b", np.array(["a", "b"], dtype=object), 1.0),
    ("3", {1, 2, 3}, 1.0),
    ('["a", "b"]', '["a", "b"]', 1.0),  # text that happens to be a list
    ("a", '["a", "b"]', 0.0),
    # numbers, compared as text
    ("42", 42, 1.0),
    ("42", 42.0, 1.0),  # pandas makes whole numbers floats where one is missing
    ("42.0", 42.0, 1.0),
    ("42.0", 42, 0.0),
    ("0.3", 0.1 + 0.2, 1.0),
    ("2.5", np.float64(2.5), 1.0),
    ("7", np.int64(7), 1.0),
    ("1,000", "1000", 0.0),
    ("+5", "5", 0.0),
    ("\u22125", "-5", 0.0),
    ("$5", "5", 0.0),
    ("50%", "0.5", 0.0),
    ("1e3", "1000", 0.0),
    ("1/2", "0.5", 0.0),
    ("[1, 2)", "[1, 2)", 1.0),
    ("True", True, 1.0),
    ("true", True, 0.0),  # unsupported: other spellings of what is not text
    # encodings
    ("caf\u00e9", "cafe\u0301", 1.0),
    ("cafe\u0301", "caf\u00e9", 1.0),
    ("cafe", "caf\u00e9", 0.0),
    ("a\r\nb", "a\nb", 1.0),
    ("\uff34\uff4f", "To", 0.0),  # unsupported: full width
    ("\ufeffParis", "Paris", 0.0),  # unsupported: a byte order mark
    ("東京", "東京", 1.0),
]


@pytest.mark.parametrize(("text", "reference", "reward"), EXACT)
def test_equal_texts(text, reference, reward):
    assert ExactMatch()("", text, reference) == reward


@pytest.mark.parametrize(
    ("text", "reference"), [("PARIS", "Paris"), ("STRASSE", "Straße"), ("É", "e\u0301"), ("b", ["A", "B"])]
)
def test_equal_texts_whatever_the_case(text, reference):
    assert ExactMatch(ignore_case=True)("", text, reference) == 1.0
    assert ExactMatch()("", text, reference) == 0.0


LEADING = [
    *[
        (text, reference, 1.0)
        for text, reference, reward in EXACT
        if reward == 1.0 and text in str(reference) and text.strip() == text and "\n" not in str(reference)
    ],
    ("sevex", "seven", 4 / 5),
    ("sevens", "seven", 5 / 6),
    ("even", "seven", 0.0),
    ("Seven", "seven", 0.0),
    (" seven", "seven", 0.0),
    ("seven\n", "seven", 5 / 6),
    ("", "seven", 0.0),
    ("seven", "", 0.0),
    ("", "", 1.0),
    ("sev", ["eight", "seven"], 3 / 5),
    ("eigh", ["eight", "seven"], 4 / 5),
    ("nine", ["eight", "seven"], 0.0),
    ("123", [12, 1234], 3 / 4),
    ("42", 42.0, 1.0),
    ("-12", "12", 0.0),
    ("12", "-12", 0.0),
    ("1,000", "1000", 1 / 5),
    ("50%", "50", 2 / 3),
    ("$5", "5", 0.0),
    ("+5", "5", 0.0),
    ("1/2", "1/3", 2 / 3),
    ("[1, 2]", "[1, 2)", 5 / 6),
    ("```", "seven", 0.0),
    ("caf\u00e9", "cafe\u0301", 3 / 5),  # unsupported: two encodings of a character
    ("東", "東京", 1 / 2),
]


@pytest.mark.parametrize(("text", "reference", "share"), LEADING)
def test_shares_of_leading_characters(text, reference, share):
    assert LeadingCorrectCharacters()("", text, reference) == pytest.approx(share)


@pytest.mark.parametrize("grader", [ExactMatch(), LeadingCorrectCharacters(), NumericAnswer()])
@pytest.mark.parametrize(
    "reference", [None, [], {"target": "1"}, [["1", "2"]], [None], b"4", np.array([[1, 2], [3, 4]])]
)
def test_references_that_no_text_could_equal_are_refused_at_setup(grader, reference):
    with pytest.raises(ValueError, match=r"train, prompt 0: .*"):
        check_columns([Prompt([1], columns={"answer": reference})], grader, "train")
