"""MathVerify: equal answers, references of both kinds, and what takes forever."""

from __future__ import annotations

import threading

import pytest
from helpers import worker_rewards as functions

from pl_grouprl.rewards import (
    CosineLengthReward,
    MathVerify,
    RewardWorkers,
    apply_rewards,
    check_columns,
    check_time_limits,
    prepare_rewards,
)
from pl_grouprl.rewards import answers as math_verify_module
from pl_grouprl.types import Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.describe import describe

pytest.importorskip("math_verify")

ENDLESS = r"\boxed{9^{9^{9}}}"


def grade(text, reference, **options):
    return MathVerify(**options)("", text, reference)


@pytest.mark.parametrize(
    ("text", "reference", "reward"),
    [
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{2x+2}", "2(x+1)", 1.0),
        (r"the answer is $x+1$", "x+1", 1.0),
        (r"\boxed{(1,2)}", "(1,2)", 1.0),
        (r"\boxed{x+1}", "x+2", 0.0),
        ("x+1", "x+1", 0.0),
        (r"\boxed{4}", 4, 1.0),
        (r"\boxed{4}", "", None),
    ],
)
def test_a_bare_answer_is_read_as_mathematics(text, reference, reward):
    assert grade(text, reference) == reward


def test_any_extraction_accepts_what_is_not_latex():
    assert [grade("it is 1/2", "0.5", extraction=extraction) for extraction in ("latex", "any")] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("columns", "column", "solution"),
    [
        ({"reward_model": {"ground_truth": "4"}, "answer": "5"}, None, False),
        ({"answer": "4"}, None, False),
        ({"solution": "2 + 2\n#### 4", "answer": "5"}, "solution", True),
    ],
    ids=["verl", "answer", "column"],
)
def test_where_the_reference_is(columns, column, solution):
    reward = MathVerify(column=column, reference="solution" if solution else "answer")
    group = RolloutGroup([1], [Rollout([7], text=r"\boxed{4}"), Rollout([7], text="")], columns=columns, prompt="p")
    check_columns([Prompt([1], columns=columns)], reward, "train")
    apply_rewards([group], reward)
    assert [rollout.reward for rollout in group.rollouts] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("columns", "column", "message"),
    [
        ({"answer": "2 + 2\n#### 4"}, None, "prompt 0: MathVerify: the reference"),
        ({"answer": "4"}, "solution", r"requires a ground_truth, .*\['answer'\].* solution"),
        ({"question": "4"}, None, "requires a ground_truth"),
    ],
)
def test_rows_that_cannot_be_graded_are_refused_at_setup(columns, column, message):
    with pytest.raises(ValueError, match=message):
        check_columns([Prompt([1], columns=columns)], MathVerify(column=column), "train")


def test_a_reference_that_cannot_be_parsed_is_counted():
    group = RolloutGroup([1], [Rollout([7], text=r"\boxed{4}")], columns={"answer": "none here"}, prompt="p")
    metrics = apply_rewards([group], MathVerify(reference="solution"))
    assert group.rollouts[0].reward is None
    assert metrics["rewards/MathVerify/none"] == 1.0


def test_the_answers_that_votes_count():
    texts = [
        r"\boxed{\frac{1}{2}}",
        r"\boxed{1} or \boxed{ 2 }",
        r"\boxed{\boxed{3}}",
        r"\boxed{4",
        "5",
        r"\}\boxed{6}",
    ]
    assert [MathVerify().extract_answer(text) for text in texts] == [r"\frac{1}{2}", "2", r"\boxed{3}", None, None, "6"]
    assert MathVerify(extraction="any").extract_answer("so 4,200.") == "4200"
    assert MathVerify().extract_answer(r"\boxed{" * 50_000) is None  # in one pass over the text


def test_it_grades_in_a_thread():
    found = []
    thread = threading.Thread(target=lambda: found.append(grade(r"\boxed{0.5}", "1/2")))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_what_takes_forever_is_killed_and_counted():
    reward = MathVerify()
    workers = RewardWorkers(prepare_rewards(reward), 1, timeout=8.0)
    texts = [r"\boxed{7}", ENDLESS, r"\boxed{8}"]
    group = RolloutGroup([1], [Rollout([7], text=text) for text in texts], columns={"answer": "7"}, prompt="p")
    metrics = {}
    try:  # asked from a thread
        thread = threading.Thread(target=lambda: metrics.update(apply_rewards([group], reward, workers=workers)))
        thread.start()
        thread.join()
    finally:
        workers.close()
    assert [rollout.reward for rollout in group.rollouts] == [1.0, None, 0.0]
    assert metrics["rewards/MathVerify/invalid"] == 1.0


@pytest.mark.parametrize("reward", [MathVerify(), CosineLengthReward(MathVerify(), max_len=9)], ids=["alone", "in one"])
@pytest.mark.parametrize(("workers", "timeout"), [(0, None), (1, None)])
def test_a_run_without_a_time_limit_is_refused(reward, workers, timeout):
    with pytest.raises(ValueError, match=rf"may take forever .* reward_calls.workers is {workers} with timeout None"):
        check_time_limits(prepare_rewards(reward), workers, timeout)
    check_time_limits(prepare_rewards(reward), 1, 5.0)


def test_without_the_library_it_names_the_extra(monkeypatch):
    monkeypatch.setattr(math_verify_module, "MATH_VERIFY_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"MathVerify needs .*pl-grouprl\[math\]"):
        MathVerify()


def test_graders_that_set_their_own_alarms_run_unchanged_in_workers():
    """As TRL's `accuracy_reward` and verl's `compute_score` call the library."""
    rewards = [functions.library_with_alarms, functions.metric_with_alarms]
    columns = {"solution": "$0.5$", "reward_model": {"ground_truth": "0.5"}}
    workers = RewardWorkers(prepare_rewards(rewards), 1, timeout=60.0)
    try:
        for used, seconds, graded in (
            (rewards, 30, {r"\boxed{0.5}": 1.0, r"\boxed{\frac{1}{3}}": 0.0}),
            (rewards[:1], 1, {ENDLESS: 0.0}),
        ):
            rollouts = [Rollout([7], text=text) for text in graded]
            prompt = [{"role": "user", "content": "?"}]
            group = RolloutGroup([1], rollouts, columns={**columns, "seconds": seconds}, prompt=prompt)
            apply_rewards([group], used, workers=workers)
            assert [set(rollout.rewards.values()) for rollout in rollouts] == [{value} for value in graded.values()]
    finally:
        workers.close()


def test_its_options_are_compared_when_a_run_is_resumed():
    described = describe("reward", MathVerify(reference="solution", column="text"))
    assert {described["reward.reference"], described["reward.column"]} == {"solution", "text"}
