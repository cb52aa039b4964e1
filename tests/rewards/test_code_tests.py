"""CodeTests: the share of tests that a program passes; programs that cheat pass none."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from helpers.cheating_programs import CHEATS

from pl_grouprl.rewards import (
    CodeTests,
    CosineLengthReward,
    FunctionFromFile,
    RewardConfigurationError,
    RewardWorkers,
    SandboxLimits,
    apply_rewards,
    check_columns,
    prepare_rewards,
)
from pl_grouprl.rewards.code_tests import extract_code, read_tests
from pl_grouprl.rewards.sandbox import Sandbox, SandboxUnavailableError
from pl_grouprl.rewards.sandbox.sandbox import _Run
from pl_grouprl.types import Prompt, Rollout, RolloutGroup

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
    reward = CodeTests(**{"limits": SandboxLimits(timeout=20.0), **options})
    group = RolloutGroup([1], [Rollout([7], text=block(code)) for code in codes], columns={"tests": tests}, prompt="p")
    pool = workers and RewardWorkers(prepare_rewards(reward), workers)
    try:
        apply_rewards([group], reward, workers=pool or None)
    finally:
        if pool:
            pool.close()
    return [rollout.reward for rollout in group.rollouts]


@pytest.mark.parametrize("tests", [[*STDIN, *CALLS], json.dumps([*STDIN, *CALLS])], ids=["list", "json"])
def test_the_share_of_passed_tests(tests):
    wrong = ADDS.replace("a + b", "a - b")
    assert rewards_of([ADDS, wrong, "syntax error("], tests) == [4 / 5, 2 / 5, 0.0]


def test_all_or_nothing():
    assert rewards_of([ADDS], [*STDIN, *CALLS], all_or_nothing=True) == [0.0]
    assert rewards_of([ADDS], STDIN, all_or_nothing=True) == [1.0]


def test_in_worker_processes():
    assert rewards_of([ADDS, "pass"], STDIN, workers=1) == [1.0, 0.0]


def test_a_worker_that_takes_too_long_leaves_no_program():
    reward = CodeTests(limits=SandboxLimits(timeout=1000.0))
    workers = RewardWorkers(prepare_rewards(reward), 1, timeout=1.5)
    before = programs()
    try:
        group = RolloutGroup([1], [Rollout([7], text=block("while True: pass"))], columns={"tests": STDIN})
        metrics = apply_rewards([group], reward, workers=workers, max_failed_share=1.0)
    finally:
        workers.close()
    assert metrics["rewards/CodeTests/invalid"] == 1.0
    deadline = time.monotonic() + 30
    while programs() - before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def programs():
    """Processes that run a program of the sandbox."""
    found = set()
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"/program.py" in file.read_bytes():
                found.add(int(file.parent.name))
        except OSError:
            continue
    return found


def test_rows_without_tests_and_completions_without_a_block():
    reward = CodeTests()
    texts = ["no block", "```python\nprint(3)", block("print(3)"), block("print(3)")]
    completions = [*texts[:2], [{"role": "assistant", "content": texts[2]}], texts[3]]
    assert reward(completions, tests=[STDIN[:1]] * 3 + [None]) == [0.0, 0.0, 1.0, None]


@pytest.mark.parametrize("name", CHEATS)
def test_programs_that_cheat_pass_nothing(name, record_property):
    limits = SandboxLimits(timeout=0.5 if name in ("loops", "floods") else 2.0, memory_limit_mb=128)
    (reward,) = rewards_of([CHEATS[name]], [STDIN[0], CALLS[0]], limits=limits)
    assert reward == 0
    record_property("figure", f"reward {reward} of 2 tests")


def test_the_expected_answer_never_enters_the_sandbox(monkeypatch):
    sent = []
    monkeypatch.setattr(_Run, "send", lambda self, request: sent.append(request) or self._process.kill())
    secret = "expected-4711"
    for test in read_tests([{"input": "1", "output": secret}, {"function": "f", "args": [1], "expected": secret}], "t"):
        with pytest.raises(RuntimeError, match="launcher ended without a report"):
            test.passes(Sandbox(), "print(1)")
    assert len(sent) == 2
    assert secret not in repr(sent)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": "x"}, r"train, prompt 1: CodeTests needs the column 'tests', and the row has \['answer'\]"),
        ({"tests": []}, r"train, prompt 1: column 'tests' is \[\]; write a list of at least one"),
        ({"tests": "not json"}, "prompt 1: column 'tests' is a string that is not JSON"),
        ({"tests": [*STDIN, {"input": "1"}]}, r"prompt 1: column 'tests', test 2 is \{'input': '1'\}; write"),
        (
            {"tests": [{"input": 1, "output": 2}]},
            "prompt 1: column 'tests', test 0 is",
        ),
        (
            {"tests": [{"function": "f", "args": [{1}], "expected": 1}]},
            "prompt 1: column 'tests', test 0: .*is not JSON",
        ),
        ({"tests": ["1"]}, "prompt 1: column 'tests', test 0 is '1'"),
        ({"tests": [1]}, "prompt 1: column 'tests', test 0 is 1; write"),
    ],
    ids=["missing", "empty", "no json", "half", "numbers", "set", "string", "number"],
)
def test_a_malformed_row_is_named_at_setup(columns, message):
    prompts = [Prompt([1], columns={"tests": STDIN}), Prompt([1], columns=columns)]
    with pytest.raises(ValueError, match=message):
        check_columns(prompts, CodeTests(), "train")


@pytest.mark.parametrize("wrap", ["cosine", "file"])
def test_setup_looks_through_what_wraps_it(wrap, tmp_path):
    if wrap == "cosine":
        reward = CosineLengthReward(CodeTests(), max_len=10)
    else:
        (tmp_path / "rewards.py").write_text("from pl_grouprl.rewards import CodeTests\ngrade = CodeTests()\n")
        reward = FunctionFromFile(str(tmp_path / "rewards.py"), "grade")
    with pytest.raises(ValueError, match=r"train, prompt 0: column 'tests' is \[\]"):
        check_columns([Prompt([1], columns={"tests": []})], reward, "train")


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


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("a\n```python\nx\n```\nb", "x\n"),
        ("```\na\n```\n```py\nb\n```", "b\n"),
        ("```python\nopen", None),
        ("inline ```x``` only", None),
        ("", None),
        ("```python\n```", ""),
    ],
)
def test_the_last_closed_block_is_the_program(text, code):
    assert extract_code(text) == code
