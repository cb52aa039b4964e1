"""Tests of programs: what is run in the sandbox, and the answer it is compared with, which never enters it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from pl_grouprl.rewards.sandbox import ProgramResult, Sandbox
from pl_grouprl.rewards.sandbox.function_call import plain


class CodeTest(Protocol):
    """One test of a program: what is run, and the expected answer, which the program never sees."""

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code and judge its answer."""
        ...


class StdinTest:
    """Expects a program that reads `input` to write `output` and to end without an error.

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
    """Expects what is computed with a program's names to equal `expected`, compared as JSON: tuples count as lists.

    Args:
        request: What `sandbox/function_call.py` computes: a call of a function, or an expression.
        expected: The expected value; it may have sets.

    Raises:
        TypeError: If they are not JSON.
    """

    _driver = Path(__file__).with_name("sandbox") / "function_call.py"

    def __init__(self, request: dict[str, Any], expected: Any) -> None:
        self.request = json.dumps(request)
        self.expected = json.loads(json.dumps(expected, default=plain))

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code and compute the value."""
        result = sandbox.run(self._driver.read_text(), self.request, {"/solution.py": code})
        found, value = _returned(result)
        return found and bool(value == self.expected)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _returned(result: ProgramResult) -> tuple[bool, Any]:
    """Whether a program returned an answer, and the answer."""
    if result.ending != "exit":
        return False, None
    try:
        answer = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return False, None
    return (True, answer["value"]) if isinstance(answer, dict) and "value" in answer else (False, None)
