"""Kinds of program tests: what runs in the sandbox, and the expected answer, which never enters it."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from pl_grouprl.rewards.sandbox import ProgramResult, Sandbox
from pl_grouprl.rewards.sandbox.function_call import plain

_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])")
_TOLERANCE = Decimal("1e-6")  # the usual one of judges


class CodeTest(Protocol):
    """One test of a program."""

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code, and compare its answer with the expected one."""
        ...


class StdinTest:
    """Expects the program to write `output` when it reads `input`, and to exit without error.

    Ignored are white space at the ends of lines, empty lines at both ends, and how many spaces stand between words.
    Numbers may differ as floats do, by 1e-6 (see `_same_number`).

    Args:
        input: Standard input.
        output: The expected standard output.
    """

    def __init__(self, input: str, output: str) -> None:
        self.input = input
        self.output = output

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code as a script."""
        result = sandbox.run(code, self.input)
        return result.exit_code == 0 and _same_output(result.stdout, self.output)


class ValueTest:
    """Expects a value computed with the program's names to equal `expected`.

    Values are compared as JSON, so tuples equal lists; numbers may differ as floats do, by 1e-6.

    Args:
        request: What `sandbox/function_call.py` computes: a function call or an expression.
        expected: The expected value; it may contain sets.
        or_in_list: Whether a list of the expected value alone is right, too.

    Raises:
        TypeError: If JSON cannot express one of them.
    """

    _driver = Path(__file__).with_name("sandbox") / "function_call.py"

    def __init__(self, request: dict[str, Any], expected: Any, or_in_list: bool = False) -> None:
        self.request = json.dumps(request)
        self.expected = json.loads(json.dumps(expected, default=plain))
        self.or_in_list = or_in_list

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code and compute the value."""
        result = sandbox.run(self._driver.read_text(), self.request, {"/solution.py": code})
        returned, value = _read_value(result)
        return returned and (_same(value, self.expected) or (self.or_in_list and _same(value, [self.expected])))


def _same_number(answer: str, expected: str) -> bool:
    """Whether two numbers are equal as far as floats can be.

    Numbers without a decimal point or exponent must be the same text. Otherwise the difference may be 1e-6, or that
    share of an expected number that is not whole; of one below 1e-6, only that share.
    """
    if not set(".eE") & set(answer + expected):
        return answer == expected
    try:
        wanted = Decimal(expected)
        whole, tiny = not set(".eE") & set(expected), 0 < abs(wanted) < _TOLERANCE
        scale = abs(wanted) if tiny else Decimal(1) if whole else max(Decimal(1), abs(wanted))
        return abs(Decimal(answer) - wanted) <= _TOLERANCE * scale
    except ArithmeticError:  # not a number, or beyond all exponents
        return False


def _same(value: Any, expected: Any) -> bool:
    """Whether two values of JSON are equal."""
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_same, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(_same(value[key], expected[key]) for key in expected)
    numbers = all(isinstance(side, int | float) and not isinstance(side, bool) for side in (value, expected))
    return bool(value == expected) or (numbers and _same_number(str(value), str(expected)))


def _same_output(text: str, expected: str) -> bool:
    parts, wanted = _parts(text), _parts(expected)
    return len(parts) == len(wanted) and all(
        part == other or _same_number(part, other) for part, other in zip(parts, wanted, strict=True)
    )


def _parts(text: str) -> list[str]:
    """The numbers of a text and what is between them."""
    lines = [re.sub(r"(?<=\S)[ \t]+", " ", line.rstrip()) for line in text.rstrip().lstrip("\r\n").splitlines()]
    return _NUMBER.split("\n".join(lines))


def _read_value(result: ProgramResult) -> tuple[bool, Any]:
    """Whether a program returned a value, and the value."""
    if result.ending != "exit":
        return False, None
    try:
        answer = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return False, None
    return (True, answer["value"]) if isinstance(answer, dict) and "value" in answer else (False, None)
