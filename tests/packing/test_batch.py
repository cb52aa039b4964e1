import pytest
import torch

from pl_grouprl.packing import pack
from pl_grouprl.types import Rollout, RolloutGroup

GROUPS = [
    RolloutGroup([1, 2, 3], [Rollout([4, 5], loss_mask=[1, 0]), Rollout([]), Rollout([6])], group_id="first"),
    RolloutGroup([7], [Rollout([8, 9])]),
]


def test_shared_row_by_hand():
    batch = pack(GROUPS)
    assert batch.model_inputs["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert batch.model_inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 3, 0, 1, 2]]
    assert batch.targets_N.tolist() == [4, 5, 6, 8, 9]
    assert batch.predict_index_N.tolist() == [2, 3, 2, 6, 7]
    assert batch.rollout_index_N.tolist() == [0, 0, 2, 3, 3]
    assert batch.loss_mask_N.tolist() == [True, False, True, True, True]
    assert batch.rollout_lengths == (2, 0, 1, 2)
    assert batch.num_rollouts == 4
    assert (batch.num_tokens_run, batch.num_tokens_repeated, batch.padding_fraction) == (9, 5 + 3 + 4 + 3, 0.0)
    assert [segment.group_id for segment in batch.layout.segments] == ["first"] * 4 + [1] * 2


def test_repeated_rows_by_hand():
    batch = pack(GROUPS, "repeated")
    assert batch.model_inputs["input_ids"].tolist() == [
        [1, 2, 3, 4, 5],
        [1, 2, 3, 0, 0],
        [1, 2, 3, 6, 0],
        [7, 8, 9, 0, 0],
    ]
    assert batch.model_inputs["attention_mask"].sum(dim=1).tolist() == [5, 3, 4, 3]
    assert batch.predict_index_N.tolist() == [2, 3, 12, 15, 16]
    assert batch.num_tokens_run == 20
    assert batch.padding_fraction == 1 - 15 / 20
    shared = pack(GROUPS)
    for name in ("targets_N", "rollout_index_N", "loss_mask_N"):
        assert torch.equal(getattr(batch, name), getattr(shared, name))


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_groups_without_rollouts_are_skipped(sharing):
    batch = pack([RolloutGroup([1, 1], []), *GROUPS, RolloutGroup([2], [])], sharing)
    alone = pack(GROUPS, sharing)
    assert torch.equal(batch.model_inputs["input_ids"], alone.model_inputs["input_ids"])
    assert torch.equal(batch.predict_index_N, alone.predict_index_N)


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_rollouts_that_are_all_empty_give_nothing_to_score(sharing):
    batch = pack([RolloutGroup([1, 2], [Rollout([]), Rollout([])])], sharing)
    for name in ("targets_N", "predict_index_N", "rollout_index_N"):
        assert getattr(batch, name).shape == (0,)
        assert getattr(batch, name).dtype == torch.int64
    assert batch.loss_mask_N.dtype == torch.bool


@pytest.mark.parametrize("groups", [[], [RolloutGroup([1], [])]])
def test_no_rollout_at_all_is_refused(groups):
    with pytest.raises(ValueError, match="groups"):
        pack(groups)


def test_an_unknown_sharing_is_refused():
    with pytest.raises(ValueError, match="sharing"):
        pack(GROUPS, "both")


def test_a_prompt_without_tokens_is_refused():
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        RolloutGroup([], [Rollout([1])])
