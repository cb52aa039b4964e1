"""Rewards gathered over ranks, without a Trainer."""

import math

import pytest
import torch

from pl_grouprl.training import group_rewards
from pl_grouprl.training.group_rewards import gather_rewards, has_token_rewards, less_penalties
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run import PlainRun
from pl_grouprl.types import Rollout, RolloutGroup

NAN = math.nan


def first_rank():
    rollouts = [Rollout([1, 2], reward=2.0, rewards={"a": 1.0, "b": None}), Rollout([3], reward=None)]
    return [RolloutGroup([1], rollouts)]


def second_rank():
    steps = [Rollout([4, 5, 6], reward=3.5, token_rewards=[1.0, None, 2.0], rewards={"a": 3.0, "b": 0.5})]
    return [RolloutGroup([2], steps), RolloutGroup([3], [Rollout([], reward=0.0), Rollout([7], reward=1.0)])]


@pytest.fixture
def gather(monkeypatch):
    """What each of the two ranks gathers."""

    def both(**options):
        sent = []
        monkeypatch.setattr(group_rewards, "gather_plain", lambda value, device: sent.append(value) or [value])
        run = PlainRun(torch.nn.Linear(1, 1))
        for groups in (first_rank(), second_rank()):
            gather_rewards(groups, run, **options)
        monkeypatch.setattr(group_rewards, "gather_plain", lambda value, device: sent)
        runs = [PlainRun(torch.nn.Linear(1, 1), global_rank=rank) for rank in (0, 1)]
        return [
            gather_rewards(own, run, **options) for own, run in zip((first_rank(), second_rank()), runs, strict=True)
        ]

    return both


def test_each_rank_has_the_rewards_of_all_and_knows_its_own(gather):
    for rank, rewards in enumerate(gather()):
        torch.testing.assert_close(rewards.outcomes, torch.tensor([2.0, NAN, 0.5, 0.0, 1.0]), equal_nan=True)
        assert rewards.group_ids_B.tolist() == [0, 0, 1, 2, 2]
        assert rewards.lengths_B.tolist() == [2, 1, 3, 0, 1]
        expected = torch.tensor([NAN, NAN, NAN, 1.0, NAN, 2.0, NAN])
        torch.testing.assert_close(rewards.step_rewards_N, expected, equal_nan=True)
        assert rewards.greedy is None
        assert torch.arange(5)[rewards.own_B].tolist() == [[0, 1], [2, 3, 4]][rank]
        assert torch.arange(7)[rewards.own_N].tolist() == [[0, 1, 2], [3, 4, 5, 6]][rank]


def test_a_column_per_function(gather):
    rewards = gather(functions=["a", "b"])[0]
    expected = [[1.0, NAN], [NAN, NAN], [3.0, 0.5], [NAN, NAN], [NAN, NAN]]
    torch.testing.assert_close(rewards.outcomes, torch.tensor(expected), equal_nan=True)


def test_greedy_rollouts_are_repeated_and_no_tokens_are_none():
    greedy = [RolloutGroup([1], [Rollout([9], reward=0.25)])]
    rewards = gather_rewards(first_rank(), PlainRun(torch.nn.Linear(1, 1)), greedy=greedy)
    assert rewards.greedy.tolist() == [0.25, 0.25]
    assert rewards.step_rewards_N is None
    assert [has_token_rewards(groups) for groups in (first_rank(), second_rank())] == [False, True]


def test_penalties_are_taken_off_once():
    buffer = RolloutBuffer(second_rank())
    buffer.put("kl_penalty", torch.tensor([0.25, 0.5, 0.0, 0.125]))
    (first,), (second, third) = (group.rollouts for group in less_penalties(buffer))
    assert [first.reward, first.outcome_reward, second.reward, third.reward] == [2.75, -0.25, 0.0, 0.875]
    assert buffer.groups[0].rollouts[0].reward == 3.5
