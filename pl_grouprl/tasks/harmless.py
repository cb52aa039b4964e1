"""Decides which answers may be passed to reasoning-gym scorers that evaluate them as Python code."""

from __future__ import annotations

import ast
import math

LITERAL_TASKS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Tasks whose scorers call `eval` and expect a list."""

FORMULA_TASKS = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Tasks whose scorers call sympy's `parse_expr`, which calls `eval`."""

_MAX_CHARACTERS = 10_000
_MAX_BITS = 4096
_FUNCTIONS = frozenset(
    {"Abs", "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "csc", "exp"}
    | {"ln", "log", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.USub, ast.UAdd)


def is_harmless(task: str, answer: str) -> bool:
    """Whether a task's scorer can evaluate an answer without running code from it.

    Always true for scorers that evaluate nothing. For `LITERAL_TASKS`, the answer must be a literal (numbers, strings,
    lists), or not valid Python, which `eval` cannot parse. For `FORMULA_TASKS`, it must be a formula of numbers, names
    and elementary functions whose values stay below 4096 bits.
    """
    if task not in LITERAL_TASKS | FORMULA_TASKS:
        return True
    if len(answer) > _MAX_CHARACTERS:
        return False
    try:
        tree = ast.parse(answer.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return task in LITERAL_TASKS
    except (RecursionError, MemoryError):
        return False
    try:
        return _is_literal(tree) if task in LITERAL_TASKS else _bits(tree) <= _MAX_BITS
    except (RecursionError, OverflowError):
        return False


def _is_literal(node: ast.expr) -> bool:
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant)
    return isinstance(node, ast.Constant) or (
        isinstance(node, ast.List | ast.Tuple) and all(_is_literal(item) for item in node.elts)
    )


def _bits(node: ast.expr) -> float:
    """Upper bound on a formula's degree and on the bits of its value; infinity if it is not a formula."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value.bit_length() + 1 if isinstance(node.value, int) else 64
    if isinstance(node, ast.Name):
        return 2
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, _OPERATORS):
        return _bits(node.operand)
    if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
        left, right = _bits(node.left), _bits(node.right)
        return left * _max_exponent(node.right, right) if isinstance(node.op, ast.Pow) else left + right
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return math.inf if node.keywords else 64 + sum(map(_bits, node.args))
    return math.inf


def _max_exponent(node: ast.expr, bits: float) -> float:
    """Upper bound on the value of an exponent, given the bound on its bits."""
    if isinstance(node, ast.Constant):
        return max(abs(node.value), 1)  # type: ignore[arg-type, type-var]
    return 2.0**bits if bits < 64 else math.inf
