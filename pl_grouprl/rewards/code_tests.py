"""Reward for programs that pass tests, run in a sandbox."""

from __future__ import annotations

import io
import re
import textwrap
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pl_grouprl.rewards.code_test_formats import read_tests
from pl_grouprl.rewards.completion_text import completion_text
from pl_grouprl.rewards.sandbox import Sandbox, SandboxLimits
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options

_OPENS = re.compile(r"^[ \t]*```+(?=[^`]*$)")
_PYTHON = re.compile(r"(?:py|python)[\d.]*(?![\w-])", re.IGNORECASE)


@checked_arguments
class CodeTests:
    """The share of tests that the program in a completion passes. Has TRL's signature.

    The program is the completion's last fenced block (three backticks) marked as `python` or `py`, or else its last
    one; without a block the reward is 0. Each test runs it in a new sandbox; see `pl_grouprl.rewards.sandbox.Sandbox`
    for what that prevents and requires. Answers are compared in this process, so a program cannot read the expected
    ones, and what it claims about itself is ignored. Numbers that are not whole may differ by 1e-6.

    Args:
        column: Data column with the tests of each prompt: a list (or its JSON) of
            `{"input": ..., "output": ...}`, standard input and output, of
            `{"function": ..., "args": [...], "expected": ...}`, or of `"assert f(1) == 2"` as in MBPP's `test_list`;
            or verl's `{"inputs": [...], "outputs": [...], "fn_name": ...}`, also as the `ground_truth` of
            `reward_model`. The reward does not apply to rows where it is None.
        all_or_nothing: Return 1 if all tests pass, otherwise 0; stops at the first failure.
        max_concurrent: Number of programs that each process runs at a time.
        limits: Resource limits of each program.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        column: str = "tests",
        *,
        all_or_nothing: bool = False,
        max_concurrent: int = 4,
        limits: SandboxLimits | None = None,
    ) -> None:
        check_options({"CodeTests.max_concurrent": (max_concurrent, max_concurrent >= 1, "a whole number, at least 1")})
        self.column = column
        self.all_or_nothing = all_or_nothing
        self.max_concurrent = max_concurrent
        self._sandbox = Sandbox(SandboxLimits(**limits) if isinstance(limits, Mapping) else limits)

    def set_up(self) -> None:
        """Check that the sandbox works here by running a trial program.

        Raises:
            RewardConfigurationError: If this system does not allow the sandbox; says why.
        """
        self._sandbox.check()

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Refuse a row whose tests are missing or malformed.

        Raises:
            ValueError: Names the column and what is wrong.
        """
        if self.column not in columns:
            raise ValueError(
                f"CodeTests needs the column {self.column!r}, and the row has {sorted(columns)}; add it, or pass "
                "another column: CodeTests(column=...)."
            )
        if columns[self.column] is not None:
            read_tests(columns[self.column], self.column)

    def __call__(self, completions: list[Any], **columns: list[Any]) -> list[float | None]:
        """Return the share of passed tests of each completion.

        Raises:
            ValueError: As for `check_row`.
        """
        rows = [{name: values[index] for name, values in columns.items()} for index in range(len(completions))]
        for row in rows:
            self.check_row(row)
        stopped = threading.Event()
        executor = ThreadPoolExecutor(self.max_concurrent, thread_name_prefix="code-tests")
        try:
            texts = [completion_text(completion) for completion in completions]
            return list(executor.map(lambda text, row: self._score(text, row[self.column], stopped), texts, rows))
        finally:
            stopped.set()
            executor.shutdown(cancel_futures=True)

    def _score(self, text: str, value: Any, stopped: threading.Event) -> float | None:
        """The share of tests that a completion passes, given the value of the column."""
        if value is None:
            return None
        code = extract_code(text)
        if code is None:
            return 0.0
        tests, passed = read_tests(value, self.column), 0
        for test in tests:
            if stopped.is_set():
                break
            if test.passes(self._sandbox, code):
                passed += 1
            elif self.all_or_nothing:
                return 0.0
        return passed / len(tests)


def extract_code(text: str) -> str | None:
    """Return the last fenced block of a text that is marked as Python, or else the last one; None without any."""
    blocks: list[tuple[bool, str]] = []
    fence, is_python, lines = "", False, list[str]()
    for line in io.StringIO(text):
        if fence and line.startswith(fence):
            blocks.append((is_python, textwrap.dedent("".join(lines))))
            fence = ""
        elif fence:
            lines.append(line)
        elif opening := _OPENS.match(line):
            fence, lines = opening[0], []
            is_python = _PYTHON.match(line[opening.end() :].strip()) is not None
    marked = [block for block in blocks if block[0]]
    return (marked or blocks)[-1][1] if blocks else None
