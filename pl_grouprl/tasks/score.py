"""Reward for answers to reasoning-gym tasks, by the library's scorers."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

from pl_grouprl.tasks.generator import decode_entry
from pl_grouprl.tasks.reasoning_gym import extract_answer, is_only_answer
from pl_grouprl.utilities.optional import REASONING_GYM_AVAILABLE, require

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
        if not isinstance(node.op, ast.Pow):
            return left + right
        if isinstance(node.right, ast.Constant):
            return left * max(abs(node.right.value), 1)  # type: ignore[arg-type, type-var]
        return left * (2.0**right if right < 64 else math.inf)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return math.inf if node.keywords else 64 + sum(map(_bits, node.args))
    return math.inf


class ReasoningGymScore:
    """The score, from 0 to 1, that reasoning-gym gives the answer in a completion. Has verl's signature.

    The answer is found by the template in its row (`ReasoningGym.answer_format`). The score is 0 if there is none, or
    if the library's scorer cannot read it. Several scorers give partial credit for answers that are nearly right, or
    right in another form.

    Some scorers evaluate answers as Python code. They receive only literals, or formulas of elementary functions
    without large powers; any other answer is passed as None. Simplifying a formula may still take long, so run this
    reward in reward workers with a time limit.

    Args:
        exact: Return 1 for a full score, 0 for anything less.
        only_answer: Return 0 if there is text before or after the answer. Otherwise a policy may learn to keep writing
            after the answer, since that costs it nothing.
    """

    reads_final_answer = True
    """For an episode, the completion is the content of the last assistant message."""

    def __init__(self, exact: bool = False, only_answer: bool = False) -> None:
        require(REASONING_GYM_AVAILABLE, "ReasoningGymScore", "tasks")
        self.exact = exact
        self.only_answer = only_answer
        self._scorers: dict[tuple[str, str], Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Omit the library's objects, which are recreated when needed."""
        return vars(self) | {"_scorers": {}}

    def set_up(self) -> None:
        """Import the library."""
        import reasoning_gym  # noqa: F401

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Check that a row is from `ReasoningGym`.

        Raises:
            ValueError: If it lacks a part of `extra_info`.
        """
        info = columns.get("extra_info") or {}
        missing = [name for name in ("task", "config", "entry", "answer_format") if name not in info]
        if missing:
            raise ValueError(f"ReasoningGymScore: `extra_info` of the row lacks {missing}; use rows from ReasoningGym.")
        self._scorer(info)
        decode_entry(info["entry"])

    def __call__(
        self, data_source: str, solution_str: str, extra_info: dict[str, Any], ground_truth: str | None = None
    ) -> float:
        """Score one completion.

        Args:
            data_source: Not used.
            solution_str: The completion.
            extra_info: As written by `ReasoningGym`.
            ground_truth: Not used; the entry in `extra_info` has the answer.
        """
        entry = decode_entry(extra_info["entry"])
        template = extra_info["answer_format"]
        answer = extract_answer(template, solution_str, _num_lines(entry))
        if answer is None or (self.only_answer and not is_only_answer(template, solution_str, answer)):
            return 0.0
        passed_on = answer if answer == entry["answer"] or is_harmless(extra_info["task"], answer) else None
        scorer = self._scorer(extra_info)
        try:
            score = float(scorer.score_answer(passed_on, entry))
        except MemoryError:  # counted as a failed reward rather than a score of 0
            raise
        except Exception:  # scorers expect a certain form, but an answer may have any
            return 0.0
        return float(score >= 1) if self.exact else score

    def extract_answer(self, text: str, columns: Mapping[str, Any]) -> str | None:
        """The answer in a completion, for majority votes; None if the completion does not follow its row's template."""
        info = columns["extra_info"]
        return extract_answer(info["answer_format"], text, _num_lines(decode_entry(info["entry"])))

    def _scorer(self, info: Mapping[str, Any]) -> Any:
        """The library's data set for a row's task, which scores its answers."""
        task, config = info["task"], info["config"]
        if (task, config) not in self._scorers:
            from reasoning_gym.factory import create_dataset

            self._scorers[task, config] = create_dataset(task, **json.loads(config))
        return self._scorers[task, config]


def _num_lines(entry: Mapping[str, Any]) -> int | None:
    """Number of lines in the reference, and therefore in an answer; None if there is no reference."""
    reference = entry["answer"]
    return None if reference is None else str(reference).strip().count("\n") + 1
