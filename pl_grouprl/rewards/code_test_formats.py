"""Reads the tests of a row, in our format, in that of verl and APPS, or as assert statements (MBPP)."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from pl_grouprl.rewards.code_test_kinds import CodeTest, StdinTest, ValueTest

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
    return [_read_test(test, f"{where}, test {number}") for number, test in enumerate(value)]


def _from_json(value: Any, where: str) -> Any:
    """Decode a string; anything else is already decoded."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is a string that is not JSON ({error}); write a list of {_FORMS}.") from error


def _read_test(test: Any, where: str) -> CodeTest:
    if isinstance(test, str):
        return _read_assert(test, where)
    if not isinstance(test, Mapping):
        raise ValueError(f"{where} is {test!r:.80}; write {_FORMS}.")
    # In Parquet, each test has the keys of all tests, with null for those it lacks.
    fields = {name: value for name, value in test.items() if value is not None or name == "expected"}
    if {"input", "output"} <= fields.keys() and "function" not in fields:
        if all(isinstance(fields[name], str) for name in ("input", "output")):
            return StdinTest(fields["input"], fields["output"])
        raise ValueError(f"{where}: input and output are {test!r:.80}; write strings.")
    if {"function", "args", "expected"} <= fields.keys():
        return _function_test(str(fields["function"]), fields["args"], fields["expected"], where)
    raise ValueError(f"{where} is {test!r:.80}; write {_FORMS}.")


def _function_test(function: str, args: Any, expected: Any, where: str, or_in_list: bool = False) -> ValueTest:
    if not isinstance(args, list | tuple):
        raise ValueError(f"{where}: args is {args!r:.80}; write a list of arguments.")
    try:
        return ValueTest({"function": function, "args": args}, expected, or_in_list)
    except TypeError as error:
        raise ValueError(f"{where}: {args!r:.80} or {expected!r:.80} is not JSON ({error}).") from error


def _read_pairs(value: Mapping[str, Any], where: str) -> list[CodeTest]:
    """Read verl's format: standard input and output or, with `fn_name`, arguments and values of a function."""
    inputs, outputs = value["inputs"], value["outputs"]
    if not all(isinstance(listed, list | tuple) for listed in (inputs, outputs)):
        raise ValueError(f"{where} has the inputs {inputs!r:.80} and the outputs {outputs!r:.80}; write two lists.")
    if not inputs or len(inputs) != len(outputs):
        raise ValueError(f"{where} has {len(inputs)} inputs and {len(outputs)} outputs; write as many, at least one.")
    function = value.get("fn_name")
    # APPS wraps each decoded value in a list. Where all are lists of one, the functions may also return such lists.
    wrapped = all(isinstance(output, list) and len(output) == 1 for output in outputs)
    tests: list[CodeTest] = []
    for number, pair in enumerate(zip(inputs, outputs, strict=True)):
        which = f"{where}, test {number}"
        if function is None:
            tests.append(StdinTest(*(_as_text(side, which) for side in pair)))
        else:
            args, expected = _args_and_expected(*pair, which)
            tests.append(_function_test(str(function), args, expected[0] if wrapped else expected, which, wrapped))
    return tests


def _as_text(value: Any, where: str) -> str:
    """Standard input or output, which may be a list of lines."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"{where} is {value!r:.80}; write a string, or a list of lines.")
    return value


def _args_and_expected(args: Any, expected: Any, where: str) -> tuple[list[Any], Any]:
    """Decode arguments, a line of JSON each, and the expected value, which may also be decoded already."""
    if isinstance(args, list):
        return args, expected
    if not isinstance(args, str):
        raise ValueError(f"{where} is {args!r:.80}; write a list of arguments, or lines of JSON.")
    return [_from_json(line, where) for line in args.splitlines()], _from_json(expected, where)


def _read_assert(text: str, where: str) -> ValueTest:
    """Split `assert f(1) == 2` into an expression, which the program sees, and its value, which it does not."""
    try:
        (statement,) = ast.parse(text.strip()).body
        assert isinstance(statement, ast.Assert)
        expression, expected = _split(statement.test)
        return ValueTest({"expression": ast.unparse(expression)}, expected)
    except (SyntaxError, ValueError, TypeError, AssertionError, RecursionError) as error:
        raise ValueError(
            f"{where} is {text!r:.120}; only `assert CALL == VALUE` and `assert CALL` can be split into what the "
            "program computes and an answer that it never sees. It could pass any other assert statement without "
            f"computing the answer: write {_FORMS}."
        ) from error


def _split(test: ast.expr) -> tuple[ast.expr, Any]:
    """The expression that is computed in the sandbox, and its expected value."""
    if isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Eq) and len(test.ops) == 1:
        expected = _literal(test.comparators[0])
        _check_hides_expected(test.left, expected)
        return test.left, expected
    negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
    computed = test.operand if negated else test  # type: ignore[attr-defined]
    _check_plain_call(computed)
    return ast.parse(f"not not ({ast.unparse(computed)})", mode="eval").body, not negated


def _check_hides_expected(computed: ast.expr, expected: Any) -> None:
    """Refuse an expression that would show the program what its result is compared with."""
    if isinstance(expected, bool):
        _check_plain_call(computed)
    revealing = (ast.Compare, ast.BoolOp, ast.IfExp, ast.Lambda)
    if any(isinstance(node, revealing) for node in ast.walk(computed)):
        raise ValueError("a comparison inside")


def _check_plain_call(node: ast.expr) -> None:
    """Refuse an expression for a truth value unless it is one call with literal arguments.

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
