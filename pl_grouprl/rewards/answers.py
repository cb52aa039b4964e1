"""Graders that compare a completion with a reference answer. Tests: tests/rewards/test_grader_tables.py."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from itertools import takewhile
from typing import Any, Literal

from pl_grouprl.rewards.base import ground_truth_of
from pl_grouprl.utilities.optional import MATH_VERIFY_AVAILABLE, require
from pl_grouprl.utilities.options import check_fields
from pl_grouprl.utilities.text import shorten


def accepted_answers(reference: Any) -> list[str]:
    """Return the texts that count as right answers.

    Args:
        reference: A string or a number; or a list, tuple, set or array of these, any of which is right. A float is
            accepted as Python writes it (`42.0`) and without trailing zeros and rounding errors (`42`).

    Raises:
        ValueError: If it is anything else, which no text could equal.
    """
    reference = reference.tolist() if hasattr(reference, "tolist") else reference
    answers = list(reference) if isinstance(reference, list | tuple | set | frozenset) else [reference]
    if not answers or any(answer is None or isinstance(answer, Mapping | list | tuple | bytes) for answer in answers):
        raise ValueError(
            f"the reference {shorten(reference)} is not an answer that a completion could equal; write a string, a "
            "number, or a list of those, any of which counts as right."
        )
    return [
        text
        for answer in answers
        for text in ([str(answer), f"{answer:.15g}"] if isinstance(answer, float) else [str(answer)])
    ]


class ReferenceGrader:
    """Base of graders with verl's signature: the highest score of a completion against any accepted answer."""

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    ground_truth_column: str | None = None

    def score(self, text: str, reference: str) -> float:
        """Score a completion against one accepted answer."""
        raise NotImplementedError

    def check_reference(self, reference: str) -> None:
        """Raise ValueError for a reference that no completion could equal."""

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Check that a completion could equal the reference of a row.

        Raises:
            ValueError: Names the reference and the remedy.
        """
        for reference in accepted_answers(ground_truth_of(columns, self.ground_truth_column)):
            self.check_reference(reference)

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float | None:
        """Score one completion; the reference may be a list of accepted answers.

        Raises:
            ValueError: If the reference is neither a string, nor a number, nor a list of those.
        """
        return max(self.score(solution_str, reference) for reference in accepted_answers(ground_truth))


@dataclass(eq=False, repr=False)
class ExactMatch(ReferenceGrader):
    """1 if the completion equals the reference, or one of a list of references, else 0. Has verl's signature.

    References are compared as strings. Two encodings of a character (`é` as one code point or two), and of the end of a
    line, are equal.

    Attributes:
        strip: Ignore white space at both ends.
        ignore_case: Ignore upper and lower case.
    """

    strip: bool = True
    ignore_case: bool = False

    def score(self, text: str, reference: str) -> float:
        """Score one completion."""
        return float(self.extract_answer(text) == self.extract_answer(reference))

    def extract_answer(self, text: str) -> str:
        """The text as it is compared; in majority votes, equal texts count as one answer."""
        text = unicodedata.normalize("NFC", text.replace("\r\n", "\n"))
        text = text.strip() if self.strip else text
        return text.casefold() if self.ignore_case else text


class LeadingCorrectCharacters(ReferenceGrader):
    """Share of correct characters before the first wrong one. Has verl's signature.

    The share is of the longer of the two strings, so extra characters after the answer lower it, and it is 1 only if
    both are equal. `sevex` for `seven` gives 4/5, `sevens` 5/6, `even` 0. Partly correct completions earn a reward too,
    so a policy that is rarely exactly right still has a signal. Of a list of references, the nearest counts.
    """

    def score(self, text: str, reference: str) -> float:
        """Score one completion."""
        longest, pairs = max(len(text), len(reference)), zip(text, reference, strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / longest if longest else 1.0


# Reward for a numeric answer after worked steps, as in GSM8K.

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
_PATTERNS = {"strict": _MARKED, "flexible": _ANY}
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


def _last_number(text: str, method: Literal["strict", "flexible"]) -> Number | None:
    numbers = _numbers(text, method)
    return _value(numbers[-1]) if numbers else None


def _numbers(text: str, method: Literal["strict", "flexible"]) -> list[re.Match[str]]:
    return [match for match in _PATTERNS[method].finditer(_plain(text)) if match["number"]]


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


@dataclass(eq=False, repr=False)
class NumericAnswer(ReferenceGrader):
    """1 if the final number of the completion equals the reference, else 0. Has verl's signature.

    Numbers are compared by value: 42, 42.0, $42 and 84/2 are equal; see `extract_number` for what a number is. 50%
    equals both 50 and 0.5. The reference may be the bare number, with a unit, or a whole GSM8K solution that ends in
    `#### 42`; or a list of these, any of which is right. Nothing is evaluated: an expression such as 6*7 is not a
    number.

    Attributes:
        method: `strict` requires the form `#### 42`; `flexible` takes the last number of the completion.
        format_score: Reward for a wrong number in the required form.
    """

    method: Literal["strict", "flexible"] = "strict"
    format_score: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, method=(self.method in _PATTERNS, "strict or flexible"))

    def check_reference(self, reference: str) -> None:
        """Check that a reference has a single number, or one after `####`.

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


_BRACES = re.compile(r"(?P<box>\\boxed *\{)|(?<!\\)[{}]")


@dataclass(eq=False, repr=False)
class MathVerify(ReferenceGrader):
    r"""1 if the completion's answer is mathematically equal to the reference, else 0. Has verl's signature.

    `\frac{1}{2}`, `0.5` and `2^{-1}` are equal; the reference may be a list of accepted answers. With the default
    extraction and `reference="solution"` the reward equals TRL's `accuracy_reward`. With `reference="answer"` the
    reference is read as in verl's `math_verify.compute_score`; and if it and the last box are equal numbers, as
    `NumericAnswer` reads them, the reward is 1 whatever math-verify says. If nothing in the reference can be parsed,
    the reward does not apply (None).

    Comparing `9^{9^{9}}` with anything takes forever. The library's own time limit is switched off: it uses a signal,
    which works only on the main thread, and it counts the answer as wrong. Instead, a run must set
    `reward_calls.workers` and `reward_calls.timeout`: a worker that takes too long is killed, and the rollout has no
    reward rather than 0.

    Attributes:
        reference: `answer`: the reference is the bare answer, such as `x^2+1`. `solution`: it is text that contains
            the answer, as in TRL's column `solution`.
        column: Data column with the reference; None looks for verl's `reward_model.ground_truth`, then for the columns
            `ground_truth` and `answer`.
        extraction: `latex` accepts answers in LaTeX: `\boxed{...}`, or else `$...$` after words like "the answer is".
            `any` also accepts bare numbers and expressions.

    Raises:
        ModuleNotFoundError: If math-verify is not installed.
    """

    needs_time_limit = True
    """A run needs `reward_calls.workers` and `reward_calls.timeout`."""

    reference: Literal["answer", "solution"] = "answer"
    column: str | None = None
    extraction: Literal["latex", "any"] = "latex"

    def __post_init__(self) -> None:
        require(MATH_VERIFY_AVAILABLE, "MathVerify", "math")
        check_fields(
            self,
            reference=(self.reference in ("answer", "solution"), "answer or solution"),
            extraction=(self.extraction in ("latex", "any"), "latex or any"),
        )
        self.ground_truth_column = self.column

    def set_up(self) -> None:
        """Import the library now, because calls have a time limit."""
        self("", r"\boxed{1}", "1")

    def check_reference(self, reference: str) -> None:
        """Check that no worked solution stands for a bare answer; its words would be parsed as products of letters.

        Raises:
            ValueError: Names the remedy.
        """
        text = reference.strip()
        if self.reference == "answer" and ("\n" in text or "####" in text):
            raise ValueError(
                f"MathVerify: the reference {text!r:.80} is a worked solution rather than a bare answer; pass "
                "MathVerify(reference='solution'), which looks for the answer in it."
            )

    def __call__(
        self, data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
    ) -> float | None:
        """Score one completion; None if the reference cannot be parsed."""
        answers = accepted_answers(ground_truth)
        boxed = _last_boxed(solution_str) if self.reference == "answer" else None
        if boxed is not None:
            left, *others = (_WHOLE.fullmatch(_plain(side.strip())) for side in (boxed, *answers))
            if left and any(_equal(_value(left), _value(other)) for other in others if other):
                return 1.0
        is_bare = self.reference == "answer"
        gold = [form for text in answers for form in _parse(f"\\boxed{{{text}}}" if is_bare else text)]
        if not gold:
            return None
        library = _library()
        latex = functools.partial(
            library.LatexExtractionConfig,
            normalization_config=library.LatexNormalizationConfig(units=True),
            boxed_match_priority=0,
        )
        if self.extraction == "latex":
            targets = [latex(try_extract_without_anchor=False)]
            parsed = library.parse(solution_str, targets, extraction_mode="first_match", parsing_timeout=None)
        else:
            parsed = library.parse(solution_str, [latex(), library.ExprExtractionConfig()], parsing_timeout=None)
        return float(library.verify(gold, parsed, timeout_seconds=None))

    def extract_answer(self, text: str) -> str | None:
        r"""The answer in a completion as text, for majority votes; None if there is none.

        It is the content of the last `\boxed{...}`. Without a box, `extraction="any"` takes the last number. Nothing is
        evaluated, so no time limit is needed.
        """
        boxed = _last_boxed(text)
        if boxed is not None or self.extraction == "latex":
            return boxed
        return NumericAnswer("flexible").extract_answer(text)


@functools.lru_cache(maxsize=64)
def _parse(text: str) -> list[Any]:
    parsed: list[Any] = _library().parse(text, parsing_timeout=None)
    return parsed


@functools.cache
def _library() -> Any:
    import math_verify
    from math_verify import grader, parser

    for module in (grader, parser):  # silences their warnings that the time limit is off
        module.TIMEOUT_WARNING_SHOWN = True
    return math_verify


def _last_boxed(text: str) -> str | None:
    r"""The stripped content of the `\boxed{...}` that closes last, found in one pass."""
    opened: list[int | None] = []  # for each open brace: where its content begins, or None if it does not open a box
    last = slice(0)
    for match in _BRACES.finditer(text):
        if match[0] != "}":
            opened.append(match.end() if match["box"] else None)
        elif opened and (start := opened.pop()) is not None:
            last = slice(start, match.start())
    return text[last].strip() if last.start is not None else None
