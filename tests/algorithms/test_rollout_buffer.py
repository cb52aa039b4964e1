from __future__ import annotations

import io

import pytest
import torch
from helpers.episodes import make_episode, make_group
from helpers.rollouts import mini_batch, per_rollout_means

from pl_grouprl.algorithms import RolloutBuffer
from pl_grouprl.types import Rollout, RolloutGroup


def make_buffer(**kwargs):
    """Three groups whose rollouts have 2+1, 0+3 and 1 tokens."""
    groups = [
        RolloutGroup([1], [Rollout([5, 6], reward=1.0), Rollout([7], reward=None)], columns={"answer": object()}),
        RolloutGroup([1, 2], [Rollout([], reward=0.0), Rollout([8, 9, 10], reward=0.5, loss_mask=[1, 0, 1])]),
        RolloutGroup([3], [Rollout([11], reward=float("nan"))]),
    ]
    return RolloutBuffer(groups, **kwargs)


def test_loss_mask_joins_reward_and_mask_of_the_rollout():
    masks = [mask.tolist() for mask in make_buffer().tokens["loss_mask"]]
    assert masks == [[True, True, False], [True, False, True], [False]]


def test_quantities_per_rollout_and_per_token():
    buffer = make_buffer()
    buffer.put_per_rollout("advantages", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
    assert [values.tolist() for values in buffer.tokens["advantages"]] == [[1, 1, 2], [4, 4, 4], [5]]
    assert per_rollout_means(buffer, "advantages") == [[1, 2], [0, 4], [5]]  # the empty rollout shows 0
    with pytest.raises(ValueError, match=r"values has shape \(6,\); pass one value per token, \(7,\)"):
        buffer.put("values", torch.zeros(6))


def test_tokens_are_read_only():
    buffer = make_buffer()
    with pytest.raises(TypeError, match="does not support item assignment"):
        buffer.tokens["loss_mask"] = []


def test_each_pass_uses_each_group_once_in_its_own_order():
    orders = set()
    for epoch in range(8):
        buffer = make_buffer(num_mini_batches=2)
        parts = [mini_batch(buffer, 2 * epoch + part) for part in range(2)]
        prompts = [group.prompt_ids[-1] for groups, _ in parts for group in groups]
        assert sorted(prompts) == [1, 2, 3]
        assert sorted(len(groups) for groups, _ in parts) == [1, 2]
        assert all(len(tokens["loss_mask"]) == sum(map(_tokens, groups)) for groups, tokens in parts)
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
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    restored = RolloutBuffer.from_state_dict(torch.load(stream, weights_only=True))
    assert restored.groups[0].columns == {}
    assert restored.groups[1].rollouts == buffer.groups[1].rollouts
    assert (restored.rollout_number, restored.updates_done, restored.metrics) == (4, 1, {"reward": 0.5})
    for update in range(4):
        (_, before), (_, after) = mini_batch(buffer, update), mini_batch(restored, update)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)


def _tokens(group):
    return sum(len(rollout.token_ids) for rollout in group.rollouts)


def test_truncated_rollouts_are_left_out_but_keep_their_own_mask():
    cut = make_episode(reward=1.0, finish_reason="length")
    groups = [RolloutGroup([1], [cut, Rollout([5], reward=1.0, finish_reason="stop")])]
    assert RolloutBuffer(groups).joined("loss_mask").tolist() == [True, True, True, False, False, True, True]
    buffer = RolloutBuffer(groups, mask_truncated=True)
    assert buffer.joined("loss_mask").tolist() == [False] * 6 + [True]
    assert (cut.loss_mask, cut.num_sampled_tokens) == ([1, 1, 1, 0, 0, 1], 4)
    assert RolloutBuffer.from_state_dict(buffer.state_dict()).mask_truncated is True


def test_episodes_are_saved_and_sent_as_plain_values():
    episode = make_episode(
        observation=2,
        environment=object(),
        environment_reward=0.5,
        environment_name="Room",
        reward=1.0,
        rewards={"f": 1.0},
    )
    buffer = RolloutBuffer([make_group(episode)])
    stream = io.BytesIO()
    torch.save(buffer.state_dict(), stream)
    stream.seek(0)
    restored = RolloutBuffer.from_state_dict(torch.load(stream, weights_only=True))
    (rollout,) = restored.groups[0].rollouts
    assert rollout == episode  # all fields but the environment
    assert rollout.environment is None
    assert episode.environment is not None
