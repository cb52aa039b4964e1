"""MathVerify: references of both kinds, and what takes forever; test_grader_tables.py has what is equal."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers import worker_rewards as functions
from helpers.rewards import group_of, rewards_of

from pl_grouprl.rewards import MathVerify, apply_rewards, check_columns
from pl_grouprl.rewards import answers as math_verify_module
from pl_grouprl.types import Prompt
from pl_grouprl.utilities.describe import describe

pytest.importorskip("math_verify")

ENDLESS = r"\boxed{9^{9^{9}}}"


@pytest.mark.parametrize(
    ("text", "reference", "options", "reward"),
    [
        (r"\boxed{2x+2}", "2(x+1)", {}, 1.0), (r"the answer is $x+1$", "x+1", {}, 1.0),
        (r"\boxed{x+1}", "x+2", {}, 0.0), ("x+1", "x+1", {}, 0.0), (r"\boxed{4}", 4, {}, 1.0),
        (r"\boxed{4}", "", {}, None), ("it is 1/2", "0.5", {}, 0.0), ("it is 1/2", "0.5", {"extraction": "any"}, 1.0),
    ],
)  # fmt: skip
def test_answers_are_read_as_mathematics_on_any_thread(text, reference, options, reward):
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(MathVerify(**options), "", text, reference).result() == reward


@pytest.mark.parametrize(
    ("columns", "column", "reference"),
    [
        ({"reward_model": {"ground_truth": "4"}, "answer": "5"}, None, "answer"),
        ({"answer": "4"}, None, "answer"),
        ({"solution": "2 + 2\n#### 4", "answer": "5"}, "solution", "solution"),
    ],
    ids=["verl", "answer", "column"],
)
def test_where_the_reference_is(columns, column, reference):
    reward, group = MathVerify(column=column, reference=reference), group_of(r"\boxed{4}", "", **columns)
    check_columns([Prompt([1], columns=columns)], reward, "train")
    apply_rewards([group], reward)
    assert rewards_of(group) == [1.0, 0.0]


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
    metrics = apply_rewards([group_of(r"\boxed{4}", answer="none here")], MathVerify(reference="solution"))
    assert metrics["rewards/MathVerify/none"] == 1.0


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1} or \boxed{ 2 }", "2"),
        (r"\boxed{\boxed{3}}", r"\boxed{3}"), (r"\boxed{4", None), ("5", None), (r"\}\boxed{6}", "6"),
        (r"\boxed{" * 50_000, None),  # in one pass over the text
    ],
)  # fmt: skip
def test_the_answers_that_votes_count(text, answer):
    assert MathVerify().extract_answer(text) == answer
    assert MathVerify(extraction="any").extract_answer("so 4,200.") == "4200"


def test_what_takes_forever_is_killed_and_counted(make_workers):
    reward, group = MathVerify(), group_of(r"\boxed{7}", ENDLESS, r"\boxed{8}", answer="7")
    workers = make_workers(reward, timeout=6.0)
    with ThreadPoolExecutor(1) as thread:
        metrics = thread.submit(apply_rewards, [group], reward, workers=workers).result()
    assert rewards_of(group) == [1.0, None, 0.0]
    assert metrics["rewards/MathVerify/invalid"] == 1.0


def test_graders_that_set_their_own_alarms_run_unchanged_in_workers(make_workers):
    """As TRL's `accuracy_reward` and verl's `compute_score` call the library."""
    rewards = [functions.library_with_alarms, functions.metric_with_alarms]
    workers = make_workers(rewards, timeout=60.0)
    for used, seconds, graded in (
        (rewards, 30, {r"\boxed{0.5}": 1.0, r"\boxed{\frac{1}{3}}": 0.0}),
        (rewards[:1], 1, {ENDLESS: 0.0}),
    ):
        columns = {"solution": "$0.5$", "reward_model": {"ground_truth": "0.5"}, "seconds": seconds}
        group = group_of(*graded, prompt=[{"role": "user", "content": "?"}], **columns)
        apply_rewards([group], used, workers=workers)
        assert [set(rollout.rewards.values()) for rollout in group.rollouts] == [{value} for value in graded.values()]


def test_without_the_library_it_names_the_extra(monkeypatch):
    monkeypatch.setattr(math_verify_module, "MATH_VERIFY_AVAILABLE", False)
    with pytest.raises(ModuleNotFoundError, match=r"MathVerify.*\[math\]"):
        MathVerify()


def test_its_options_are_compared_when_a_run_is_resumed():
    described = describe("reward", MathVerify(reference="solution", column="text"))
    assert {described["reward.reference"], described["reward.column"]} == {"solution", "text"}
