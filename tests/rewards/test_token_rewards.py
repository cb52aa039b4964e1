"""Reward functions that reward tokens: what they may return, and what stands in the rollouts then."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from helpers import worker_rewards

from pl_grouprl.rewards import RewardWorkers, Weighted, apply_rewards, prepare_rewards, start_rewards
from pl_grouprl.types import Rollout, RolloutGroup

NAN, INF = math.nan, math.inf


def make_groups(*lengths_per_group):
    return [
        RolloutGroup([1], [Rollout([7] * n, text="x" * n) for n in lengths], columns={"answer": "x"})
        for lengths in lengths_per_group
    ]


def rollouts_of(groups):
    return [rollout for group in groups for rollout in group.rollouts]


def returning(*values):
    """A function of TRL's signature that returns these values."""

    def given(completions, **columns):
        return list(values)

    return given


def apply(groups, rewards, **options):
    metrics = apply_rewards(groups, rewards, **options)
    return metrics, rollouts_of(groups)


def test_a_list_is_kept_and_its_sum_is_the_reward():
    metrics, (first, second) = apply(make_groups([3, 2]), returning([1.0, None, 0.5], [NAN, -1]))
    assert first.token_rewards == [1.0, None, 0.5]
    assert second.token_rewards == [None, -1.0]
    assert (first.reward, first.rewards, second.reward) == (1.5, {"given": 1.5}, -1.0)
    assert metrics["rewards/given/mean"] == 0.25
    assert metrics["rewards/given/none"] == metrics["rewards/given/invalid"] == 0
    assert first.step_rewards == {0: 1.0, 2: 0.5}
    assert first.outcome_reward == second.outcome_reward == 0.0


def test_numbers_leave_no_trace():
    _, (rollout,) = apply(make_groups([3]), returning(1.0))
    assert (rollout.reward, rollout.token_rewards, rollout.outcome_reward) == (1.0, None, 1.0)


def test_verl_groups_and_async():
    def verl(data_source, solution_str, ground_truth):
        return {"score": [float(i) for i in range(len(solution_str))], "letters": len(solution_str)}

    def of_groups(groups):
        return [[[1.0] * len(rollout.token_ids) for rollout in group.rollouts] for group in groups]

    async def waits(completions, completion_ids):
        return [[0.5] * len(ids) for ids in completion_ids]

    metrics, rollouts = apply(make_groups([3], [2]), [verl, of_groups, waits])
    assert [rollout.token_rewards for rollout in rollouts] == [[1.5, 2.5, 3.5], [1.5, 2.5]]
    assert [rollout.rewards for rollout in rollouts] == [
        {"verl": 3.0, "of_groups": 3.0, "waits": 1.5},
        {"verl": 1.0, "of_groups": 2.0, "waits": 1.0},
    ]
    assert metrics["rewards/verl/letters"] == 2.5


@pytest.mark.parametrize(
    "value",
    [np.array([1.0, NAN]), torch.tensor([1.0, NAN]), (1, None), [torch.tensor(1.0), np.float32(NAN)], [True, None]],
)
def test_arrays_and_tensors_are_lists(value):
    _, (rollout,) = apply(make_groups([2]), returning(value))
    assert (rollout.token_rewards, rollout.reward) == ([1.0, None], 1.0)


def test_a_matrix_for_all_completions():
    _, rollouts = apply(make_groups([2, 2]), lambda completions: torch.tensor([[1.0, 2.0], [3.0, NAN]]))
    assert [rollout.token_rewards for rollout in rollouts] == [[1.0, 2.0], [3.0, None]]


def test_an_array_of_one_element_is_a_number():
    _, rollouts = apply(make_groups([3], [1]), returning(torch.tensor([2.0]), np.array([2.0])))
    assert [(rollout.reward, rollout.token_rewards) for rollout in rollouts] == [(2.0, None), (2.0, None)]
    _, (rollout,) = apply(make_groups([1]), returning(np.array([NAN])))  # unless it says that the only token has none
    assert (rollout.reward, rollout.token_rewards) == (0.0, [None])


@pytest.mark.parametrize("value", [[1.0], [1.0] * 4, np.zeros(2), []])
def test_another_length_is_refused_with_both_numbers(value):
    with pytest.raises(ValueError, match=rf"'given' returned {len(value)} rewards for a completion of 3 tokens"):
        apply_rewards(make_groups([3]), returning(value))


@pytest.mark.parametrize("length", [2, 4])
def test_a_tuple_of_verls_signature_is_refused_whatever_the_length(length):
    def compute_score(data_source, solution_str, ground_truth):
        return 1.0, True

    with pytest.raises(ValueError, match=r"'compute_score' returned the tuple \(1.0, True\)"):
        apply_rewards(make_groups([length]), compute_score)


@pytest.mark.parametrize("entry", ["1.0", [1.0], {}])
def test_another_type_is_refused(entry):
    with pytest.raises(ValueError, match=rf"of type {type(entry).__name__}"):
        apply_rewards(make_groups([2]), returning([1.0, entry]))


@pytest.mark.parametrize("entry", [INF, -INF, 1e39, 10**400])
def test_infinity_leaves_the_rollout_without_a_reward(entry):
    metrics, rollouts = apply(make_groups([2, 2]), returning([1.0, entry], [1.0, 1.0]))
    assert [(rollout.reward, rollout.token_rewards) for rollout in rollouts] == [(None, None), (2.0, [1.0, 1.0])]
    assert rollouts[0].rewards == {"given": None}
    assert metrics["rewards/given/invalid"] == 1


def test_infinities_that_cancel_are_invalid_too():
    _, rollouts = apply(make_groups([2, 2]), returning([1e39, -1e39], [0.0, 0.0]))
    assert rollouts[0].reward is None
    _, rollouts = apply(make_groups([2]), Weighted(returning([1e30, -1e30]), weight=1e10))
    assert (rollouts[0].reward, rollouts[0].rewards["given"]) == (None, 0.0)


def test_several_functions_are_weighted():
    functions = [
        Weighted(returning([1.0, None, 2.0], [None, None, 1.0]), 2.0, "steps"),
        Weighted(returning([None, None, 1.0], None), -1.0, "more"),
        Weighted(returning(0.25, 1.0), 4.0, "outcome"),
        Weighted(returning([5.0, 5.0, 5.0], [5.0, 5.0, 5.0]), 0.0, "logged"),
    ]
    metrics, (first, second) = apply(make_groups([3, 3]), functions)
    assert first.token_rewards == [2.0, None, 3.0]
    assert second.token_rewards == [None, None, 2.0]
    assert (first.reward, second.reward) == (6.0, 6.0)
    assert (first.outcome_reward, second.outcome_reward) == (1.0, 4.0)
    assert metrics["rewards/logged/mean"] == 15.0


def test_a_rollout_for_which_another_function_failed_has_no_token_rewards():
    functions = [Weighted(returning([1.0], [1.0]), 1.0, "steps"), Weighted(returning(INF, 1.0), 1.0, "outcome")]
    _, (first, second) = apply(make_groups([1, 1]), functions)
    assert (first.reward, first.token_rewards, first.step_rewards) == (None, None, {})
    assert (second.reward, second.token_rewards) == (2.0, [1.0])


def test_a_list_without_a_number_is_a_return_of_zero_and_none_does_not_apply():
    metrics, rollouts = apply(make_groups([2, 2, 0]), returning([None, NAN], None, []))
    assert [(rollout.reward, rollout.token_rewards) for rollout in rollouts] == [
        (0.0, [None, None]),
        (None, None),
        (0.0, []),
    ]
    assert metrics["rewards/given/none"] == 1


def test_numbers_next_to_lists_of_the_same_group_end_at_the_last_token():
    function = returning([1.0, 1.0], 0.5, None, 0.25, 3.0, 4.0)
    _, rollouts = apply(make_groups([2, 3, 1, 0], [2, 2]), function)
    assert [rollout.token_rewards for rollout in rollouts] == [[1.0, 1.0], [None, None, 0.5], None, None, None, None]
    assert [rollout.reward for rollout in rollouts] == [2.0, 0.5, None, 0.25, 3.0, 4.0]
    assert rollouts[1].outcome_reward == 0.0
    assert rollouts[3].outcome_reward == 0.25  # there is no token to hold it


def test_the_outcome_is_exact():
    tokens = [[0.1] * 7, [0.3, 0.7, 1e-9]]
    _, rollouts = apply(make_groups([7, 3]), Weighted(returning(*tokens), weight=0.37))
    assert [rollout.outcome_reward for rollout in rollouts] == [0.0, 0.0]


def test_wrong_lengths_of_rollouts_are_refused():
    with pytest.raises(ValueError, match=r"Rollout.token_rewards has 1 entries for 2 token_ids; pass one per token"):
        Rollout([1, 2], token_rewards=[0.5])


def test_workers_give_the_same():
    here, there = make_groups([3, 2], [1]), make_groups([3, 2], [1])
    functions = [worker_rewards.steps, worker_rewards.graded_steps]
    apply_rewards(here, functions)
    workers = RewardWorkers(prepare_rewards(functions), 1)
    try:
        start_rewards(there, functions, workers=workers).wait()
    finally:
        workers.close()
    assert rollouts_of(there) == rollouts_of(here)
    assert here[0].rollouts[0].token_rewards == [None, 1.0, 2.0 + 3.0]


def test_workers_refuse_another_length():
    workers = RewardWorkers(prepare_rewards(worker_rewards.wrong_steps), 1)
    try:
        with pytest.raises(ValueError, match="'wrong_steps' returned 4 rewards for a completion of 3 tokens"):
            start_rewards(make_groups([3]), worker_rewards.wrong_steps, workers=workers).wait()
    finally:
        workers.close()
