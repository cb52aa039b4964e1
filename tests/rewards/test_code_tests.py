"""CodeTests: the share of tests that a program passes; programs that cheat pass none."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
from helpers.cheating_programs import CHEATS
from helpers.rewards import group_of
from helpers.rewards import rewards_of as rewards_in
from helpers.sandboxes import survivors
from helpers.watched_processes import until

from pl_grouprl.rewards import (
    CodeTests,
    CosineLengthReward,
    FunctionFromFile,
    RewardConfigurationError,
    SandboxLimits,
    apply_rewards,
    check_columns,
)
from pl_grouprl.rewards.code_tests import StdinTest, read_tests
from pl_grouprl.rewards.sandbox import ProgramResult, Sandbox, SandboxUnavailableError
from pl_grouprl.rewards.sandbox.function_call import plain
from pl_grouprl.types import Prompt

LIMITS = SandboxLimits(timeout=20.0)
ADDS = "def add(a, b):\n    return a + b\n\nif __name__ == '__main__':\n    print(sum(map(int, input().split())))\n"
STDIN = [{"input": "1 2\n", "output": "3\n"}, {"input": "-4 4\n", "output": "0"}]
CALLS = [
    {"function": "add", "args": [1, 2], "expected": 3},
    {"function": "add", "args": [[1], [2]], "expected": (1, 2)},
    {"function": "add", "args": ["a", None], "expected": None},
]


@pytest.fixture(scope="module", autouse=True)
def _walls():
    try:
        Sandbox().check()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))


def block(code):
    return f"Thinking.\n```python\nold = 1\n```\nSo:\n```python\n{code}\n```\nDone."


def rewards_of(codes, tests, workers=None, **options):
    reward, group = CodeTests(limits=LIMITS, **options), group_of(*map(block, codes), tests=tests)
    apply_rewards([group], reward, workers=workers)
    return rewards_in(group)


@pytest.mark.parametrize("tests", [[*STDIN, *CALLS], json.dumps([*STDIN, *CALLS])], ids=["list", "json"])
def test_the_share_of_passed_tests(tests):
    wrong = ADDS.replace("a + b", "a - b")
    assert rewards_of([ADDS, wrong, "syntax error("], tests) == [4 / 5, 2 / 5, 0.0]


def test_all_or_nothing():
    assert rewards_of([ADDS], [*STDIN, *CALLS], all_or_nothing=True) == [0.0]
    assert rewards_of([ADDS], STDIN, all_or_nothing=True) == [1.0]


def test_a_worker_that_takes_too_long_leaves_no_program(make_workers):
    reward = CodeTests(limits=SandboxLimits(timeout=1000.0))
    workers = make_workers(reward, timeout=1.5)
    assert rewards_of([ADDS, "pass"], STDIN, workers=workers) == [1.0, 0.0]
    before = survivors("/program.py")
    metrics = apply_rewards(
        [group_of(block("while True: pass"), tests=STDIN)], reward, workers=workers, max_failed_share=1.0
    )
    workers.close()
    assert metrics["rewards/CodeTests/invalid"] == 1.0
    until(lambda: set(survivors("/program.py")) <= set(before))


def test_rows_without_tests_and_completions_without_a_block():
    reward = CodeTests()
    texts = ["no block", "```python\nprint(3)", block("print(3)"), block("print(3)")]
    completions = [*texts[:2], [{"role": "assistant", "content": texts[2]}], texts[3]]
    assert reward(completions, tests=[STDIN[:1]] * 3 + [None]) == [0.0, 0.0, 1.0, None]


@pytest.mark.parametrize("name", CHEATS)
def test_programs_that_cheat_pass_nothing(name, record_property):
    limits = SandboxLimits(timeout=0.5 if name in ("loops", "floods") else 2.0, memory_limit_mb=128)
    group = group_of(block(CHEATS[name]), tests=[STDIN[0], CALLS[0]])
    apply_rewards([group], CodeTests(limits=limits))
    assert rewards_in(group) == [0.0]
    record_property("figure", "reward 0 of 2 tests")


def test_the_expected_answer_never_enters_the_sandbox():
    given, secret = [], "expected-4711"
    for test in read_tests([{"input": "1", "output": secret}, {"function": "f", "args": [1], "expected": secret}], "t"):
        run = SimpleNamespace(run=lambda *args: given.append(args) or ProgramResult("exit", 0, "", "", 0.0))
        assert not test.passes(run, "print(1)")
    assert len(given) == 2
    assert secret not in repr(given)


def test_a_launcher_that_ends_early_is_an_error(monkeypatch):
    popen, tests = subprocess.Popen, read_tests([STDIN[0], CALLS[0]], "t")
    silent = [sys.executable, "-c", "input()"]
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda command, **options: popen(silent, **options))
        for test in tests:
            with pytest.raises(RuntimeError, match="launcher ended without a report"):
                test.passes(Sandbox(), "print(1)")


MALFORMED = [
    (r"\[\]; write a list", []), ("a string that is not JSON", "not json"),
    ("a string that is not JSON", "[" * 100_000),
    ("None", {"ground_truth": None}), (r"2 is \{'input': '1'\}", [*STDIN, {"input": "1"}]),
    ("0 is", [{"input": 1, "output": 2}]), ("0: .*not JSON", [{"function": "f", "args": [{1}], "expected": 1}]),
    ("0 is '1'", ["1"]), ("0 is 1", [1]), ("0: args is 'ab'", [{"function": "f", "args": "ab", "expected": 1}]),
    ("0: args is {", [{"function": "f", "args": {"a": 1}, "expected": 1}]),
    ("0 is 1, '1'", {"inputs": [1], "outputs": ["1"]}),
    ("0 is a string that is not JSON", {"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}),
    ("0: args is 3", {"inputs": [3], "outputs": [4], "fn_name": "f"}),
    (r"\['1'\] and the outputs \[\]", {"inputs": ["1"], "outputs": []}),
    (r"\[\] and the outputs", {"inputs": [], "outputs": []}),
    ("None and the outputs", {"inputs": None, "outputs": None}),
    ("'12' and the outputs", {"inputs": "12", "outputs": "34"}),
]  # fmt: skip


@pytest.mark.parametrize(("message", "tests"), [("the row has", None), *MALFORMED])
def test_a_malformed_row_is_named_at_setup(tests, message, tmp_path):
    (tmp_path / "rewards.py").write_text("from pl_grouprl.rewards import CodeTests\ngrade = CodeTests()\n")
    columns = {"answer": "x"} if tests is None else {"tests": tests}
    wrapped = FunctionFromFile(str(tmp_path / "rewards.py"), "grade")
    for reward in (CodeTests(), CosineLengthReward(CodeTests(), max_len=10), wrapped):
        with pytest.raises(ValueError, match=f"train, prompt 1: .*'tests'.* {message}"):
            check_columns([Prompt([1], columns={"tests": STDIN}), Prompt([1], columns=columns)], reward, "train")


def test_a_row_of_parquet_has_all_keys():
    row = {"input": None, "output": None, "function": "f", "args": [1], "expected": None}
    assert len(read_tests([row, {**row, "input": "1", "output": "2", "function": None}], "tests")) == 2


def test_without_walls_the_run_is_refused(monkeypatch):
    def refuses(self):
        raise SandboxUnavailableError("no namespaces here")

    monkeypatch.setattr(Sandbox, "check", refuses)
    with pytest.raises(RewardConfigurationError, match="no namespaces here"):
        check_columns([Prompt([1], columns={"tests": STDIN})], CodeTests(), "train")


def test_options_are_checked():
    with pytest.raises(ValueError, match="max_workers"):
        CodeTests(max_concurrent=0)([], tests=[])


# Tests as data sets have them: verl's and APPS's inputs and outputs, MBPP's assert statements.

LINES = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
PAIRS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
APPS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}
ASSERTS = [
    "assert add(1, 2) == 3", "assert set(add([1], [2])) == set((2, 1))", "assert add('a', \"b\") == 'ab'",
    "assert add(-1, 1) == 0, 'message'", "assert add(1, 1)", "assert not add(0, 0)", "assert is_sum(3, 1, 2) == True",
    "assert add((1,), (2,)) == (1, 2)",
]  # fmt: skip
FLOATS = [
    "assert add(0.1, 0.2) == 0.3",
    "assert add([0.1], [2.0]) == [0.1000000001, 2]",
    "assert add(0.1, 0.2) == 0.3001",
]
ADD = "def add(a, b):\n    return a + b\n\ndef is_sum(c, *parts):\n    return c == sum(parts)\n"
METHOD = "class Solution:\n    def add(self, a: Any, b: List[int]) -> Optional[int]:\n        return a + b\n"
SCRIPT = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"


@pytest.mark.parametrize(
    "wrap", [lambda own: own, json.dumps, lambda own: {"style": "rule", "ground_truth": json.dumps(own)}]
)
def test_verls_inputs_and_outputs_are_read_in_every_form(wrap):
    lines, calls = read_tests(wrap(LINES), "tests"), read_tests(wrap(PAIRS), "tests")
    assert [(type(test), test.input, test.output) for test in lines] == [
        (StdinTest, "1 2\n", "3\n"),
        (StdinTest, "3\n4", "7"),
    ]
    assert [(json.loads(test.request), test.expected) for test in calls] == [
        ({"function": "add", "args": [1, 2]}, 3),
        ({"function": "add", "args": [[1], [2]]}, [1, 2]),
    ]
    wrapped = read_tests(wrap(APPS), "tests")
    assert [(test.request, test.expected) for test in wrapped] == [(test.request, test.expected) for test in calls]


def test_an_assert_is_split_into_what_the_program_sees_and_its_answer():
    found = [(json.loads(test.request)["expression"], test.expected) for test in read_tests(ASSERTS, "tests")]
    assert found[:4] == [
        ("add(1, 2)", 3),
        ("set(add([1], [2]))", {"set": [1, 2]}),
        ("add('a', 'b')", "ab"),
        ("add(-1, 1)", 0),
    ]
    assert found[4:7] == [("not not add(1, 1)", True), ("not not add(0, 0)", False), ("is_sum(3, 1, 2)", True)]
    assert found[7] == ("add((1,), (2,))", [1, 2])


@pytest.mark.parametrize(
    "text",
    [
        "assert math.isclose(f(2), 1.4)", "assert isclose(f(2), 1.4) == True", "assert f(2).__eq__(1.4)",
        "assert not f(2).startswith('1.4')", "assert (f(1) == 2) == 3", "assert f(1) == 2 or True",
        "assert 1 < f(1) < 3", "assert f(1) != 2", "assert f(1) == g(1)", "assert f(1) == open('x')", "f(1) == 2",
        "assert f(1) == 2\nassert f(2) == 3", "assert f(",
        pytest.param("assert f(1) == " + "-" * 5000 + "1", id="too deep"), "assert True",
    ],
)  # fmt: skip
def test_an_assert_that_could_be_passed_without_an_answer_is_refused(text):
    with pytest.raises(ValueError, match=r"column 'tests', test 1 is .*without computing the answer: write \{"):
        read_tests([ASSERTS[0], text], "tests")


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        (SCRIPT, LINES, 1.0), (ADD, PAIRS, 1.0), (METHOD, PAIRS, 1.0), (ADD, ASSERTS, 1.0),
        (ADD.replace("a + b", "b + a"), ASSERTS[1:3], 1 / 2), (ADD, FLOATS, 2 / 3),
        ("print(0.1 + 0.2)\n", {"inputs": [""], "outputs": ["0.3"]}, 1.0),
        ("print(3)\nraise ValueError", {"inputs": [""], "outputs": ["3"]}, 0.0),
    ],
    ids=["lines", "calls", "method", "asserts", "wrong", "floats", "printed float", "crash"],
)  # fmt: skip
def test_programs_are_run_against_them(code, tests, expected):
    assert rewards_of([code], tests) == [expected]


class Shown(frozenset):
    """A set whose text, as that of any set of strings, differs between processes."""

    def __repr__(self):
        return self.text


@pytest.mark.parametrize("texts", ["ab", "ba"])
def test_equal_sets_of_sets_are_the_same_json(texts):
    two, one = Shown("xy"), Shown("z")
    two.text, one.text = texts
    assert plain({two, one}) == {"set": [frozenset("xy"), frozenset("z")]}


FORGERIES = {
    "os._exit(0)": "import os; os._exit(0)",
    "SystemExit at import": "raise SystemExit(0)",
    "true value": "print('{\"value\": true}')\ndef add(a, b):\n    return True\n",
    "equal to everything": "class Same:\n    __eq__ = lambda self, other: True\ndef add(a, b):\n    return Same()\n",
    "own set": "class Own(list): pass\nset = lambda own: Own()\ndef add(a, b):\n    return 0\n",
    "reads the request": "import json\ndef add(a, b):\n    return json.load(open('/stdin'))['expected']\n",
}


@pytest.mark.parametrize("code", FORGERIES.values(), ids=FORGERIES)
def test_forged_answers_pass_no_assert(code):
    assert rewards_of([code], ASSERTS[:2]) == [0.0]
