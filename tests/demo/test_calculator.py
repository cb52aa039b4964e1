"""The calculator: values by hand, and what it refuses."""

import re

import pytest
from transformers.utils import get_json_schema

from pl_grouprl.demo.tasks import calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3 * (4 + 10)", "42"), ("7 - 2 - 1", "4"), ("8 / 4 / 2", "1"), ("2 + 3 * 4", "14"),
        ("-(2 + 3) * --2", "-10"), ("1,200 * .5", "600"), ("0.1 + 0.2", "0.3"), ("2 / 3", "0.6666666667"),
        ("1 / 3 * 3", "1"), ("(12 + 3.5) * 4.", "62"), ("007", "7"),
    ],
)  # fmt: skip
def test_values(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "expected a number in the expression, found ''"),
        ("2 +", "expected a number in the expression, found ''"),
        ("2 ** 3", "expected a number in the expression, found '*'"),
        ("__import__('os')", "expected a number in the expression, found '_'"),
        ("1 . 5", "unexpected '.' in the expression"),
        ("3 x 4", "unexpected 'x' in the expression"),
        ("2 (3)", "unexpected '(' in the expression"),
        ("9e99", "unexpected 'e' in the expression"),
        ("\N{ARABIC-INDIC DIGIT TWO} + 1", "expected a number"),
        ("(1 + 2", "a parenthesis is not closed in the expression"),
        ("1" * 201, "the expression has 201 characters; at most 200 are allowed"),
    ],
)
def test_anything_else_is_refused(expression, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        calculate(expression)


def test_the_longest_expressions_end():
    assert calculate("(" * 99 + "1" + ")" * 99) == "1"
    assert calculate("-" * 199 + "1") == "-1"
    assert len(calculate("9" * 99 + "*" + "9" * 99)) == 198
    with pytest.raises(ZeroDivisionError):
        calculate("1 / (2 - 2)")


def test_it_is_described_to_the_model():
    function = get_json_schema(calculate)["function"]
    assert function["name"] == "calculate"
    assert function["parameters"]["required"] == ["expression"]
