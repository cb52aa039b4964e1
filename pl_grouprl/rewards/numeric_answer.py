"""Reward for a numeric answer after worked steps, as in GSM8K."""

from __future__ import annotations

import re
import unicodedata
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from pl_grouprl.rewards.references import ReferenceGrader
from pl_grouprl.utilities.arguments import checked_arguments

_SEPARATOR = r"(?:,|\{,\}|\\,|[_'\u2019\u00a0\u2009\u202f])"
_DIGITS = rf"""(?:(?:\d{{1,2}}(?:{_SEPARATOR}\d\d){{1,4}}{_SEPARATOR}\d{{3}}(?!\d)  # 1,00,000
    |\d{{1,3}}(?:{_SEPARATOR}\d{{3}}(?!\d))+  # 1,000,000
    |\d+)(?:\.\d+)?|(?<!\d)\.\d+)"""
_CURRENCY = r"(?:\\?[$€£¥₹₩₽¢]|[A-Z]{1,2}\$|USD|EUR|GBP|CNY|JPY|INR|Rs\.?)"
_NUMBER = rf"""
    (?:(?<![\dA-Za-z)\]}}%°.-])(?<!\d[$€£¥₹₩₽¢])(?P<sign>[-+]))?  # no sign in 15-8, 10%-20%, 10$-20$
    (?:(?<!\d){_CURRENCY}\ ?(?P<inner_sign>[-+])?)?
    (?:(?P<whole>\d+)\ (?=\d+/\d))?
    (?P<number>{_DIGITS})
    (?:(?:[eE]|\ ?(?:\u00d7|\\times|\\cdot|[*x\u00b7])\ ?10(?:\^|\*\*)\{{?)(?P<exponent>[-+]?\d+))?
    (?:\ ?/\ ?(?P<divisor>{_DIGITS}))?
    (?P<percent>\}}?\ ?(?:\\?%|percent\b))?"""
_WHOLE = re.compile(_NUMBER, re.VERBOSE)
_MARKED = re.compile(rf"\#\#\#\#\s*(?:{_NUMBER})", re.VERBOSE)
_ANY = re.compile(rf"(?<=[A-Za-z\d)\]}}])[\^_]\{{?[-+]?\d+|(?:{_NUMBER})", re.VERBOSE)  # skips exponents and indices
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F) if code != 0xFF0C}  # not the Chinese comma
_AS_ASCII = _FULL_WIDTH | str.maketrans("\u2212\u2012\u2013\ufe63\u2044", "----/")
_VULGAR = re.compile("(\\d?)([\u00bc-\u00be\u2150-\u215e])")
_SUPERSCRIPT = re.compile("[\u207a\u207b\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_LATEX_FRACTION = re.compile(r"(\d?)\\[dt]?frac(\{[^{}]*\}|\d)(\{[^{}]*\}|\d)")
_MOST_CHARACTERS = 1000  # calculating with longer numbers takes more than linear time

Number = tuple[Fraction, bool]
"""A value, and whether it was written with a percent sign (which does not change it)."""


def extract_number(text: str, method: Literal["strict", "flexible"] = "strict") -> Fraction | None:
    r"""Return the final number of a solution.

    A number is decimal digits, perhaps with a sign, a currency, separators of thousands, an exponent (`2e3`,
    `2 \times 10^3`), a divisor (`3/4`, `1 1/2`, `\frac{3}{4}`) or a percent sign, which does not change its value.

    Args:
        text: A solution with its worked steps.
        method: `strict` takes the number after the last `####`; `flexible` the last number anywhere.

    Returns:
        The number, or None if there is none.
    """
    found = _last_number(text, method)
    return found[0] if found else None


def equal_numbers(text: str, reference: str) -> bool:
    """Whether both texts are one number and nothing else, of equal value; 50% equals both 50 and 0.5."""
    sides = [_WHOLE.fullmatch(_plain(side.strip())) for side in (text, reference)]
    values = [_value(side) for side in sides if side]
    return len(values) == 2 and _equal(*values)


def _last_number(text: str, method: Literal["strict", "flexible"]) -> Number | None:
    numbers = _numbers(text, method)
    return _value(numbers[-1]) if numbers else None


def _numbers(text: str, method: Literal["strict", "flexible"]) -> list[re.Match[str]]:
    pattern = _MARKED if method == "strict" else _ANY
    return [match for match in pattern.finditer(_plain(text)) if match["number"]]


def _plain(text: str) -> str:
    """The text with `-` for minus signs, ASCII for full width, `^2` for superscripts, `1/2` for fractions."""
    text = _VULGAR.sub(lambda m: f"{m[1] and m[1] + ' '}{unicodedata.normalize('NFKC', m[2])}", text)
    text = _SUPERSCRIPT.sub(lambda match: "^" + unicodedata.normalize("NFKC", match[0]), text)
    text = _LATEX_FRACTION.sub(lambda m: f"{m[1] and m[1] + ' '}{m[2].strip('{}')}/{m[3].strip('{}')}", text)
    return text.translate(_AS_ASCII)


def _value(match: re.Match[str]) -> Number | None:
    exponent = match["exponent"] or "0"
    if len(match[0]) > _MOST_CHARACTERS or abs(int(exponent)) > _MOST_CHARACTERS:
        return None
    whole, number, divisor = (
        Fraction(re.sub(_SEPARATOR, "", match[part] or default))
        for part, default in (("whole", "0"), ("number", ""), ("divisor", "1"))
    )
    if not divisor:
        return None
    sign = -1 if "-" in (match["sign"], match["inner_sign"]) else 1
    return sign * (whole + number * Fraction(10) ** int(exponent) / divisor), bool(match["percent"])


def _equal(number: Number | None, reference: Number | None) -> bool:
    if number is None or reference is None:
        return False
    (value, percent), (wanted, wanted_percent) = number, reference
    scaled = percent != wanted_percent and (value == wanted * 100 if percent else value * 100 == wanted)
    return value == wanted or scaled


@checked_arguments
class NumericAnswer(ReferenceGrader):
    """1 if the final number of the completion equals the reference, else 0. Has verl's signature.

    Numbers are compared by value: 42, 42.0, $42 and 84/2 are equal; see `extract_number` for what a number is. 50%
    equals both 50 and 0.5. The reference may be the bare number, with a unit, or a whole GSM8K solution that ends in
    `#### 42`; or a list of such, any of which is right. Nothing is evaluated: an expression such as 6*7 is no number.

    Args:
        method: `strict` requires the form `#### 42`; `flexible` takes the last number of the completion.
        format_score: Reward for a wrong number in the required form.
    """

    def __init__(self, method: Literal["strict", "flexible"] = "strict", format_score: float = 0.0) -> None:
        if method not in ("strict", "flexible"):
            raise ValueError(f"NumericAnswer.method is {method!r}; it must be 'strict' or 'flexible'.")
        self.method = method
        self.format_score = format_score

    def check_reference(self, reference: str) -> None:
        """Refuse a reference without a single number.

        Raises:
            ValueError: If the reference has no number, or several and none after `####`.
        """
        _reference_number(reference)

    def score(self, text: str, reference: str) -> float:
        """Score one completion.

        Raises:
            ValueError: As `check_reference`.
        """
        wanted, found = _reference_number(reference), _last_number(text, self.method)
        if found is None:
            return 0.0
        return 1.0 if _equal(found, wanted) else self.format_score

    def extract_answer(self, text: str) -> str | None:
        """The number in a completion in normal form, for majority votes; None if there is none."""
        number = extract_number(text, self.method)
        if number is None:
            return None
        decimal = Decimal(number.numerator) / Decimal(number.denominator)
        return f"{decimal.normalize():f}" if Fraction(decimal) == number else str(number)


def _reference_number(reference: str) -> Number:
    numbers = _numbers(reference, "strict")[-1:] or _numbers(reference, "flexible")
    found = _value(numbers[0]) if len(numbers) == 1 else None
    if found is None:
        what = {0: "no number", 1: "a number that cannot be read"}.get(len(numbers), "several numbers")
        raise ValueError(
            f"NumericAnswer: the reference {reference!r:.80} contains {what}; write the answer alone, or after ####."
        )
    return found
