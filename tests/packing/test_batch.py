"""Rollouts in packed rows and padded ones: every index by hand, branches, images, truncation, the way to a device."""

import pytest
import torch
from helpers.branched import branched_groups

from pl_grouprl.packing import pack, truncate_rollouts
from pl_grouprl.packing.batch import _move_as_block, move_together
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


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: pack([]), "groups"),
        (lambda: pack([RolloutGroup([1], [])]), "groups"),
        (lambda: pack(GROUPS, "both"), "sharing"),
        (lambda: RolloutGroup([], [Rollout([1])]), "prompt_ids"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


GROUP = RolloutGroup([1, 2], [Rollout([3, 4, 5]), Rollout([8]), Rollout([3, 4, 6]), Rollout([3, 4])])


def test_a_tree_by_hand():
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
@pytest.mark.parametrize("seed", range(16))
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


ENDED = [
    RolloutGroup([1, 2, 3], [Rollout([4, 5], loss_mask=[1, 0]), Rollout([]), Rollout([6])], group_id="first"),
    RolloutGroup([7], []),
    RolloutGroup([7], [Rollout([8, 9])]),
]


def test_final_positions_by_hand():
    # [1 2 3 | 4 5 | | 6] [7 | 8 9]: the empty rollout ends where its prompt does.
    assert pack(ENDED).final_index_B.tolist() == [4, 2, 5, 8]
    # Rows of 5: [1 2 3 4 5], [1 2 3 . .], [1 2 3 6 .], [7 8 9 . .].
    assert pack(ENDED, "repeated").final_index_B.tolist() == [4, 7, 13, 17]
    assert pack(ENDED).final_index_B.dtype == torch.int64


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_final_positions_have_the_last_tokens(sharing):
    batch = pack(ENDED, sharing)
    assert batch.model_inputs["input_ids"].flatten()[batch.final_index_B].tolist() == [5, 3, 6, 9]


def test_truncated_by_hand():
    groups, kept_index_M = truncate_rollouts(ENDED, [1, 0, 1, 1])
    assert [[r.token_ids for r in group.rollouts] for group in groups] == [[[4], [], [6]], [], [[8]]]
    assert groups[0].rollouts[0].loss_mask == [1]
    assert groups[0].group_id == "first"
    assert kept_index_M.tolist() == [0, 2, 3]
    assert ENDED[0].rollouts[0].token_ids == [4, 5]


@pytest.mark.parametrize("lengths", [[2, 0, 1, 2], [0, 0, 0, 0], torch.tensor([2, 0, 0, 1])])
def test_the_index_selects_the_kept_tokens(lengths):
    groups, kept_index_M = truncate_rollouts(ENDED, lengths)
    whole, short = pack(ENDED), pack(groups)
    for name in ("targets_N", "rollout_index_N", "loss_mask_N"):
        assert torch.equal(getattr(whole, name)[kept_index_M], getattr(short, name))
    assert short.rollout_lengths == tuple(int(length) for length in lengths)


def test_mismatched_lengths_are_refused():
    with pytest.raises(ValueError, match="zip"):
        truncate_rollouts(ENDED, [1, 0])
    for wrong in (3, -1):
        with pytest.raises(ValueError, match=r"lengths_B\[2\]"):
            truncate_rollouts(ENDED, [1, 0, wrong, 1])


def with_images():
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
    inputs = pack(with_images()).model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 20]
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 1, 2, 8, 3, 6, 9, 4, 1]]
    assert inputs["mm_token_type_ids"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0]]


def test_repeated_prompts_have_their_images_once_per_rollout():
    inputs = pack(with_images(), "repeated").model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 10, 11, 20, 20]
    assert inputs["input_ids"][:, :3].tolist() == [[5, 6, 7], [5, 6, 7], [8, 3, 0], [6, 9, 4], [6, 9, 1]]
    ones = [[1, 1, 0, 0, 0]] * 2 + [[0] * 5] + [[1, 0, 0, 0, 0]] * 2
    assert inputs["mm_token_type_ids"].tolist() == ones


def test_images_of_rollouts_come_in_the_order_of_their_tokens():
    """A rollout of the second prompt, which is text, and one of the third read an image each."""
    groups = with_images()
    for group, pixel in ((groups[1], 30.0), (groups[2], 40.0)):
        media = {"pixel_values": torch.full((1, 3), pixel), "mm_token_type_ids": torch.tensor([0, 1])}
        group.rollouts.insert(0, Rollout([2, 9], loss_mask=[1, 0], media=media))
    inputs = pack(groups).model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 30, 20, 40]
    assert inputs["input_ids"].tolist() == [[5, 6, 7, 1, 2, 8, 2, 9, 3, 6, 9, 2, 9, 4, 1]]
    assert inputs["mm_token_type_ids"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 0]]
    inputs = pack(groups, "repeated").model_inputs
    assert inputs["pixel_values"][:, 0].tolist() == [10, 11, 10, 11, 30, 20, 40, 20, 20]
    assert inputs["mm_token_type_ids"][2].tolist() == [0, 0, 1, 0, 0]
    assert inputs["mm_token_type_ids"][4].tolist() == [1, 0, 0, 1, 0]


def test_a_rollout_with_images_stays_whole_and_unshared():
    groups = with_images()[1:2]
    media = {"pixel_values": torch.zeros(1, 3), "mm_token_type_ids": torch.tensor([0, 1, 0])}
    groups[0].rollouts = [Rollout([3, 9, 4], media=media), Rollout([3, 9, 4], media=media)]
    truncated, kept_index_M = truncate_rollouts(groups, [1, 0])
    assert [rollout.token_ids for rollout in truncated[0].rollouts] == [[3, 9, 4]] * 2
    assert kept_index_M.tolist() == [0, 1, 2, 3, 4, 5]
    assert pack(truncated, min_saved_tokens=1).model_inputs["input_ids"].tolist() == [[8, 3, 9, 4, 3, 9, 4]]


@pytest.mark.parametrize("sharing", ["shared", "repeated"])
def test_text_has_no_media(sharing):
    assert pack(with_images()[1:2], sharing).media == {}
    assert set(pack(with_images(), sharing).media) == {"pixel_values", "mm_token_type_ids"}


def test_images_of_a_group_without_rollouts_are_left_out():
    empty = with_images()
    empty[0].rollouts = []
    assert pack(empty).model_inputs["pixel_values"][:, 0].tolist() == [20]


def test_truncated_groups_keep_their_images():
    truncated, _ = truncate_rollouts(with_images(), [1, 0, 0, 1, 0])
    assert [set(group.media) for group in truncated] == [set(group.media) for group in with_images()]


@pytest.mark.parametrize(
    ("media", "message"),
    [({"mm_token_type_ids": torch.zeros(2)}, "mm_token_type_ids"), ({"pixel_values": torch.zeros(1, 4)}, "Sizes of")],
)
def test_mismatched_arguments_are_refused(media, message):
    wrong = with_images()
    wrong[1].media = media
    with pytest.raises((ValueError, RuntimeError), match=message):
        pack(wrong)


MOVED = {
    "mask": torch.tensor([True, False, True]),
    "ids": torch.arange(6).view(2, 3),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "half": torch.tensor([0.5, -2.0, 3.0], dtype=torch.bfloat16),
    "number": torch.tensor(7),
    "expanded": torch.tensor([7]).as_strided((1,), (0,)),  # as `expand` leaves it
    "none": torch.empty(0, dtype=torch.long),
}


def test_joined_tensors_are_separated_again():
    separated = _move_as_block(MOVED, torch.device("cpu"))
    assert list(separated) == list(MOVED)
    for name, tensor in MOVED.items():
        assert separated[name].dtype == tensor.dtype
        assert torch.equal(separated[name], tensor)


def test_on_the_cpu_nothing_is_copied():
    moved = move_together(MOVED, "cpu")
    assert all(moved[name] is tensor for name, tensor in MOVED.items())
    assert move_together({}, "meta") == {}


def test_another_device_gets_every_shape_and_dtype():
    moved = move_together(MOVED, "meta")
    assert {name: (own.shape, own.dtype) for name, own in moved.items()} == {
        name: (own.shape, own.dtype) for name, own in MOVED.items()
    }
    assert all(own.is_meta for own in moved.values())


@pytest.mark.gpu
def test_a_gpu_gets_the_same_numbers():
    moved = move_together(MOVED, "cuda")
    for name, tensor in MOVED.items():
        assert torch.equal(moved[name].cpu(), tensor)
