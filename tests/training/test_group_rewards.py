"""Rewards gathered over ranks, without a Trainer."""

import math

import pytest
import torch
from helpers.episodes import make_episode, make_group

from pl_grouprl.functional.advantages.outcomes import opo_advantages
from pl_grouprl.functional.advantages.temporal import generalized_advantages, reinforce_plus_plus_advantages, td_errors
from pl_grouprl.functional.masked import to_rows
from pl_grouprl.training import rewarder as group_rewards
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.rewarder import gather_rewards, has_token_rewards, rewards_per_token, subtract_kl_penalties
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
        assert rewards.group_ids_E.tolist() == [0, 0, 1, 2, 2]
        assert rewards.lengths_E.tolist() == [2, 1, 3, 0, 1]
        expected = torch.tensor([NAN, NAN, NAN, 1.0, NAN, 2.0, NAN])
        torch.testing.assert_close(rewards.step_rewards_N, expected, equal_nan=True)
        assert rewards.greedy is None
        assert torch.arange(5)[rewards.own_E].tolist() == [[0, 1], [2, 3, 4]][rank]
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


def test_penalties_are_subtracted_once():
    buffer = RolloutBuffer(second_rank())
    buffer.put("kl_penalty", torch.tensor([0.25, 0.5, 0.0, 0.125]))
    (first,), (second, third) = (group.rollouts for group in subtract_kl_penalties(buffer))
    assert [first.reward, first.outcome_reward, second.reward, third.reward] == [2.75, -0.25, 0.0, 0.875]
    assert buffer.groups[0].rollouts[0].reward == 3.5


def test_estimators_get_the_number_of_tokens_that_the_model_wrote():
    groups = [make_group(make_episode(reward=1.0), Rollout([1, 2], reward=0.0))]
    rewards = gather_rewards(groups, PlainRun(torch.nn.Linear(1, 1)))
    assert (rewards.lengths_E.tolist(), rewards.sampled_E.tolist()) == ([6, 2], [4, 2])
    # The baseline of OPO is (4 * 1 + 2 * 0) / 6.
    advantages = opo_advantages(rewards.outcomes, rewards.group_ids_E, rewards.sampled_E)
    assert advantages.tolist() == pytest.approx([1 / 3, -2 / 3])


def test_rewards_of_an_episode_go_to_the_models_tokens():
    """An outcome to its last token, one for a tool's result to the token before, one for the prompt to the first."""
    rollout = make_episode(
        observation=1, reward=7.0, token_rewards=[1.0, None, None, None, None, 2.0, None], finish_reason="length"
    )
    buffer = RolloutBuffer([make_group(rollout)])
    assert rewards_per_token(buffer).tolist() == [0, 1, 0, 2, 0, 0, 4]
    ends_with_a_result = make_episode(loss_mask=[1, 1, 1, 0, 0, 0], reward=3.0)
    assert rewards_per_token(RolloutBuffer([make_group(ends_with_a_result)])).tolist() == [0, 0, 3, 0, 0, 0]


def test_advantages_with_a_critic_skip_tool_results():
    """The state after a call is the one in which the model reads the result: V at its next token."""
    buffer = RolloutBuffer([make_group(make_episode(reward=8.0))])
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    rewards_BT = to_rows(rewards_per_token(buffer), buffer.rollout_lengths)
    values_BT = torch.tensor([[1.0, 2.0, 3.0, NAN, NAN, 5.0]])
    errors = td_errors(rewards_BT, values_BT, mask_BT, gamma=1.0)
    assert errors.tolist() == [[1, 1, 2, 0, 0, 3]]
    advantages, returns = generalized_advantages(rewards_BT, values_BT, mask_BT, gamma=1.0, lam=0.5)
    assert advantages.tolist() == [[2.375, 2.75, 3.5, 0, 0, 3]]
    assert returns.tolist() == [[3.375, 4.75, 6.5, 0, 0, 8]]


def test_reward_to_go_of_an_episode_is_whitened_over_the_models_tokens():
    buffer = RolloutBuffer([make_group(make_episode(reward=2.0), Rollout([1, 2], reward=0.0))])
    mask_BT = to_rows(buffer.joined("loss_mask"), buffer.rollout_lengths)
    rewards_BT = to_rows(rewards_per_token(buffer), buffer.rollout_lengths)
    # 2 at 4 tokens, 0 at 2: mean 4/3, squares 4 * (2/3)^2 + 2 * (4/3)^2 = 16/3, variance 16/15
    scale = (16 / 15 + 1e-8) ** 0.5
    high, low = (2 - 4 / 3) / scale, (0 - 4 / 3) / scale
    advantages = reinforce_plus_plus_advantages(rewards_BT, mask_BT)
    assert advantages[0].tolist() == pytest.approx([high] * 3 + [0, 0, high])
    assert advantages[1].tolist() == pytest.approx([low] * 2 + [0] * 4)
