"""A packed row of branched rollouts: each token once, and every index of a rollout points to its own tokens."""

import pytest
import torch
from helpers.branched import branched_groups

from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup

GROUP = RolloutGroup([1, 2], [Rollout([3, 4, 5]), Rollout([8]), Rollout([3, 4, 6]), Rollout([3, 4])])


def test_by_hand():
    batch = pack([GROUP], min_saved_tokens=1)
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 8]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 4, 2]]
    assert [segment.parent for segment in batch.layout.segments] == [None, 0, 1, 1, 1, 0]
    assert batch.targets_N.tolist() == [3, 4, 5, 8, 3, 4, 6, 3, 4]
    assert batch.predict_index_N.tolist() == [1, 2, 3, 1, 1, 2, 3, 1, 2]
    assert batch.rollout_index_N.tolist() == [0, 0, 0, 1, 2, 2, 2, 3, 3]
    assert batch.final_index_B.tolist() == [4, 6, 5, 3]
    assert batch.rollout_lengths == (3, 1, 3, 2)
    assert (batch.num_tokens_run, batch.num_tokens_repeated) == (7, 5 + 3 + 5 + 4)
    assert batch.shared_tokens.distinct_M.tolist() == [0, 1, 2, 6, 3]
    assert batch.shared_tokens.index_N.tolist() == [0, 1, 2, 4, 0, 1, 3, 0, 1]


def test_few_common_tokens_are_not_shared_by_default():
    batch = pack([GROUP])
    assert batch.shared_tokens is None
    assert batch.num_tokens_run == 2 + 9
    twins = pack([RolloutGroup([1, 2], [Rollout(list(range(32)))] * 2)])
    assert twins.num_tokens_run == 2 + 32


def test_prompts_share_their_beginning_where_asked():
    groups = [
        RolloutGroup([1, 2, 3], [Rollout([7]), Rollout([7, 8])], group_id="a"),
        RolloutGroup([5], [Rollout([6])], group_id="b"),
        RolloutGroup([1, 2], [Rollout([3]), Rollout([])], group_id="c"),
    ]
    batch = pack(groups, share_across_groups=True, min_saved_tokens=1)
    # 1 2 | 3 | 7 | (end) | 8 | (the prompt of c ends) | 3 | (nothing) | 5 | 6
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 7, 8, 3, 5, 6]]
    assert [segment.parent for segment in batch.layout.segments] == [None, 0, 1, 2, 2, 0, 5, 5, None, 8]
    assert [segment.group_id for segment in batch.layout.segments] == ["a"] * 5 + ["c"] * 3 + ["b"] * 2
    assert batch.predict_index_N.tolist() == [2, 2, 3, 6, 1]
    assert batch.targets_N.tolist() == [7, 7, 8, 6, 3]
    assert batch.final_index_B.tolist() == [3, 4, 7, 5, 1]
    assert pack(groups, min_saved_tokens=1).num_tokens_run == 3 + 2 + 1 + 1 + 2 + 1


def test_prompts_with_images_are_not_compared():
    groups = [RolloutGroup([1, 2], [Rollout([3])], media={"pixel_values": torch.zeros(1, 2)}) for _ in range(2)]
    with pytest.raises(ValueError, match="share_across_groups"):
        pack(groups, share_across_groups=True)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_every_index_points_to_the_rollouts_own_tokens(seed, across):
    groups = branched_groups(seed, 3, vocabulary=3, common=seed % 3)
    batch = pack(groups, share_across_groups=across, min_saved_tokens=1 + seed % 4)
    tokens, layout = batch.model_inputs["input_ids"][0], batch.layout
    owner = {place: index for index, own in enumerate(layout.segments) for place in range(own.start, own.stop)}
    sequences = [group.prompt_ids + own.token_ids for group in groups for own in group.rollouts]
    prompts = [len(group.prompt_ids) for group in groups for _ in group.rollouts]
    for number, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        own = batch.rollout_index_N == number
        places = [*batch.predict_index_N[own].tolist(), int(batch.final_index_B[number])]
        assert tokens[places].tolist() == sequence[prompt - 1 :]
        assert batch.targets_N[own].tolist() == sequence[prompt:]
        last = places[-1]
        path = layout.path(owner[last])
        assert tokens[path[path <= last]].tolist() == sequence
    assert sorted(layout.repeated_lengths) == sorted(map(len, sequences))
    if batch.shared_tokens is not None:
        distinct, index = batch.shared_tokens
        for name in ("targets_N", "predict_index_N"):
            values = getattr(batch, name)
            assert torch.equal(values[distinct][index], values)
        if seed % 4 == 0:  # everything is shared: each token of the row, with what predicts it, is there once
            pairs = set(zip(batch.predict_index_N.tolist(), batch.targets_N.tolist(), strict=True))
            assert len(distinct) == len(pairs)
