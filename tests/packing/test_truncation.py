"""Final positions of a batch, and groups whose rollouts end early."""

import pytest
import torch

from pl_grouprl.packing import pack, truncate_rollouts
from pl_grouprl.types import Rollout, RolloutGroup

GROUPS = [
    RolloutGroup([1, 2, 3], [Rollout([4, 5], loss_mask=[1, 0]), Rollout([]), Rollout([6])], group_id="first"),
    RolloutGroup([7], []),
    RolloutGroup([7], [Rollout([8, 9])]),
]


def test_final_positions_by_hand():
    # [1 2 3 | 4 5 | | 6] [7 | 8 9]: the empty rollout ends where its prompt does.
    assert pack(GROUPS).final_index_B.tolist() == [4, 2, 5, 8]
    # Rows of 5: [1 2 3 4 5], [1 2 3 . .], [1 2 3 6 .], [7 8 9 . .].
    assert pack(GROUPS, "repeated").final_index_B.tolist() == [4, 7, 13, 17]
    assert pack(GROUPS).final_index_B.dtype == torch.int64


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_final_positions_have_the_last_tokens(sharing):
    batch = pack(GROUPS, sharing)
    assert batch.model_inputs["input_ids"].flatten()[batch.final_index_B].tolist() == [5, 3, 6, 9]


def test_truncated_by_hand():
    groups, kept_index_M = truncate_rollouts(GROUPS, [1, 0, 1, 1])
    assert [[r.token_ids for r in group.rollouts] for group in groups] == [[[4], [], [6]], [], [[8]]]
    assert groups[0].rollouts[0].loss_mask == [1]
    assert groups[0].group_id == "first"
    assert kept_index_M.tolist() == [0, 2, 3]
    assert GROUPS[0].rollouts[0].token_ids == [4, 5]


@pytest.mark.parametrize("lengths", [[2, 0, 1, 2], [0, 0, 0, 0], torch.tensor([2, 0, 0, 1])])
def test_the_index_selects_the_kept_tokens(lengths):
    groups, kept_index_M = truncate_rollouts(GROUPS, lengths)
    whole, short = pack(GROUPS), pack(groups)
    for name in ("targets_N", "rollout_index_N", "loss_mask_N"):
        assert torch.equal(getattr(whole, name)[kept_index_M], getattr(short, name))
    assert short.rollout_lengths == tuple(int(length) for length in lengths)


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        truncate_rollouts(GROUPS, [1, 0])
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"lengths_B\[2\]"):
            truncate_rollouts(GROUPS, [1, 0, wrong, 1])
