"""Tests of programs as data sets have them: verl's and APPS's inputs and outputs, MBPP's assert statements."""

from __future__ import annotations

import json

import pytest

from pl_grouprl.rewards import CodeTests, SandboxLimits
from pl_grouprl.rewards.code_tests import StdinTest, read_tests
from pl_grouprl.rewards.sandbox import SandboxUnavailableError
from pl_grouprl.rewards.sandbox.function_call import plain

LINES = {"inputs": ["1 2\n", ["3", "4"]], "outputs": ["3\n", ["7"]]}
CALLS = {"fn_name": "add", "inputs": ["1\n2", "[1]\n[2]"], "outputs": ["3", "[1, 2]"]}
APPS = {"fn_name": "add", "inputs": [[1, 2], [[1], [2]]], "outputs": [[3], [[1, 2]]]}
ASSERTS = [
    "assert add(1, 2) == 3",
    "assert set(add([1], [2])) == set((2, 1))",
    "assert add('a', \"b\") == 'ab'",
    "assert add(-1, 1) == 0, 'message'",
    "assert add(1, 1)",
    "assert not add(0, 0)",
    "assert is_sum(3, 1, 2) == True",
    "assert add((1,), (2,)) == (1, 2)",
]
FLOATS = [
    "assert add(0.1, 0.2) == 0.3",
    "assert add([0.1], [2.0]) == [0.1000000001, 2]",
    "assert add(0.1, 0.2) == 0.3001",
]
ADD = "def add(a, b):\n    return a + b\n\ndef is_sum(c, *parts):\n    return c == sum(parts)\n"
METHOD = "class Solution:\n    def add(self, a: Any, b: List[int]) -> Optional[int]:\n        return a + b\n"
SCRIPT = "import sys\nprint(sum(map(int, sys.stdin.read().split())))\n"


def share(code, tests):
    reward = CodeTests(limits=SandboxLimits(timeout=20.0))
    try:
        reward.set_up()
    except SandboxUnavailableError as error:
        pytest.skip(str(error))
    return reward([f"```python\n{code}```"], tests=[tests])[0]


@pytest.mark.parametrize(
    "wrap", [lambda own: own, json.dumps, lambda own: {"style": "rule", "ground_truth": json.dumps(own)}]
)
def test_verls_inputs_and_outputs_are_read_in_every_form(wrap):
    lines, calls = read_tests(wrap(LINES), "tests"), read_tests(wrap(CALLS), "tests")
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
        "assert math.isclose(f(2), 1.4)",
        "assert isclose(f(2), 1.4) == True",
        "assert f(2).__eq__(1.4)",
        "assert not f(2).startswith('1.4')",
        "assert (f(1) == 2) == 3",
        "assert f(1) == 2 or True",
        "assert 1 < f(1) < 3",
        "assert f(1) != 2",
        "assert f(1) == g(1)",
        "assert f(1) == open('x')",
        "f(1) == 2",
        "assert f(1) == 2\nassert f(2) == 3",
        "assert f(",
        pytest.param("assert f(1) == " + "-" * 5000 + "1", id="too deep"),
        "assert True",
    ],
)
def test_an_assert_that_could_be_passed_without_an_answer_is_refused(text):
    with pytest.raises(ValueError, match=r"column 'tests', test 1 is .*without computing the answer: write \{"):
        read_tests([ASSERTS[0], text], "tests")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"inputs": ["1"], "outputs": []}, r"has the inputs \['1'\] and the outputs \[\]"),
        ({"inputs": [], "outputs": []}, r"has the inputs \[\] and the outputs \[\]"),
        ({"inputs": [1], "outputs": ["1"]}, "test 0 is 1, '1'; write strings"),
        ({"inputs": ["x"], "outputs": ["1"], "fn_name": "f"}, "test 0 is a string that is not JSON"),
        ({"inputs": [3], "outputs": [4], "fn_name": "f"}, "test 0: args is 3; write a list of arguments"),
        ({"inputs": None, "outputs": None}, "has the inputs None and the outputs None"),
        ({"inputs": "12", "outputs": "34"}, "has the inputs '12' and the outputs '34'"),
        ([{"function": "f", "args": "ab", "expected": 1}], "test 0: args is 'ab'; write a list of arguments"),
        ([{"function": "f", "args": {"a": 1}, "expected": 1}], "test 0: args is .*; write a list of arguments"),
        ("[" * 100_000, "is a string that is not JSON"),
        ({"ground_truth": None}, "is None; write a list"),
    ],
)
def test_malformed_rows_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        read_tests(given, "tests")


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        (SCRIPT, LINES, 1.0),
        (ADD, CALLS, 1.0),
        (METHOD, CALLS, 1.0),
        (ADD, ASSERTS, 1.0),
        (ADD.replace("a + b", "b + a"), ASSERTS[1:3], 1 / 2),
        (ADD, FLOATS, 2 / 3),
        ("print(0.1 + 0.2)\n", {"inputs": [""], "outputs": ["0.3"]}, 1.0),
    ],
    ids=["lines", "calls", "method", "asserts", "wrong", "floats", "printed float"],
)
def test_programs_are_run_against_them(code, tests, expected):
    assert share(code, tests) == expected


def test_a_program_that_crashes_passes_nothing():
    assert share("print(3)\nraise ValueError", {"inputs": [""], "outputs": ["3"]}) == 0.0
    assert share("syntax error(", {"inputs": [""], "outputs": [""]}) == 0.0


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
    assert share(code, ASSERTS[:2]) == 0.0
