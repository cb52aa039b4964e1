"""The rollouts of a batch with their quantities per token, and what differs within a group."""

from __future__ import annotations

import io
import math

import pytest
import torch
from helpers.episodes import make_episode, make_group
from helpers.rollouts import mini_batch, per_rollout_means

from pl_grouprl.algorithms import RolloutBuffer
from pl_grouprl.functional.advantages import (
    BranchPaths,
    gpg_advantages,
    group_relative_advantages,
    grpo_passk_advantages,
    optimal_token_baseline_advantages,
    remax_advantages,
    rloo_advantages,
    tree_advantages,
)
from pl_grouprl.functional.masked import masked_whiten
from pl_grouprl.training.buffer import outcomes_or_steps_differ, rewards_differ, without_rewards
from pl_grouprl.training.metrics import rollout_metrics, summarize
from pl_grouprl.types import Rollout, RolloutGroup


def saved_and_loaded(buffer):
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    return RolloutBuffer.from_state_dict(torch.load(stream, weights_only=True))


def make_buffer(**kwargs):
    """Three groups whose rollouts have 2+1, 0+3 and 1 tokens."""
    groups = [
        RolloutGroup([1], [Rollout([5, 6], reward=1.0), Rollout([7], reward=None)], columns={"answer": object()}),
        RolloutGroup([1, 2], [Rollout([], reward=0.0), Rollout([8, 9, 10], reward=0.5, loss_mask=[1, 0, 1])]),
        RolloutGroup([3], [Rollout([11], reward=float("nan"))]),
    ]
    return RolloutBuffer(groups, **kwargs)


def test_quantities_per_rollout_and_per_token():
    buffer = make_buffer()
    # The mask joins that of the rollout with whether it has a reward.
    assert [mask.tolist() for mask in buffer.tokens["loss_mask"]] == [[1, 1, 0], [1, 0, 1], [0]]
    buffer.put_per_rollout("advantages", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [values.tolist() for values in buffer.tokens["advantages"]] == [[1, 1, 2], [4, 4, 4], [5]]
    assert per_rollout_means(buffer, "advantages") == [[1, 2], [0, 4], [5]]  # the empty rollout shows 0
    with pytest.raises(ValueError, match="values"):
        buffer.put("values", torch.zeros(6))
    with pytest.raises(TypeError):
        buffer.tokens["loss_mask"] = []


def test_each_pass_uses_each_group_once_in_its_own_order():
    orders = set()
    for epoch in range(8):
        buffer = make_buffer(num_mini_batches=2)
        parts = [mini_batch(buffer, 2 * epoch + part) for part in range(2)]
        prompts = [group.prompt_ids[-1] for groups, _ in parts for group in groups]
        assert sorted(prompts) == [1, 2, 3]
        assert sorted(len(groups) for groups, _ in parts) == [1, 2]
        for groups, tokens in parts:
            assert len(tokens["loss_mask"]) == sum(len(r.token_ids) for group in groups for r in group.rollouts)
        orders.add(tuple(prompts))
    assert len(orders) > 1
    whole = make_buffer()
    assert mini_batch(whole, 5)[0] == whole.groups  # one mini-batch: as they are


def test_a_mini_batch_may_have_no_group_of_this_rank():
    buffer = make_buffer(num_mini_batches=4)
    passes = [[buffer.members(4 * epoch + update) for update in range(4)] for epoch in range(2)]
    for members in passes:
        assert sorted(index for own in members for index in own) == [0, 1, 2]
        assert [] in members


def test_some_rollouts_of_some_groups():
    buffer = make_buffer()
    buffer.put("old_logprobs", torch.arange(7.0))
    groups, tokens, numbers = buffer.select([(1, [1]), (0, [0])])
    assert [[rollout.token_ids for rollout in group.rollouts] for group in groups] == [[[8, 9, 10]], [[5, 6]]]
    assert tokens["old_logprobs"].tolist() == [3, 4, 5, 0, 1]
    assert numbers == (3, 0)
    assert len(buffer.groups[1].rollouts) == 2  # the buffer itself is left alone


def test_back_into_the_order_of_the_buffer():
    buffer = make_buffer()
    parts = [buffer.select([(1, [1])]), buffer.select([(2, [0]), (0, [0, 1])]), buffer.select([(1, [0])])]
    numbers = [number for _, _, own in parts for number in own]
    masks = [tokens["loss_mask"] for _, tokens, _ in parts]
    assert torch.equal(buffer.in_order(masks, numbers, per_token=True), buffer.joined("loss_mask"))
    places = [torch.tensor(own) for _, _, own in parts]
    assert buffer.in_order(places, numbers, per_token=False).tolist() == [0, 1, 2, 3, 4]


def test_state_survives_a_safe_load():
    buffer = make_buffer(rollout_number=4, num_mini_batches=2, seed=3, metrics={"reward": 0.5}, updates_done=1)
    buffer.put("old_logprobs", torch.arange(7.0))
    restored = saved_and_loaded(buffer)
    assert restored.groups[0].columns == {}
    assert restored.groups[1].rollouts == buffer.groups[1].rollouts
    assert (restored.rollout_number, restored.updates_done, restored.metrics) == (4, 1, {"reward": 0.5})
    for update in range(4):
        (_, before), (_, after) = mini_batch(buffer, update), mini_batch(restored, update)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def test_truncated_rollouts_are_left_out_but_keep_their_own_mask():
    cut = make_episode(reward=1.0, finish_reason="length")
    groups = [RolloutGroup([1], [cut, Rollout([5], reward=1.0, finish_reason="stop")])]
    assert RolloutBuffer(groups).joined("loss_mask").tolist() == [True, True, True, False, False, True, True]
    buffer = RolloutBuffer(groups, mask_truncated=True)
    assert buffer.joined("loss_mask").tolist() == [False] * 6 + [True]
    assert (cut.loss_mask, cut.num_sampled_tokens) == ([1, 1, 1, 0, 0, 1], 4)
    assert saved_and_loaded(buffer).mask_truncated is True


def test_episodes_are_saved_as_plain_values():
    environment = {"environment": object(), "environment_reward": 0.5, "environment_name": "Room"}
    episode = make_episode(observation=2, reward=1.0, rewards={"f": 1.0}, **environment)
    (rollout,) = saved_and_loaded(RolloutBuffer([make_group(episode)])).groups[0].rollouts
    assert rollout == episode  # all fields but the environment
    assert rollout.environment is None
    assert episode.environment is not None
    (with_steps,) = saved_and_loaded(RolloutBuffer([make_group(STEPS)])).groups[0].rollouts
    assert with_steps == STEPS
    older = RolloutBuffer([make_group(STEPS)]).state_dict()
    del older["groups"][0]["rollouts"][0]["token_rewards"]  # as in a checkpoint of an older version
    assert RolloutBuffer.from_state_dict(older).groups[0].rollouts[0].token_rewards is None


STEPS = Rollout([1, 2], reward=1.0, token_rewards=[None, 1.0])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.0, 1.0], True),
        ([0.5, 0.5, 0.5], False),
        ([0.5, None, 0.5], False),
        ([0.5, None, 0.6], True),
        ([None, None], False),
        ([math.nan, 1.0], False),
        ([1.0], False),
        ([0.1 + 0.2, 0.3], False),
        ([0.1 + 0.2 - 0.3, 0.0], False),
        ([float(torch.tensor(0.7) + torch.tensor(0.1)), 0.8], False),  # one in float32
        ([3.3e9, 3.3e9 + 0.001], False),
        ([1e6, 1e6 + 1], True),
        ([0.0, 1e-6], True),
    ],
)
def test_selection_advantages_and_metrics_agree_on_whether_rewards_differ(rewards, expected):
    group = RolloutGroup([1], [Rollout([5], reward=reward, finish_reason="stop") for reward in rewards])
    assert rewards_differ(group) is expected
    assert rollout_metrics(summarize([group]))["frac_reward_zero_std"] == 1 - expected
    tensor = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float64)
    mask = torch.ones(len(rewards), 1)
    for estimate in (group_relative_advantages, rloo_advantages, gpg_advantages, grpo_passk_advantages):
        assert bool(estimate(tensor, [0] * len(rewards)).any()) is expected, estimate.__name__
    assert bool(remax_advantages(tensor, tensor.nanmean().expand(len(rewards))).any()) is expected
    assert bool(masked_whiten(tensor[:, None], mask * ~tensor.isnan()[:, None]).any()) is expected
    branches = BranchPaths([()] * len(rewards), [()] * len(rewards))
    assert bool(tree_advantages(tensor, [0] * len(rewards), mask, branches).any()) is expected
    norms = torch.ones(len(rewards), 1)
    assert bool(optimal_token_baseline_advantages(tensor[:, None], [0] * len(rewards), mask, norms).any()) is expected


@pytest.mark.parametrize(
    ("rewards", "tokens", "teaches"),
    [
        ([1.0, 1.0], [[1.0, None], [0.5, 0.5]], True),
        ([1.0, 1.0], [[1.0, None], [None, 1.0]], False),
        ([1.0, 2.0], [None, None], True),
        ([1.0, None], [[0.5, 0.5], [1.0, 2.0]], False),
        ([0.0, 0.0], [[None, None], [None, None]], False),
    ],
)
def test_groups_whose_steps_differ_are_kept(rewards, tokens, teaches):
    group = RolloutGroup(
        [1], [Rollout([1, 2], reward=r, token_rewards=own) for r, own in zip(rewards, tokens, strict=True)]
    )
    assert rewards_differ(group) is teaches
    assert not rewards_differ(without_rewards(group))


def test_groups_are_compared_by_outcomes_and_by_steps():
    longer = [Rollout([1, 2], reward=2.0, token_rewards=[1.0, 1.0]), Rollout([1], reward=1.0, token_rewards=[1.0])]
    assert rewards_differ(RolloutGroup([1], longer))  # for a critic, the longer one is better
    assert not outcomes_or_steps_differ(RolloutGroup([1], longer))
    opposed = [Rollout([1], reward=1.0, token_rewards=[1.0]), Rollout([1], reward=1.0)]
    assert not rewards_differ(RolloutGroup([1], opposed))  # the sums are equal
    assert outcomes_or_steps_differ(RolloutGroup([1], opposed))
    rows = [Rollout([1], reward=1.0, token_rewards=[1.0], episode=0), Rollout([2], reward=1.0, episode=0)]
    other = Rollout([3], reward=1.0, token_rewards=[1.0])
    assert not outcomes_or_steps_differ(RolloutGroup([1], [*rows, other]))  # both outcomes are 0
    assert outcomes_or_steps_differ(RolloutGroup([1], [*rows, Rollout([3], reward=1.0)]))
    group = RolloutGroup([1], [Rollout([5, 6], reward=2.0), Rollout([7], reward=2.0)])
    untrained = without_rewards(group)  # a copy
    assert [rollout.reward for rollout in untrained.rollouts] == [None, None]
    assert [rollout.token_ids for rollout in untrained.rollouts] == [[5, 6], [7]]
    assert [rollout.reward for rollout in group.rollouts] == [2.0, 2.0]
