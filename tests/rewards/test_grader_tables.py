"""Every grader on what users write: signs, units, currencies, percent, thousands, exponents, lists, fences, encodings.

Each row has a text, a reference and the right reward, judged by hand. Rows marked `unsupported` pin what a grader does
with a form that it does not read.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest

from pl_grouprl.rewards import ExactMatch, LeadingCorrectCharacters, MathVerify, NumericAnswer, check_columns
from pl_grouprl.rewards.code_tests import StdinTest, ValueTest, extract_code, read_tests
from pl_grouprl.rewards.judge import read_grade
from pl_grouprl.rewards.sandbox import ProgramResult
from pl_grouprl.rewards.sandbox.function_call import plain
from pl_grouprl.tasks.reasoning_gym import extract_answer
from pl_grouprl.types import Prompt

FLEXIBLE = [
    # signs
    ("The balance is -$12.", "-12", 1.0), ("The balance is -$12.", "12", 0.0), ("He owes $-12", "-12", 1.0),
    ("He owes $-12", "12", 0.0), (r"so $-12$", "-12", 1.0), (r"so \(-\$12\)", "-12", 1.0),
    ("The answer is \u221212.", "-12", 1.0),  # U+2212, the minus sign
    ("The answer is \u221212.", "12", 0.0),
    ("The answer is \u201312.", "-12", 1.0),  # an en dash
    ("The answer is \uff0d\uff11\uff12", "-12", 1.0),  # full width
    ("答案是-12", "-12", 1.0), ("-US$12", "-12", 1.0), ("-USD 12", "-12", 1.0), ("-Rs. 12", "-12", 1.0),
    ("Rs.12", "12", 1.0), ("R$-12", "-12", 1.0), ("-\\$12", "-12", 1.0),
    ("- 12", "-12", 0.0),  # unsupported: a space after the sign, as after a bullet
    ("minus 12", "12", 1.0),  # unsupported: signs in words
    ("($12)", "12", 1.0),  # unsupported: negative numbers of accountants
    ("答案是42。", "42", 1.0), ("=+5", "5", 1.0), ("-12", "\u221212", 1.0), ("12", "-$12", 0.0),
    ("**-12**", "-12", 1.0), ("-0", "0", 1.0),
    # a minus between two numbers is no sign
    ("It takes 10-20.", "20", 1.0), ("It takes 10-20.", "-20", 0.0), ("It takes 10\u201320 minutes", "20", 1.0),
    ("$10-$20", "20", 1.0), ("$10$-$20$", "20", 1.0), ("10%-20%", "20", 1.0), ("Total: 15-8", "8", 1.0),
    ("15-8=7", "7", 1.0), ("15 - 8", "8", 1.0), ("(3)-2", "2", 1.0),
    ("The result\u201442", "42", 1.0),  # an em dash
    ("Totals:\n- 12", "12", 1.0),  # a bullet
    # currencies and units
    ("costs $1,200.", "1200", 1.0),
    ("costs 1.200,50 €", "1200.5", 0.0),  # unsupported: decimal commas, which lists in English look like
    ("£ 3.50", "3.5", 1.0), ("₹1,00,000", "100000", 1.0), ("about 12 km/h", "12", 1.0),
    ("an area of 12 m^2", "12", 1.0), ("an area of 12 m^2", "2", 0.0), ("12 m²", "12", 1.0),
    ("$12 cm^{3}$", "12", 1.0), (r"$12\text{ cm}$", "12", 1.0), (r"90^\circ", "90", 1.0),
    ("$1.5 million", "1500000", 0.0),  # unsupported: words that scale
    # percent: a unit, or a hundredth
    ("50%", "50", 1.0), ("50%", "0.5", 1.0), (r"50\%", "50%", 1.0), ("\uff15\uff10\uff05", "0.5", 1.0),
    ("50", "50%", 1.0), ("0.5", "50%", 1.0), ("50%", "0.5%", 0.0), ("0.5%", "50%", 0.0), ("50 percent", "0.5", 1.0),
    ("50", "0.5", 0.0),
    # thousands and lists
    ("1,234,567", "1234567", 1.0), (r"1{,}000", "1000", 1.0), (r"1\,000", "1000", 1.0), ("1\u202f000", "1000", 1.0),
    ("1'000", "1000", 1.0), ("1_000", "1000", 1.0), ("1,2,3", "123", 0.0),
    ("分别是1\uff0c200", "200", 1.0),  # the Chinese comma separates words
    ("1,2,3", "3", 1.0),
    ("1 000", "1000", 0.0),  # unsupported: lists of numbers have spaces, too
    ("1,000.00", "1000", 1.0),
    # exponents
    ("The mass is 2e3.", "2000", 1.0), ("The mass is 2e3.", "3", 0.0), ("1.5E-3", "0.0015", 1.0),
    (r"1.5 \times 10^{3}", "1500", 1.0), ("1.5\u00d710³", "1500", 1.0), ("1.5 x 10^-3", "0.0015", 1.0),
    ("1.5*10**3", "1500", 1.0), ("8 = 2^3", "3", 0.0), ("1e999999999", "1", 0.0),
    # fractions
    ("3/4", "0.75", 1.0), ("1/4", "3/4", 0.0), ("3/4", "4", 0.0), ("1 1/2", "1.5", 1.0),
    (r"\boxed{\frac{1}{2}}", "0.5", 1.0), (r"\boxed{-\dfrac{1}{2}}", "-0.5", 1.0), (r"2\frac{1}{2}", "2.5", 1.0),
    (r"\boxed{\frac{1}{2}}", "2", 0.0), ("1/0", "1", 0.0), ("0.333", "1/3", 0.0),
    # text around the number
    (r"\boxed{42}", "42", 1.0), ("_42_ or `42`", "42", 1.0), ("7*6=42", "42", 1.0), ("the 42nd", "42", 1.0),
    ("x_1 = 5 and x_2", "5", 1.0), ("half: .5", "0.5", 1.0), ("version 1.2.3", "0.3", 0.0), ("٤٢", "42", 1.0),
    ("42\r\n", "42", 1.0), ("\ufeff42", "42\ufeff", 1.0),
    ("forty-two", "42", 0.0),  # unsupported: numbers in words
    ("between 3 and 5", "3", 0.0),  # the last number counts
    ("", "42", 0.0),
    # references
    ("42", 42, 1.0), ("42", 42.0, 1.0), ("0.3", 0.1 + 0.2, 1.0), ("1000000000000000000000", 1e21, 1.0),
    ("12", [12, 13], 1.0), ("13", ["12", "13"], 1.0), ("14", np.array([12, 13]), 0.0), ("13", np.int64(13), 1.0),
    ("42", "42 apples", 1.0), ("42", "6 * 7 = <<6*7=42>>42\n#### 42", 1.0),
]  # fmt: skip

STRICT = [
    ("so he lost money\n#### -$12", "-12", 1.0), ("#### -$12", "12", 0.0), ("#### $-3.50", "-3.5", 1.0),
    ("#### +5", "5", 1.0), ("#### \u22123", "-3", 1.0), ("####42", "42", 1.0), ("####\n42", "42", 1.0),
    ("####-0.0", "0", 1.0), ("#### 42 apples", "42", 1.0), ("#### 1,000.00", "1000", 1.0), ("#### 2e3", "2000", 1.0),
    ("#### 3/4", "0.75", 1.0), ("#### 50%", "0.5", 1.0), ("#### 1 then #### 2", "2", 1.0), ("42", "42", 0.0),
    ("#### 6*7", "42", 0.0),
    ("#### - 12", "-12", 0.0),  # unsupported: a space after the sign
    ("#### **42**", "42", 0.0),  # unsupported, as in verl: anything between the mark and the number
]  # fmt: skip


def wrong(grade, rows):
    """The rows that a grader of verl's signature grades wrongly, with its reward."""
    graded = [(text, reference, right, grade("", text, reference)) for text, reference, right in rows]
    return [row for row in graded if row[2] != row[3]]


def test_what_verl_accepts_beyond():
    """All are wrong: verl takes the exponent, or the divisor, for the number."""
    grade = pytest.importorskip("verl.utils.reward_score.gsm8k").compute_score
    accepted = [
        (text, reference)
        for rows, method in ((FLEXIBLE, "flexible"), (STRICT, "strict"))
        for text, reference, reward in rows
        if grade(text, str(reference), method) > reward
    ]
    assert accepted == [("an area of 12 m^2", "2"), ("8 = 2^3", "3"), ("3/4", "4"), (r"\boxed{\frac{1}{2}}", "2")]


EXACT = [
    ("Paris", "Paris", 1.0), (" Paris\n", "Paris", 1.0), ("Paris", " Paris\r\n", 1.0), ("\u00a0Paris", "Paris", 1.0),
    ("paris", "Paris", 0.0), ("Paris.", "Paris", 0.0), ("'Paris'", "Paris", 0.0),
    ("The answer is Paris", "Paris", 0.0), ("**Paris**", "Paris", 0.0), ("```\nParis\n```", "Paris", 0.0),
    ("New  York", "New York", 0.0), ("", "", 1.0), ("", "Paris", 0.0), (" ", "", 1.0),
    # several right answers
    ("Paris", ["Paris", "paris"], 1.0), ("paris", ("Paris", "paris"), 1.0), ("Rome", ["Paris", "paris"], 0.0),
    ("42", ["42"], 1.0), ("['42']", ["42"], 0.0), ("2", np.array([1, 2]), 1.0),
    ("b", np.array(["a", "b"], dtype=object), 1.0), ("3", {1, 2, 3}, 1.0),
    ('["a", "b"]', '["a", "b"]', 1.0),  # text that happens to be a list
    ("a", '["a", "b"]', 0.0),
    # numbers, compared as text
    ("42", 42, 1.0),
    ("42", 42.0, 1.0),  # pandas makes whole numbers floats where one is missing
    ("42.0", 42.0, 1.0), ("42.0", 42, 0.0), ("0.3", 0.1 + 0.2, 1.0), ("2.5", np.float64(2.5), 1.0),
    ("7", np.int64(7), 1.0), ("1,000", "1000", 0.0), ("+5", "5", 0.0), ("\u22125", "-5", 0.0), ("$5", "5", 0.0),
    ("50%", "0.5", 0.0), ("1e3", "1000", 0.0), ("1/2", "0.5", 0.0), ("[1, 2)", "[1, 2)", 1.0), ("True", True, 1.0),
    ("true", True, 0.0),  # unsupported: other spellings of what is not text
    # encodings
    ("caf\u00e9", "cafe\u0301", 1.0), ("cafe\u0301", "caf\u00e9", 1.0), ("cafe", "caf\u00e9", 0.0),
    ("a\r\nb", "a\nb", 1.0),
    ("\uff34\uff4f", "To", 0.0),  # unsupported: full width
    ("\ufeffParis", "Paris", 0.0),  # unsupported: a byte order mark
    ("東京", "東京", 1.0),
]  # fmt: skip


LEADING = [
    *[
        (text, reference, 1.0)
        for text, reference, reward in EXACT
        if reward == 1.0 and text in str(reference) and text.strip() == text and "\n" not in str(reference)
    ],
    ("sevex", "seven", 4 / 5), ("sevens", "seven", 5 / 6), ("even", "seven", 0.0), ("Seven", "seven", 0.0),
    (" seven", "seven", 0.0), ("seven\n", "seven", 5 / 6), ("", "seven", 0.0), ("seven", "", 0.0), ("", "", 1.0),
    ("sev", ["eight", "seven"], 3 / 5), ("eigh", ["eight", "seven"], 4 / 5), ("nine", ["eight", "seven"], 0.0),
    ("123", [12, 1234], 3 / 4), ("42", 42.0, 1.0), ("-12", "12", 0.0), ("12", "-12", 0.0), ("1,000", "1000", 1 / 5),
    ("50%", "50", 2 / 3), ("$5", "5", 0.0), ("+5", "5", 0.0), ("1/2", "1/3", 2 / 3), ("[1, 2]", "[1, 2)", 5 / 6),
    ("```", "seven", 0.0),
    ("caf\u00e9", "cafe\u0301", 3 / 5),  # unsupported: two encodings of a character
    ("東", "東京", 1 / 2),
]  # fmt: skip


NO_TEXTS = [None, [], {"target": "1"}, [["1", "2"]], [None], b"4", np.array([[1, 2], [3, 4]])]
NO_NUMBERS = ["", "none", "10-20", "(1, 2)", "10^3 or 5", "1/0", ["1", "x"]]


@pytest.mark.parametrize(
    ("grader", "references"),
    [(ExactMatch(), NO_TEXTS), (LeadingCorrectCharacters(), NO_TEXTS), (NumericAnswer(), NO_TEXTS + NO_NUMBERS)],
)
def test_references_that_nothing_could_equal_are_refused_at_setup(grader, references):
    for reference in references:
        with pytest.raises(ValueError, match="train, prompt 0: "):
            check_columns([Prompt([1], columns={"answer": reference})], grader, "train")


OUTPUTS = [  # printed, expected
    ("3\n", "3", 1), ("3.0\n", "3", 1), ("3", "3.0", 1), ("3.0000000000000004", "3", 1), ("3.1", "3", 0),
    ("0.333333", "0.333333333333", 1), ("0.3333", "0.333333333333", 0), ("0.30000000000000004", "0.3", 1),
    ("1e3", "1000", 1), ("1E-3", "0.001", 1),
    ("1000000006.0", "1000000007", 0),  # whole numbers have no relative tolerance
    ("1000000.5", "1000000.0", 1), ("100000000000000000001", "100000000000000000000", 0),
    ("1e20", "100000000000000000001", 0), ("0.0", "6.67e-11", 0), ("0.000012", "0.0000123", 1), ("-0.0", "0", 1),
    ("-3", "3", 0), ("+3", "3", 0),
    ("\u22123", "-3", 0),  # unsupported: programs do not print this minus
    ("007", "7", 0), ("0010", "10", 0), ("nan", "nan", 1), ("nan", "0.5", 0), ("inf", "1e308", 0),
    ("1e999999999", "1e999999998", 0), ("[3.3000000000000003, 1]", "[3.3, 1]", 1),
    ("x=0.30000000000000004,", "x=0.3,", 1), ("1.0 2.0\n3.0", "1 2\n3", 1), ("1 2", "2 1", 0), ("1 2", "1 2 3", 0),
    ("12", "1 2", 0), ("1\n2", "1 2", 0), ("1  2 \n\n", "1 2", 1), ("\n1", "1", 1), ("1\r\n2\r\n", "1\n2", 1),
    ("  *\n ***", "  *\n ***", 1), ("*\n***", "  *\n ***", 0),
    ("YES", "Yes", 0),  # unsupported: judges differ
    ("10.0.0.1", "10.0.0.10", 0), ("1,000", "1000", 0), ("50%", "0.5", 0), ("$5.0", "$5", 1), ("1/2", "0.5", 0),
    ("v1.0a", "v1a", 0), ("", "", 1), ("", "0", 0), ("größe", "größe", 1),
]  # fmt: skip
VALUES = [  # returned, expected
    (0.1 + 0.2, 0.3, 1), ([3.0 * 1.1], [3.3], 1), ({"a": 0.1 + 0.2}, {"a": 0.3}, 1), ({"a": 1}, {"b": 1}, 0),
    ({"a": 1, "b": 2}, {"a": 1}, 0), ([[0.1 + 0.2], "x"], [[0.3], "x"], 1),
    (4 / 3 * 3.1415926535897, 4.18879020478639, 1), (3.0, 3, 1), (3, 3.0, 1), (3.1, 3, 0), (4, 3, 0),
    (1000000006.0, 1000000007, 0), (2**64, 2**64 + 1, 0), (2.0**64, 2**64 + 1, 0), (0.0, 6.67e-11, 0),
    (5.5e-17, 0.0, 1), (float("nan"), 0.5, 0), (float("inf"), float("inf"), 1), (float("inf"), 1e308, 0),
    ("3.0", "3", 0), ("3", 3, 0), (3, "3", 0), (None, None, 1), (None, 0, 0), (False, None, 0),
    (True, 1, 1),  # as in Python
    (True, 1.0000001, 0), ((1, 2), [1, 2], 1), ([1, 2], [2, 1], 0), ([1, 2], [1, 2, 3], 0), ([], [], 1),
    ([], None, 0), ({1, 2}, {2, 1}, 1), ({1, 2}, [1, 2], 0),
    ({"set": [1, 2]}, {1, 2}, 1),  # unsupported: how JSON writes a set is taken for one
    ("a\r\n", "a\n", 0), ("caf\u00e9", "caf\u00e9", 1), ([5], [5], 1), (5, [5], 0), ([5], 5, 0),
]  # fmt: skip


def program_that_writes(text):
    """A sandbox whose programs write this."""
    return SimpleNamespace(run=lambda *_: ProgramResult("exit", 0, text, "", 0.0))


@pytest.mark.parametrize(
    ("outputs", "returned", "rewards"),
    [
        ([[5], [6]], [[5], [6]], [1, 1]),
        ([[5], [6]], [5, 6], [1, 1]),  # APPS wraps values in lists
        ([[5], [6]], [[[5]], 7], [0, 0]), ([[[5]], [[6]]], [[5], [[6]]], [1, 1]),
        ([[5], []], [5, []], [0, 1]),  # not wrapped, or the second would have a value
        ([[5], []], [[5], [1]], [1, 0]), (["[5]"], [[5]], [1]), (["[5]"], [5], [0]),
    ],
)  # fmt: skip
def test_lists_of_one(outputs, returned, rewards):
    inputs = ["1" if isinstance(output, str) else [1] for output in outputs]
    tests = read_tests({"fn_name": "f", "inputs": inputs, "outputs": outputs}, "tests")
    programs = [program_that_writes(json.dumps({"value": value})) for value in returned]
    assert [test.passes(program, "") for test, program in zip(tests, programs, strict=True)] == rewards


BLOCKS = [
    ("```python\nx\n```", "x\n"), ("```\nx\n```", "x\n"), ("```py\nx\n```", "x\n"),
    ("```Python3 title=a\nx\n```", "x\n"), ("``` python\nx\n```", "x\n"), ("````python\nx\n````", "x\n"),
    ("```python\r\nx\r\n```", "x\r\n"),
    ("Steps:\n 1. So\n    ```python\n    if x:\n        y\n    ```", "if x:\n    y\n"),
    ("```python\nx\n```\nOutput:\n```\n5\n```", "x\n"),
    ("```bash\nls\n```\n```python\nx\n```\n```text\n5\n```", "x\n"),
    ("```python\nold\n```\n```python\nnew\n```", "new\n"), ("```cpp\nx\n```", "x\n"), ("```python\n```", ""),
    ("use `x` here", None), ("```python x```", None), ("```python\nx", None), ("x ```python\nx\n```", None),
    ('```python\ndef f():\n    """\n    ```\n    """\n```', 'def f():\n    """\n    ```\n    """\n'),
    ("```python\nx", None),  # cut off
    ("~~~python\nx\n~~~", None),  # unsupported
    ("", None),
]  # fmt: skip


MATH = [  # as math-verify grades them
    (r"\boxed{-12}", "-12", 1.0), (r"\boxed{-12}", "12", 0.0), ("\\boxed{\u221212}", "-12", 1.0),
    (r"\boxed{-\$12}", "-12", 1.0), (r"\boxed{\$-12}", "-12", 1.0), (r"\boxed{-\$12}", "12", 0.0),
    (r"\boxed{\$1,200}", "1200", 1.0), (r"\boxed{1{,}200}", "1200", 1.0), (r"\boxed{50\%}", "0.5", 1.0),
    (r"\boxed{50\%}", "50", 1.0), (r"\boxed{50}", r"50\%", 1.0), (r"\boxed{50%}", r"50\%", 1.0),
    (r"\boxed{12\text{ cm}}", "12", 1.0), (r"\boxed{12 \mathrm{cm}^2}", "12", 1.0),
    (r"\boxed{12}", r"12\text{ cm}", 1.0), (r"\boxed{1.5\times 10^{3}}", "1500", 1.0),
    (r"\boxed{\frac{3}{4}}", "0.75", 1.0), (r"\boxed{1\frac{1}{2}}", "1.5", 1.0), (r"\boxed{0.333}", r"\frac13", 0.0),
    (r"\boxed{[1,2)}", "[1,2)", 1.0), (r"\boxed{[1,2)}", "[1,2]", 0.0), (r"\boxed{(1,2)}", "(2,1)", 0.0),
    (r"\boxed{1,2}", "2,1", 1.0), (r"\boxed{x=5}", "5", 1.0), (r"\boxed{2,-2}", r"\pm 2", 1.0),
    (r"\boxed{B}", "B", 1.0), (r"\boxed{\text{(B)}}", "B", 1.0), (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
    (r"\boxed{3.14}", r"\pi", 0.0), (r"\boxed{42}", r"\boxed{42}", 1.0), (r"\boxed{42}", "42 apples", 1.0),
    (r"\boxed{42}", "42.0", 1.0), (r"\boxed{42} no, \boxed{41}", "42", 0.0), ("the answer is $42$.", "42", 1.0),
    ("the answer is 42.", "42", 0.0), (r"\boxed{}", "42", 0.0), ("", "42", 0.0), (r"\boxed{42", "42", 0.0),
    (r"\boxed{10-20}", "10-20", 1.0), (r"\boxed{1/0}", "1", 0.0), (r"\boxed{12}", "1,2", 0.0),
    (r"\boxed{1.234,56}", "1234.56", 0.0),
    (r"\boxed{16^{\text{th}}}", "16", 0.0),  # unsupported
    (r"\boxed{\$12.50}", "12.5", 1.0),
    (r"\boxed{12 dollars}", "12", 0.0),  # unsupported
    (r"\boxed{1 000}", "1000", 0.0),  # unsupported
    (r"\boxed{12}", ["11", "12"], 1.0), (r"\boxed{13}", ["11", "12"], 0.0), (r"\boxed{0.5}", [r"\frac12", "2"], 1.0),
    (r"\boxed{42}", 42.0, 1.0), (r"\boxed{42}", np.int64(42), 1.0),
]  # fmt: skip
MATH_NUMBERS = [  # numbers that math-verify does not read
    (r"\boxed{1\,200}", "1200", 1.0), (r"\boxed{2e3}", "2000", 1.0), (r"\boxed{41} no, \boxed{42}", "42", 1.0),
    ("\\boxed{\uff11\uff12}", "12", 1.0), (r"\boxed{€12}", "12", 1.0), (r"\boxed{£12}", "12", 1.0),
    (r"\boxed{12}", "€12", 1.0), (r"\boxed{-2e-3}", r"-\frac{1}{500}", 1.0),
]  # fmt: skip


def test_mathematical_answers():
    library = pytest.importorskip("math_verify")

    def library_alone(_, text, reference):
        references = reference if isinstance(reference, list) else [reference]
        gold = [form for answer in references for form in library.parse(f"\\boxed{{{answer}}}")]
        return float(library.verify(gold, library.parse(text, [library.LatexExtractionConfig()])))

    assert wrong(MathVerify(), MATH + MATH_NUMBERS) == []
    assert wrong(library_alone, [row for row in MATH if "%" not in row[0] + str(row[1])]) == []  # 0.8: 50% is 0.5 alone
    assert len(wrong(library_alone, MATH_NUMBERS)) == len(MATH_NUMBERS)


GRADES = [  # of 0 to 10; None: there is no grade, and the reply counts as failed
    ("Grade: 7", "", 7.0), ("grade: 7", "", 7.0), ("GRADE = 7", "", 7.0), ("Grade 7", "", 7.0),
    ("Grade:7.5", "", 7.5), ("Grade: .5", "", 0.5), ("Grade: +7", "", 7.0), ("Grade: -0", "", 0.0),
    ("Grade: -7", "", None), ("Grade: \u22127", "", None), ("Grade: 11", "", None), ("**Grade:** 7", "", 7.0),
    ("**Grade: 7**", "", 7.0), ("Grade: `7`", "", 7.0), ("### Grade: 7", "", 7.0), ("> Grade: 7", "", 7.0),
    ("- Grade: 7", "", 7.0), ("Grade: 7.", "", 7.0), ("Grade: 7/10", "", 7.0), ("Grade: 7 / 10", "", 7.0),
    ("Grade: 7 out of 10", "", 7.0), ("Grade: 7/10.0", "", 7.0), ("Grade: 3/5", "", None), ("Grade: 70%", "", None),
    ("Grade: 7,5", "", None), ("Grade: 7-8", "", None), ("Grade: 7 or 8", "", None),
    ("Grade: 1e1", "", None),  # unsupported: an exponent
    ("Grade: seven", "", None),
    ("Grade: (7)", "", None),  # unsupported
    ("Final grade: 7", "", None),  # unsupported: only lines that start with the word
    ("I would grade: 7", "", None), ("Grade: 2\nNo.\nGrade: 3", "", 3.0), ("Grade: 3\nThank you.", "", 3.0),
    ("Grade: 3\r\n", "", 3.0), ("7", "", 7.0), (" 7\n", "", 7.0), ("7/10", "", None), ("", "", None),
    ("Good work.\n\n**Grade:** 7.5\n", "", 7.5), ("**Grade: 7 out of 10.**", "", 7.0), ("It deserves a 7", "", None),
    ("<think>Grade: 9? No.</think>\n### Grade = 4", "", 4.0), ("The grade: 7 is what it asks for", "", None),
    ("1e3", "", None),
    ("\n" * 500_000 + "x", "", None),  # in linear time
    ('{"reason": "braces } and {", "score": 3}', "json_schema", 3.0), ("[" * 100_000, "json", None),
    ('I thought of {"score": 9}, but: {"reason": "x", "score": 3} is fair.', "json", 3.0),
    ('{"score": NaN}', "json", None), (f'{{"score": 1{"0" * 400}}}', "json", None), ('{"grade": 3}', "json", None),
    ('{"score": 7}', "json", 7.0), ('{"score": 7.5, "reason": "{}"}', "json", 7.5),
    ('```json\n{"score": 7}\n```', "json", 7.0), ('```\n{"score": 7}\n```', "json", 7.0),
    ('So {"score": 7}.', "json", 7.0), ('{"score": 1} or {"score": 7}', "json", 7.0),
    ('{"score": "7"}', "json", None), ('{"score": true}', "json", None), ('{"score": null}', "json", None),
    ('{"score": 70}', "json", None), ("{'score': 7}", "json", None), ("7", "json", None),
]  # fmt: skip


TEMPLATES = [  # completion, template, answer
    ("Answer: 42", "Answer: {answer}", "42"), ("So.\nAnswer: 42\n", "Answer: {answer}", "42"),
    ("Answer:42", "Answer: {answer}", "42"), ("Answer:  42 ", "Answer: {answer}", "42"),
    ("answer: 42", "Answer: {answer}", None), ("42", "Answer: {answer}", None),
    ("Answer: 1\nAnswer: 2", "Answer: {answer}", "2"), ("Answer: 1\nBecause.", "Answer: {answer}", "1"),
    ("Answer:\n42", "Answer: {answer}", "42"), ("Answer: 42\r\nBecause.", "Answer: {answer}", "42"),
    ("Answer: -$12", "Answer: {answer}", "-$12"), ("Answer: \u221212", "Answer: {answer}", "\u221212"),
    ("Answer: 1,000", "Answer: {answer}", "1,000"), ("Answer: 50%", "Answer: {answer}", "50%"),
    ("Answer: [1, 2)", "Answer: {answer}", "[1, 2)"), ("Answer: 3/4", "Answer: {answer}", "3/4"),
    ("Answer: 2e3", "Answer: {answer}", "2e3"),
    ("Answer: **42**", "Answer: {answer}", "**42**"),  # unsupported: markup
    ("**Answer: 42**", "Answer: {answer}", "42**"),  # unsupported: markup
    ("**Answer:** 42", "Answer: {answer}", "** 42"),  # unsupported: markup
    ("Answer: café", "Answer: {answer}", "café"), ("Answer:", "Answer: {answer}", ""), ("", "Answer: {answer}", None),
    ("<answer>42</answer>", "<answer>{answer}</answer>", "42"),
    ("<answer> 42\n</answer>", "<answer>{answer}</answer>", "42"),
    ("<answer>a\nb</answer>", "<answer>{answer}</answer>", "a\nb"),
    ("<answer>1</answer> <answer>2</answer>", "<answer>{answer}</answer>", "2"),
    ("<answer>1</answer> <answer>2", "<answer>{answer}</answer>", "1"),
    ("<answer>1 <answer>2</answer>", "<answer>{answer}</answer>", "1 <answer>2"),  # as in reasoning-gym
    ("<answer>42", "<answer>{answer}</answer>", None), ("42</answer>", "<answer>{answer}</answer>", None),
    ("<ANSWER>42</ANSWER>", "<answer>{answer}</answer>", None),
    ("<answer></answer>", "<answer>{answer}</answer>", ""),
    ("use <answer> tags: <answer>42</answer>", "<answer>{answer}</answer>", "tags: <answer>42"),  # likewise
    (r"\boxed{42}", r"\boxed{{answer}}", "42"),
    (r"\boxed{\frac{1}{2}}", r"\boxed{{answer}}", r"\frac{1"),  # unsupported: nested braces
    (r"\boxed{1} or \boxed{2}", r"\boxed{{answer}}", "2"), ("```\n42\n```", "```{answer}```", "42"),
    ("42", "{answer}", "42"), (" 42\nfoo", "{answer}", "42"), ("#### 42", "#### {answer}", "42"),
]  # fmt: skip


OPTIONS = [  # graders with other options
    (ExactMatch(strip=False), " Paris", "Paris", 0.0), (ExactMatch(ignore_case=True), "STRASSE", "Straße", 1.0),
    (ExactMatch(ignore_case=True), "É", "e\u0301", 1.0), (ExactMatch(ignore_case=True), "b", ["A", "B"], 1.0),
    (NumericAnswer(format_score=0.1), "#### 41", "42", 0.1), (NumericAnswer(format_score=0.1), "41", "42", 0.0),
    (NumericAnswer(format_score=0.1), "#### 42", "42", 1.0),
]  # fmt: skip


def prints(_, printed, expected):
    return StdinTest("", expected).passes(program_that_writes(printed), "")


def returns(_, returned, expected):
    return ValueTest({}, expected).passes(program_that_writes(json.dumps({"value": returned}, default=plain)), "")


def grade(_, reply, reply_format):
    try:
        return read_grade(reply, reply_format or "text", (0.0, 10.0))
    except ValueError:
        return None


@pytest.mark.parametrize(
    ("grade", "rows"),
    [
        (NumericAnswer("flexible"), FLEXIBLE), (NumericAnswer(), STRICT), (ExactMatch(), EXACT),
        (LeadingCorrectCharacters(), LEADING), (prints, OUTPUTS), (returns, VALUES),
        (lambda _, text, __: extract_code(text), [(text, "", code) for text, code in BLOCKS]), (grade, GRADES),
        (lambda _, text, template: extract_answer(template, text, 1), TEMPLATES),
        *((grader, [row]) for grader, *row in OPTIONS),
    ],
)  # fmt: skip
def test_every_row_gets_its_reward(grade, rows):
    assert wrong(grade, rows) == []


def test_grades_below_0_and_unknown_methods():
    assert read_grade("Grade: -3", "text", (-5.0, 5.0)) == -3.0
    with pytest.raises(ValueError, match="method is 'loose'"):
        NumericAnswer(method="loose")
    with pytest.raises(ValueError, match="'none' contains no number"):
        NumericAnswer()("", "#### 1", "none")
