import re
from pathlib import Path

import pytest

from pl_grouprl.tasks.score import FORMULA_TASKS, LITERAL_TASKS, is_harmless

LIST, FORMULA = "n_queens", "countdown"


@pytest.mark.parametrize(
    ("task", "answer", "harmless"),
    [
        ("chain_sum", "__import__('os').abort()", True),  # its scorer compares strings
        (LIST, "[['Q', '_'], [1, -2]]", True),
        (LIST, "Q _ _\n_ Q _", True),  # no Python
        (LIST, "entry['metadata']['valid_answers']", False), (LIST, "oracle_answer", False),
        (LIST, "['a'] * 10**10", False), (LIST, "[i for i in ()]", False),
        (LIST, "(" * 200 + ")" * 200, True),  # too deep to be Python
        (LIST, "-" * 5000 + "1", False), (LIST, "1" * 10_001, False), (FORMULA, "(3 + 4) * 25 - 7 / 2", True),
        (FORMULA, "x**12 - 3*sin(2*x)**2/7 + exp(-x)*sqrt(log(Abs(x))) + C", True), (FORMULA, "2x + 1", False),
        (FORMULA, "open('/etc/passwd')", False), (FORMULA, "exec(chr(1))", False), (FORMULA, "sin.__class__", False),
        (FORMULA, "().x", False), (FORMULA, "'a' + 'b'", False), (FORMULA, "log(x, evaluate=1)", False),
        (FORMULA, "lambda: 0", False), (FORMULA, "9**9**9", False), (FORMULA, "((9**99)**99)**99", False),
        (FORMULA, "2**(3 + 4)", True), (FORMULA, "2**1000**1000", False), (FORMULA, "x**1e400", False),
        (FORMULA, "True", False),
    ],
)  # fmt: skip
def test_answers_that_scorers_evaluate(task, answer, harmless):
    assert is_harmless(task, answer) is harmless


def test_code_in_an_answer_does_not_run(score, monkeypatch):
    import os

    from reasoning_gym.factory import create_dataset

    from pl_grouprl.tasks.generator import encode_entry

    ran = []
    monkeypatch.setattr(os, "mkdir", ran.append)
    entry = create_dataset("countdown", seed=1, size=1)[0]
    info = {"task": "countdown", "config": "{}", "entry": encode_entry(entry), "answer_format": "{answer}"}
    assert score("", entry["answer"], info) == 1.0
    assert score("", "__import__('os').mkdir('here')", info) == 0.01  # what the library gives to no answer
    assert ran == []
    assert create_dataset("countdown", seed=1, size=1).score_answer("__import__('os').mkdir('here')", entry) == 0.01
    assert ran == ["here"]  # it would have run


EVALUATING = {
    # Scorers, which get harmless answers alone.
    "algebra/intermediate_integration.py",
    "algebra/polynomial_multiplication.py",
    "algebra/simple_integration.py",
    "algorithmic/binary_matrix.py",
    "algorithmic/spiral_matrix.py",
    "algorithmic/string_insertion.py",
    "games/countdown.py",
    "games/n_queens.py",
    "games/puzzle24.py",
    # These evaluate only what they generated.
    "algorithmic/number_sorting.py",
    "arithmetic/basic_arithmetic.py",
    "arithmetic/bitwise_arithmetic.py",
    "arithmetic/gsm_symbolic/generators_00_49.py",
    "arithmetic/gsm_symbolic/generators_50_99.py",
    "code/codeio.py",
    "logic/propositional_logic.py",  # a parser of its own, named parse_expr
}


def test_no_other_part_of_the_library_evaluates_anything():
    import reasoning_gym

    folder = Path(reasoning_gym.__file__).parent
    evaluating = {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*.py")
        if re.search(r"\b(eval|exec|parse_expr|sympify|lambdify|literal_eval)\(", path.read_text(encoding="utf-8"))
    }
    assert evaluating == EVALUATING
    scorers = {path.rpartition("/")[2].removesuffix(".py") for path in sorted(EVALUATING)}
    assert scorers >= LITERAL_TASKS | FORMULA_TASKS
