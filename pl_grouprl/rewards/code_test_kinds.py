"""Kinds of program tests: what runs in the sandbox, and the expected answer, which never enters it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from pl_grouprl.rewards.sandbox import ProgramResult, Sandbox
from pl_grouprl.rewards.sandbox.function_call import plain


class CodeTest(Protocol):
    """One test of a program."""

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code, and compare its answer with the expected one."""
        ...


class StdinTest:
    """Expects the program to write `output` when it reads `input`, and to exit without error.

    Whitespace at the ends of lines is ignored.

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
        return result.exit_code == 0 and _lines(result.stdout) == _lines(self.output)


class ValueTest:
    """Expects a value computed with the program's names to equal `expected`; compared as JSON, so tuples equal lists.

    Args:
        request: What `sandbox/function_call.py` computes: a function call or an expression.
        expected: The expected value; it may contain sets.

    Raises:
        TypeError: If JSON cannot express one of them.
    """

    _driver = Path(__file__).with_name("sandbox") / "function_call.py"

    def __init__(self, request: dict[str, Any], expected: Any) -> None:
        self.request = json.dumps(request)
        self.expected = json.loads(json.dumps(expected, default=plain))

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code and compute the value."""
        result = sandbox.run(self._driver.read_text(), self.request, {"/solution.py": code})
        returned, value = _read_value(result)
        return returned and bool(value == self.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _read_value(result: ProgramResult) -> tuple[bool, Any]:
    """Whether a program returned a value, and the value."""
    if result.ending != "exit":
        return False, None
    try:
        answer = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return False, None
    return (True, answer["value"]) if isinstance(answer, dict) and "value" in answer else (False, None)
