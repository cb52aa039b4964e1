"""Images of several prompts as arguments of one call: order, repetition, tokens' types, what is refused."""

import pytest
import torch

from pl_grouprl.packing import pack
from pl_grouprl.packing.batch import truncate_rollouts
from pl_grouprl.types import Rollout, RolloutGroup


def groups():
    """Three prompts with two images, none and one; 2, 1 and 2 rollouts."""

    def media(first, count, types):
        pixels = torch.arange(first, first + count, dtype=torch.float32)[:, None].expand(-1, 3)
        return {"pixel_values": pixels, "mm_token_type_ids": torch.tensor(types)}

    return [
        RolloutGroup([5, 6, 7], [Rollout([1, 2]), Rollout([])], media=media(10, 2, [1, 1, 0])),
        RolloutGroup([8], [Rollout([3])]),
        RolloutGroup([6, 9], [Rollout([4]), Rollout([1])], media=media(20, 1, [1, 0])),
    ]


def test_shared_prompts_have_their_images_once():
    inputs = pack(groups()).model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 20]
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 1, 2, 8, 3, 6, 9, 4, 1]]
    assert inputs["mm_token_type_ids"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]]


def test_repeated_prompts_have_their_images_once_per_rollout():
    inputs = pack(groups(), "repeated").model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 10, 11, 20, 20]
    assert inputs["input_ids"][:, :3].tolist() == [[5, 6, 7], [5, 6, 7], [8, 3, 0], [6, 9, 4], [6, 9, 1]]
    ones = [[1, 1, 0, 0, 0]] * 2 + [[0] * 5] + [[1, 0, 0, 0, 0]] * 2
    assert inputs["mm_token_type_ids"].tolist() == ones


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_text_has_no_media(sharing):
    assert pack(groups()[1:2], sharing).media == {}
    assert set(pack(groups(), sharing).media) == {"pixel_values", "mm_token_type_ids"}


def test_images_of_a_group_without_rollouts_are_left_out():
    empty = groups()
    empty[0].rollouts = []
    assert pack(empty).model_inputs["pixel_values"][:, 0].tolist() == [20]


def test_truncated_groups_keep_their_images():
    truncated, _ = truncate_rollouts(groups(), [1, 0, 0, 1, 0])
    assert [set(group.media) for group in truncated] == [set(group.media) for group in groups()]


@pytest.mark.parametrize(
    ("media", "message"),
    [({"mm_token_type_ids": torch.zeros(2)}, "mm_token_type_ids"), ({"pixel_values": torch.zeros(1, 4)}, "Sizes of")],
)
def test_mismatched_arguments_are_refused(media, message):
    wrong = groups()
    wrong[1].media = media
    with pytest.raises((ValueError, RuntimeError), match=message):
        pack(wrong)
