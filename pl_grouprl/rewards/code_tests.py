"""Reward for programs that pass tests, run in a sandbox.

row -> read_tests -> StdinTest | ValueTest: what runs in the sandbox, and the expected answer, which never enters it
completion -> extract_code -> one sandbox per test -> the share of tests passed
"""

from __future__ import annotations

import ast
import io
import json
import re
import textwrap
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from pl_grouprl.rewards.base import completion_text
from pl_grouprl.rewards.sandbox import Sandbox, SandboxLimits
from pl_grouprl.rewards.sandbox.function_call import plain


@dataclass(eq=False, repr=False)
class CodeTests:
    """The share of tests that the program in a completion passes. Has TRL's signature.

    The program is the completion's last fenced block (three backticks) marked as `python` or `py`, or else its last
    one; without a block the reward is 0. Each test runs it in a new sandbox; see `pl_grouprl.rewards.sandbox.Sandbox`
    for what that prevents and requires. Answers are compared in this process, so a program cannot read the expected
    ones, and what it claims about itself is ignored. Numbers that are not whole may differ by 1e-6.

    Attributes:
        column: Data column with the tests of each prompt: a list (or its JSON) of
            `{"input": ..., "output": ...}`, standard input and output, of
            `{"function": ..., "args": [...], "expected": ...}`, or of `"assert f(1) == 2"` as in MBPP's `test_list`;
            or verl's `{"inputs": [...], "outputs": [...], "fn_name": ...}`, also as the `ground_truth` of
            `reward_model`. The reward does not apply to rows where it is None.
        all_or_nothing: Return 1 if all tests pass, otherwise 0; stops at the first failure.
        max_concurrent: Number of programs that each process runs at a time.
        limits: Resource limits of each program.
    """

    column: str = "tests"
    _: KW_ONLY
    all_or_nothing: bool = False
    max_concurrent: int = 4
    limits: SandboxLimits | None = None

    def __post_init__(self) -> None:
        self._sandbox = Sandbox(self.limits)

    def set_up(self) -> None:
        """Check that the sandbox works here by running a trial program.

        Raises:
            RewardConfigurationError: If this system does not allow the sandbox; says why.
        """
        self._sandbox.check()

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Check that a row has well-formed tests.

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


_OPENS = re.compile(r"^[ \t]*```+(?=[^`]*$)")
_PYTHON = re.compile(r"(?:py|python)[\d.]*(?![\w-])", re.IGNORECASE)


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


# The two kinds of tests, and how answers are compared.


@dataclass(frozen=True)
class StdinTest:
    """Expects the program to write `output` when it reads `input`, and to exit without error.

    White space at line ends, empty lines at both ends, and the number of spaces between words are ignored.
    Numbers may differ as floats do, by 1e-6 (see `_same_number`).

    Attributes:
        input: Standard input.
        output: The expected standard output.
    """

    input: str
    output: str

    def passes(self, sandbox: Sandbox, code: str) -> bool:
        """Run the code as a script, and compare its output with the expected one."""
        result = sandbox.run(code, self.input)
        parts, wanted = _parts(result.stdout), _parts(self.output)
        return (
            result.exit_code == 0
            and len(parts) == len(wanted)
            and all(part == other or _same_number(part, other) for part, other in zip(parts, wanted, strict=True))
        )


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
        """Run the code, compute the value, and compare it with the expected one."""
        result = sandbox.run(self._driver.read_text(), self.request, {"/solution.py": code})
        if result.ending != "exit":
            return False
        try:
            value = json.loads(result.stdout)["value"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return False
        return _same(value, self.expected) or (self.or_in_list and _same(value, [self.expected]))


CodeTest = StdinTest | ValueTest

_NUMBER = re.compile(r"(?<![\w.])([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)(?![\w.])")
_TOLERANCE = Decimal("1e-6")  # the usual one of judges


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


def _parts(text: str) -> list[str]:
    """The numbers of a text and what is between them."""
    lines = [re.sub(r"(?<=\S)[ \t]+", " ", line.rstrip()) for line in text.rstrip().lstrip("\r\n").splitlines()]
    return _NUMBER.split("\n".join(lines))


# Reads the tests of a row, in our format, in that of verl and APPS, or as assert statements (MBPP).

_FORMS = '{"input": ..., "output": ...}, {"function": ..., "args": [...], "expected": ...} or "assert f(1) == 2"'
_CONTAINERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict}


def read_tests(value: Any, column: str) -> list[CodeTest]:
    """Read the tests of a row.

    Args:
        value: A list of tests, a mapping with verl's `inputs`, `outputs` and perhaps `fn_name`, verl's `reward_model`
            with one of these as `ground_truth`, or any of them as JSON.
        column: Name of the column, for errors.

    Raises:
        ValueError: If the tests are malformed, or a program could pass one without computing the answer.
    """
    where = f"column {column!r}"
    value = _from_json(value, where)
    if isinstance(value, Mapping) and "ground_truth" in value:
        value = _from_json(value["ground_truth"], where)
    if isinstance(value, Mapping) and {"inputs", "outputs"} <= value.keys():
        return _read_pairs(value, where)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} is {value!r:.80}; write a list of at least one {_FORMS}.")
    tests: list[CodeTest] = []
    for number, test in enumerate(value):
        which = f"{where}, test {number}"
        # In Parquet, each test has the keys of all tests, with null for those it lacks.
        fields = (
            {name: part for name, part in test.items() if part is not None or name == "expected"}
            if isinstance(test, Mapping)
            else {}
        )
        if isinstance(test, str):
            tests.append(_read_assert(test, which))
        elif "function" not in fields and all(isinstance(fields.get(name), str) for name in ("input", "output")):
            tests.append(StdinTest(fields["input"], fields["output"]))
        elif {"function", "args", "expected"} <= fields.keys():
            tests.append(_function_test(fields["function"], fields["args"], fields["expected"], which))
        else:
            raise ValueError(f"{which} is {test!r:.80}; write {_FORMS}.")
    return tests


def _from_json(value: Any, where: str) -> Any:
    """Decode a string; anything else is already decoded."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is a string that is not JSON ({error}); write a list of {_FORMS}.") from error


def _function_test(function: Any, args: Any, expected: Any, where: str, or_in_list: bool = False) -> ValueTest:
    if not isinstance(args, list | tuple):
        raise ValueError(f"{where}: args is {args!r:.80}; write a list of arguments.")
    try:
        return ValueTest({"function": str(function), "args": args}, expected, or_in_list)
    except TypeError as error:
        raise ValueError(f"{where}: {args!r:.80} or {expected!r:.80} is not JSON ({error}).") from error


def _read_pairs(value: Mapping[str, Any], where: str) -> list[CodeTest]:
    """Read verl's format: standard input and output or, with `fn_name`, arguments and values of a function."""
    inputs, outputs = value["inputs"], value["outputs"]
    are_lists = all(isinstance(listed, list | tuple) for listed in (inputs, outputs))
    if not (are_lists and 0 < len(inputs) == len(outputs)):
        raise ValueError(
            f"{where} has the inputs {inputs!r:.80} and the outputs {outputs!r:.80}; write two lists of one length, at "
            "least 1."
        )
    function = value.get("fn_name")
    # APPS wraps each decoded value in a list. Where all are lists of one, the functions may also return such lists.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    tests: list[CodeTest] = []
    for number, (given, expected) in enumerate(zip(inputs, outputs, strict=True)):
        which = f"{where}, test {number}"
        if function is None:
            given, expected = ("\n".join(side) if isinstance(side, list) else side for side in (given, expected))
            if not isinstance(given, str) or not isinstance(expected, str):
                raise ValueError(f"{which} is {given!r:.80}, {expected!r:.80}; write strings, or lists of lines.")
            tests.append(StdinTest(given, expected))
            continue
        if isinstance(given, str):  # a line of JSON for each argument
            given, expected = [_from_json(line, which) for line in given.splitlines()], _from_json(expected, which)
        tests.append(_function_test(function, given, expected[0] if wrapped else expected, which, wrapped))
    return tests


def _read_assert(text: str, where: str) -> ValueTest:
    """Split `assert f(1) == 2` into an expression, which the program sees, and its value, which it does not."""
    try:
        (statement,) = ast.parse(text.strip()).body
        if not isinstance(statement, ast.Assert):
            raise ValueError("no assert statement")
        test = statement.test
        if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
            computed, expected = test.left, _literal(test.comparators[0])
            if isinstance(expected, bool):
                _check_plain_call(computed)
            revealing = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda)
            if any(isinstance(node, revealing) for node in ast.walk(computed)):
                raise ValueError("a comparison inside, which shows the program what its result is compared with")
        else:
            expected = not (isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not))
            computed = test if expected else test.operand  # type: ignore[attr-defined]
            _check_plain_call(computed)
            computed = ast.parse(f"not not ({ast.unparse(computed)})", mode="eval").body
        return ValueTest({"expression": ast.unparse(computed)}, expected)
    except (SyntaxError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(
            f"{where} is {text!r:.120}; only `assert CALL == VALUE` and `assert CALL` can be split into what the "
            "program computes and an answer that it never sees. It could pass any other assert statement without "
            f"computing the answer: write {_FORMS}."
        ) from error


def _check_plain_call(node: ast.expr) -> None:
    """Reject an expression for a truth value unless it is one call with literal arguments.

    `isclose(f(2), 1.4)` and `f(2).__eq__(1.4)` would show the answer to the program.
    """
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    if any(isinstance(inner, ast.Call) and (inner.args or inner.keywords) for inner in ast.walk(node.func)):
        raise ValueError("a method of a result")  # but Solution().f(1) is fine
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        _literal(argument)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, or of a literal turned into a container, as in `set([1])`; no code is run."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) <= 1:
        container = _CONTAINERS.get(node.func.id)
        if container is not None:
            return container(*map(_literal, node.args))
    return ast.literal_eval(node)
