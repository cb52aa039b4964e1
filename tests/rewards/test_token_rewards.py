"""Reward functions that reward tokens: what they may return, and what stands in the rollouts then."""

import math

import numpy as np
import pytest
import torch
from helpers import worker_rewards
from helpers.rewards import group_of, returning

from pl_grouprl.rewards import PendingRewards, Weighted, apply_rewards
from pl_grouprl.types import Rollout

NAN, INF = math.nan, math.inf


def apply(lengths, rewards):
    """Metrics and rollouts of a group of such completions."""
    group = group_of(*("x" * length for length in lengths))
    return apply_rewards([group], rewards), group.rollouts


def test_a_list_is_kept_and_its_sum_is_the_reward():
    metrics, (first, second, third) = apply([3, 2, 3], returning([1.0, None, 0.5], [NAN, -1], [True, 0.0, None]))
    assert first.token_rewards == [1.0, None, 0.5]
    assert second.token_rewards == [None, -1.0]
    assert third.token_rewards == [1.0, 0.0, None]
    assert (first.reward, first.rewards, second.reward) == (1.5, {"given": 1.5}, -1.0)
    assert metrics["rewards/given/mean"] == 0.5
    assert metrics["rewards/given/none"] == metrics["rewards/given/invalid"] == 0
    assert first.step_rewards == {0: 1.0, 2: 0.5}
    assert first.outcome_reward == second.outcome_reward == 0.0


def test_verl_groups_and_async():
    def verl(data_source, solution_str, ground_truth):
        return {"score": [float(i) for i in range(len(solution_str))], "letters": len(solution_str)}

    def of_groups(groups):
        return [[[1.0] * len(rollout.token_ids) for rollout in group.rollouts] for group in groups]

    async def waits(completions, completion_ids):
        return [[0.5] * len(ids) for ids in completion_ids]

    metrics, rollouts = apply([3, 2], [verl, of_groups, waits])
    assert [rollout.token_rewards for rollout in rollouts] == [[1.5, 2.5, 3.5], [1.5, 2.5]]
    assert [rollout.rewards for rollout in rollouts] == [
        {"verl": 3.0, "of_groups": 3.0, "waits": 1.5},
        {"verl": 1.0, "of_groups": 2.0, "waits": 1.0},
    ]
    assert metrics["rewards/verl/letters"] == 2.5


@pytest.mark.parametrize(
    "value", [np.array([1.0, NAN]), torch.tensor([1.0, NAN]), (1, None), [torch.tensor(1.0), np.float32(NAN)]]
)
def test_arrays_and_tensors_are_lists(value):
    _, (rollout,) = apply([2], returning(value))
    assert (rollout.token_rewards, rollout.reward) == ([1.0, None], 1.0)


def test_a_matrix_for_all_completions():
    _, rollouts = apply([2, 2], lambda completions: torch.tensor([[1.0, 2.0], [3.0, NAN]]))
    assert [rollout.token_rewards for rollout in rollouts] == [[1.0, 2.0], [3.0, None]]


def test_an_array_of_one_element_is_a_number():
    _, rollouts = apply([3, 1], returning(torch.tensor([2.0]), np.array([2.0])))
    assert [(rollout.reward, rollout.token_rewards) for rollout in rollouts] == [(2.0, None), (2.0, None)]
    _, (rollout,) = apply([1], returning(np.array([NAN])))  # unless it says that the only token has none
    assert (rollout.reward, rollout.token_rewards) == (0.0, [None])


@pytest.mark.parametrize("row", [[1.0, INF], [1e39, 0.0], [10**400, 0.0], [1e39, -1e39]])  # the last ones cancel
def test_infinity_leaves_the_rollout_without_a_reward(row):
    metrics, rollouts = apply([2, 2], returning(row, [1.0, 1.0]))
    assert [(rollout.reward, rollout.token_rewards) for rollout in rollouts] == [(None, None), (2.0, [1.0, 1.0])]
    assert rollouts[0].rewards == {"given": None}
    assert metrics["rewards/given/invalid"] == 1


def test_infinities_of_weights_that_cancel_are_invalid_too():
    _, (rollout,) = apply([2], Weighted(returning([1e30, -1e30]), weight=1e10))
    assert (rollout.reward, rollout.rewards["given"]) == (None, 0.0)


def test_several_functions_are_weighted():
    functions = [
        Weighted(returning([1.0, None, 2.0], [None, None, 1.0]), 2.0, "steps"),
        Weighted(returning([None, None, 1.0], None), -1.0, "more"),
        Weighted(returning(0.25, 1.0), 4.0, "outcome"),
        Weighted(returning([5.0, 5.0, 5.0], [5.0, 5.0, 5.0]), 0.0, "logged"),
    ]
    metrics, (first, second) = apply([3, 3], functions)
    assert first.token_rewards == [2.0, None, 3.0]
    assert second.token_rewards == [None, None, 2.0]
    assert (first.reward, second.reward) == (6.0, 6.0)
    assert (first.outcome_reward, second.outcome_reward) == (1.0, 4.0)
    assert metrics["rewards/logged/mean"] == 15.0


def test_a_rollout_for_which_another_function_failed_has_no_token_rewards():
    functions = [Weighted(returning([1.0], [1.0]), 1.0, "steps"), Weighted(returning(INF, 1.0), 1.0, "outcome")]
    _, (first, second) = apply([1, 1], functions)
    assert (first.reward, first.token_rewards, first.step_rewards) == (None, None, {})
    assert (second.reward, second.token_rewards) == (2.0, [1.0])


def test_a_list_without_a_number_is_a_return_of_zero_and_none_does_not_apply():
    metrics, rollouts = apply([2, 2, 0], returning([None, NAN], None, []))
    assert [rollout.reward for rollout in rollouts] == [0.0, None, 0.0]
    assert [rollout.token_rewards for rollout in rollouts] == [[None, None], None, []]
    assert metrics["rewards/given/none"] == 1


def test_numbers_next_to_lists_of_the_same_group_end_at_the_last_token():
    groups = [group_of("xx", "xxx", "x", ""), group_of("xx", "xx")]
    apply_rewards(groups, returning([1.0, 1.0], 0.5, None, 0.25, 3.0, 4.0))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert [rollout.token_rewards for rollout in rollouts] == [[1.0, 1.0], [None, None, 0.5], None, None, None, None]
    assert [rollout.reward for rollout in rollouts] == [2.0, 0.5, None, 0.25, 3.0, 4.0]
    assert rollouts[1].outcome_reward == 0.0
    assert rollouts[3].outcome_reward == 0.25  # there is no token to hold it


def test_the_outcome_is_exact():
    _, rollouts = apply([7, 3], Weighted(returning([0.1] * 7, [0.3, 0.7, 1e-9]), weight=0.37))
    assert [rollout.outcome_reward for rollout in rollouts] == [0.0, 0.0]


def test_wrong_lengths_of_rollouts_are_refused():
    with pytest.raises(ValueError, match=r"Rollout.token_rewards has 1 entries for 2 token_ids"):
        Rollout([1, 2], token_rewards=[0.5])


def test_workers_give_the_same(make_workers):
    here, there = group_of("xxx", "xx"), group_of("xxx", "xx")
    functions = [worker_rewards.steps, worker_rewards.graded_steps]
    apply_rewards([here], functions)
    workers = make_workers([*functions, worker_rewards.wrong_steps])
    PendingRewards([there], functions, workers=workers).wait()
    assert there == here
    assert here.rollouts[0].token_rewards == [None, 1.0, 2.0 + 3.0]
    with pytest.raises(ValueError, match="'wrong_steps' returned 4 rewards for a completion of 3 tokens"):
        PendingRewards([here], worker_rewards.wrong_steps, workers=workers).wait()
