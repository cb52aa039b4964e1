"""Reads the tests of a row in any of these forms: ours, that of verl and APPS, or assert statements (MBPP)."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from pl_grouprl.rewards.code_test_kinds import CodeTest, StdinTest, ValueTest

_FORMS = '{"input": ..., "output": ...}, {"function": ..., "args": [...], "expected": ...} or "assert f(1) == 2"'
_BUILDERS = {"set": set, "frozenset": frozenset, "tuple": tuple, "list": list, "dict": dict}


def read_tests(given: Any, column: str) -> list[CodeTest]:
    """Read the tests of a row.

    Args:
        given: A list of tests, a mapping with verl's `inputs`, `outputs` and perhaps `fn_name`, verl's `reward_model`
            with one of these as `ground_truth`, or the JSON of any.
        column: Its name, for messages.

    Raises:
        ValueError: If they are malformed, or a program could pass one without computing the answer.
    """
    what = f"column {column!r}"
    given = _from_json(given, what)
    if isinstance(given, Mapping) and "ground_truth" in given:
        given = _from_json(given["ground_truth"], what)
    if isinstance(given, Mapping) and {"inputs", "outputs"} <= given.keys():
        return _read_pairs(given, what)
    if not isinstance(given, list) or not given:
        raise ValueError(f"{what} is {given!r:.80}; write a list of at least one {_FORMS}.")
    return [_read_test(test, f"{what}, test {number}") for number, test in enumerate(given)]


def _from_json(given: Any, what: str) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{what} is a string that is not JSON ({error}); write a list of {_FORMS}.") from error


def _read_test(test: Any, where: str) -> CodeTest:
    if isinstance(test, str):
        return _read_assert(test, where)
    if not isinstance(test, Mapping):
        raise ValueError(f"{where} is {test!r:.80}; write {_FORMS}.")
    # Parquet gives every test the keys of all of them, with null where a test lacks one.
    fields = {name: value for name, value in test.items() if value is not None or name == "expected"}
    if {"input", "output"} <= fields.keys() and "function" not in fields:
        if all(isinstance(fields[name], str) for name in ("input", "output")):
            return StdinTest(fields["input"], fields["output"])
        raise ValueError(f"{where}: input and output are {test!r:.80}; write strings.")
    if {"function", "args", "expected"} <= fields.keys():
        return _call(str(fields["function"]), fields["args"], fields["expected"], where)
    raise ValueError(f"{where} is {test!r:.80}; write {_FORMS}.")


def _call(function: str, args: Any, expected: Any, where: str) -> ValueTest:
    if not isinstance(args, list | tuple):
        raise ValueError(f"{where}: args is {args!r:.80}; write a list of arguments.")
    try:
        return ValueTest({"function": function, "args": args}, expected)
    except TypeError as error:
        raise ValueError(f"{where}: {args!r:.80} or {expected!r:.80} is not JSON ({error}).") from error


def _read_pairs(given: Mapping[str, Any], what: str) -> list[CodeTest]:
    """Verl's form: without `fn_name`, texts or lists of lines; with it, arguments and value, a line of JSON each."""
    inputs, outputs = given["inputs"], given["outputs"]
    if not all(isinstance(own, list | tuple) for own in (inputs, outputs)):
        raise ValueError(f"{what} has the inputs {inputs!r:.80} and the outputs {outputs!r:.80}; write two lists.")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{what} has {len(inputs)} inputs and {len(outputs)} outputs; write as many, at least one.")
    pairs = [(f"{what}, test {number}", *pair) for number, pair in enumerate(zip(inputs, outputs, strict=True))]
    if given.get("fn_name") is None:
        return [StdinTest(_lines_of(own, where), _lines_of(output, where)) for where, own, output in pairs]
    return [_call(str(given["fn_name"]), *_values(own, output, where), where) for where, own, output in pairs]


def _lines_of(given: Any, where: str) -> str:
    if isinstance(given, list) and all(isinstance(line, str) for line in given):
        return "\n".join(given)
    if not isinstance(given, str):
        raise ValueError(f"{where} is {given!r:.80}; write a string, or a list of lines.")
    return given


def _values(given: Any, output: Any, where: str) -> tuple[list[Any], Any]:
    """Arguments and expected value; of values that are no JSON texts, APPS wraps the expected one in a list."""
    if isinstance(given, list):
        wrapped = isinstance(output, list) and len(output) == 1
        return given, output[0] if wrapped else output
    if not isinstance(given, str):
        raise ValueError(f"{where} is {given!r:.80}; write a list of arguments, or lines of JSON.")
    args = [_from_json(line, where) for line in given.splitlines()]
    return args, _from_json(output, where)


def _read_assert(text: str, where: str) -> ValueTest:
    """Split `assert f(1) == 2` into an expression, which the program sees, and its value, which it does not."""
    try:
        (statement,) = ast.parse(text.strip()).body
        assert isinstance(statement, ast.Assert)
        expression, expected = _sides(statement.test)
        return ValueTest({"expression": ast.unparse(expression)}, expected)
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(
            f"{where} is {text!r:.120}; of assert statements, only `assert CALL == VALUE` and `assert CALL` can be "
            "split into what a program computes and an answer that it never sees. Any other one it could pass without "
            f"computing the answer: write {_FORMS}."
        ) from error


def _sides(test: ast.expr) -> tuple[ast.expr, Any]:
    """The expression that is computed in the sandbox, and its expected value."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
        return _equality(test.left, _value(test.comparators[0]))
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    computed = test.operand if negated else test  # type: ignore[attr-defined]
    _check_plain_call(computed)
    return ast.parse(f"not not ({ast.unparse(computed)})", mode="eval").body, not negated


def _equality(computed: ast.expr, expected: Any) -> tuple[ast.expr, Any]:
    if isinstance(expected, bool):
        _check_plain_call(computed)
    known = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda)  # would show the program what its result is compared with
    if any(isinstance(node, known) for node in ast.walk(computed)):
        raise ValueError("a comparison inside")
    return computed, expected


def _check_plain_call(node: ast.expr) -> None:
    """Refuse a truth value of anything but one call with plain arguments.

    `isclose(f(2), 1.4)` and `f(2).__eq__(1.4)` show the answer.
    """
    if not isinstance(node, ast.Call):
        raise ValueError("no call")
    if any(isinstance(inner, ast.Call) and (inner.args or inner.keywords) for inner in ast.walk(node.func)):
        raise ValueError("a method of a result")  # but Solution().f(1) is fine
    for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
        _value(argument)


def _value(node: ast.expr) -> Any:
    """The value of a literal, or of a literal turned into a set or the like; no code is run."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords and len(node.args) <= 1:
        return _BUILDERS[node.func.id](*map(_value, node.args)) if node.func.id in _BUILDERS else ast.literal_eval(node)
    return ast.literal_eval(node)
