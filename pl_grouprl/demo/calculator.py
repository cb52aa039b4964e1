"""A tool for word problems: arithmetic with exact fractions, limited to numbers, + - * / and parentheses."""

from __future__ import annotations

import re
from fractions import Fraction

_MAX_CHARACTERS = 200
_TOKEN = re.compile(r"[0-9]+(?:\.[0-9]*)?|\.[0-9]+|\S")


def calculate(expression: str) -> str:
    """Calculate the value of an arithmetic expression.

    Args:
        expression: Numbers, + - * / and parentheses, such as (12 + 3.5) * 4.

    Returns:
        The value, rounded to ten significant digits if it is not whole.

    Raises:
        ValueError: If it is not such an expression, or longer than 200 characters.
        ZeroDivisionError: If it divides by zero.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {_MAX_CHARACTERS} are allowed")
    value = _Expression(expression).value()
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.10g}"


class _Expression:
    """Parses an expression by recursive descent; ignores thousands separators."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text.replace(",", ""))
        self._next = 0

    def value(self) -> Fraction:
        """The value of the whole expression."""
        value = self._sum()
        if self._next < len(self._tokens):
            raise ValueError(f"unexpected {self._tokens[self._next]!r} in the expression")
        return value

    def _sum(self) -> Fraction:
        value = self._product()
        while sign := self._take("+-"):
            value = value + self._product() if sign == "+" else value - self._product()
        return value

    def _product(self) -> Fraction:
        value = self._factor()
        while sign := self._take("*/"):
            value = value * self._factor() if sign == "*" else value / self._factor()
        return value

    def _factor(self) -> Fraction:
        if sign := self._take("+-"):
            return self._factor() if sign == "+" else -self._factor()
        if self._take("("):
            value = self._sum()
            if not self._take(")"):
                raise ValueError("a parenthesis is not closed in the expression")
            return value
        found = self._take()
        if found[:1] not in set(".0123456789") or found == ".":
            raise ValueError(f"expected a number in the expression, found {found!r}")
        return Fraction(found)

    def _take(self, wanted: str = "") -> str:
        """Consume and return the next token if it is wanted (any, by default); otherwise return an empty string."""
        token = self._tokens[self._next] if self._next < len(self._tokens) else ""
        if not token or (wanted and token not in wanted):
            return ""
        self._next += 1
        return token
