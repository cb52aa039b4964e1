"""A laid-out row serves scoring and update, and no rollouts but those that it was made of."""

import pytest
import torch

from pl_grouprl.packing import pack
from pl_grouprl.training.micro_batches import PackedRowCache, RowOptions
from pl_grouprl.types import Rollout, RolloutGroup

OPTIONS = RowOptions("shared", None, torch.device("cpu"))


@pytest.fixture
def groups():
    return [RolloutGroup([1, 2], [Rollout([3, 4]), Rollout([5])]), RolloutGroup([6], [Rollout([7], loss_mask=[1])])]


def test_the_same_rollouts_share_a_row(groups):
    kept = PackedRowCache()
    first = kept.get(groups, OPTIONS, lambda: pack(groups))
    assert kept.get(groups, OPTIONS, lambda: pack(groups)) is first
    kept.clear()
    assert kept.get(groups, OPTIONS, lambda: pack(groups)) is not first


def cut(groups):
    groups[0].rollouts[0].token_ids[-1] = 9


def swap(groups):
    groups[0].rollouts.reverse()


def mask(groups):
    groups[1].rollouts[0].loss_mask[0] = 0


def prompt(groups):
    groups[0].prompt_ids[0] = 8


@pytest.mark.parametrize("edit", [cut, swap, mask, prompt])
def test_edited_rollouts_are_laid_out_again(groups, edit):
    kept = PackedRowCache()
    kept.get(groups, OPTIONS, lambda: pack(groups))
    edit(groups)
    found, expected = kept.get(groups, OPTIONS, lambda: pack(groups)), pack(groups)
    for name in ("targets_N", "loss_mask_N", "predict_index_N"):
        assert torch.equal(getattr(found, name), getattr(expected, name))
    assert torch.equal(found.model_inputs["input_ids"], expected.model_inputs["input_ids"])
