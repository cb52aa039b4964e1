"""Reward functions that give no usable number, or leave the program; data that lacks a column."""

import math

import pytest

from pl_grouprl.rewards import Weighted, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.types import Prompt, Rollout, RolloutGroup


def make_group(*texts):
    return RolloutGroup([1], [Rollout([7], text=text) for text in texts], columns={"answer": "a"}, prompt="p")


def rewards_of(group):
    return [rollout.reward for rollout in group.rollouts]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1e300, 10**400])
def test_numbers_that_are_not_finite_count_as_failures(bad):
    def grade(completions, **columns):
        return [bad, bad, 1.0]

    with pytest.raises(RuntimeError, match=r"'grade' gave NaN, .* failed for 2 of 3 rollouts, .*max_failed_share=0.5"):
        apply_rewards([make_group("a", "b", "c")], grade)
    group = make_group("a", "b", "c")
    metrics = apply_rewards([group], grade, max_failed_share=0.7)
    assert rewards_of(group) == [None, None, 1.0]
    assert (metrics["rewards/grade/invalid"], metrics["rewards/grade/mean"]) == (2.0, 1.0)


def test_the_largest_float32_is_a_reward_and_its_double_is_not():
    largest = 3.4028234663852886e38
    group = make_group("a", "b")
    metrics = apply_rewards([group], lambda completions, **columns: [largest, -largest])
    assert rewards_of(group) == [largest, -largest]
    assert metrics["rewards/reward_1/std"] == pytest.approx(largest * math.sqrt(2))
    group = make_group("a", "b")
    apply_rewards([group], Weighted(lambda completions, **columns: [largest, 1.0], weight=2.0))
    assert rewards_of(group) == [None, 2.0]


def test_sys_exit_is_a_failure():
    def grade(data_source, solution_str, ground_truth):
        if solution_str == "bad":
            raise SystemExit(3)
        return 1.0

    group = make_group("good", "bad")
    metrics = apply_rewards([group], grade)
    assert rewards_of(group) == [1.0, None]
    assert metrics["rewards/grade/invalid"] == 1.0


def test_sys_exit_of_an_async_function_is_a_failure_and_ends_no_event_loop():
    async def grade(data_source, solution_str, ground_truth):
        if solution_str == "bad":
            raise SystemExit(3)
        return 1.0

    for _ in range(2):
        group = make_group("good", "bad")
        apply_rewards([group], grade)
        assert rewards_of(group) == [1.0, None]
    with pytest.raises(RuntimeError, match="'grade' raised SystemExit: 3"):
        apply_rewards([make_group("bad")], grade)


def test_an_interrupt_passes_through():
    def grade(completions, **columns):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        apply_rewards([make_group("a")], grade)


def test_weights_that_are_all_zero_are_refused():
    def grade(completions, **columns):
        return [1.0]

    with pytest.raises(ValueError, match=r"weight 0 for all of \['grade'\]"):
        prepare_rewards(Weighted(grade, 0.0))
    assert len(prepare_rewards([Weighted(grade, 0.0), Weighted(grade, 1.0, "other")])) == 2


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda completions, level: [1.0], r"train, prompt 1: .*requires \['level'\]"),
        (lambda solution_str, ground_truth: 1.0, "train, prompt 2: .*requires a ground_truth"),
    ],
    ids=["trl", "verl"],
)
def test_a_missing_column_is_named_with_its_prompt(function, message):
    columns = [{"answer": "a", "level": 1}, {"answer": "b"}, {"level": 2}]
    prompts = [Prompt([1], columns=own) for own in columns]
    with pytest.raises(ValueError, match=message):
        check_columns(prompts, function, "train")
    check_columns(prompts[:1], function, "train")
