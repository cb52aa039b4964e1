from __future__ import annotations

import pytest
import torch
from helpers.forests import random_forest, sequences, visible_by_definition

from pl_grouprl.packing import SharedPrefixLayout, draw_forest

FORESTS = [(seed, depth) for depth in (1, 2, 3, 4) for seed in range(3)]


def visible(layout):
    tokens = torch.arange(layout.num_tokens)
    return layout.visibility(torch.device("cpu"))(tokens[:, None], tokens[None, :])


def test_positions_and_visibility_of_one_group_by_hand():
    layout = SharedPrefixLayout.from_groups([(2, [2, 1])])
    assert layout.position_ids.tolist() == [0, 1, 2, 3, 2]
    assert visible(layout).int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_two_groups_and_a_grandchild_by_hand():
    # Tokens: a root of 1, its child of 1, that one's child of 1, a second child of the root, and another root.
    layout = SharedPrefixLayout([1, 1, 1, 1, 2], [None, 0, 1, 0, None])
    assert layout.position_ids.tolist() == [0, 1, 2, 1, 0, 1]
    assert visible(layout).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    assert layout.depths == (0, 1, 2, 1, 0)
    assert layout.subtree_stops == (4, 3, 3, 4, 6)
    assert layout.leaves == (2, 3, 4)
    assert layout.repeated_lengths == (3, 2, 2)
    assert layout.token_ratio == 7 / 6
    assert [segment.group_id for segment in layout.segments] == [0, 0, 0, 0, 4]


def test_multiplicity_by_hand():
    # A prompt of 2 with rollouts of 1, 0 and 2 tokens, and a root of 1 alone.
    assert SharedPrefixLayout([2, 1, 0, 2, 1], [None, 0, 0, 0, None]).multiplicity.tolist() == [3, 3, 1, 1, 1, 1]


@pytest.mark.parametrize(("seed", "depth"), FORESTS)
def test_random_forests_agree_with_the_definition(seed, depth):
    forest = random_forest(seed, depth)
    layout = SharedPrefixLayout(*forest)
    expected = visible_by_definition(forest)
    assert max(layout.depths) == depth
    assert torch.equal(visible(layout), expected)
    # A position counts what is seen before the token; the pairs are all that is seen.
    assert layout.position_ids.tolist() == (expected.sum(dim=1) - 1).tolist()
    assert layout.attention_pairs == expected.sum()
    lengths = [len(sequence) for sequence in sequences(forest)]
    assert list(layout.repeated_lengths) == lengths
    assert layout.repeated_attention_pairs == sum(n * (n + 1) // 2 for n in lengths)
    assert layout.token_ratio == pytest.approx(sum(lengths) / sum(forest.lengths))
    counts = torch.zeros(layout.num_tokens, dtype=torch.long)
    for leaf in layout.leaves:
        counts[layout.path(leaf)] += 1
    assert torch.equal(layout.multiplicity, counts)


@pytest.mark.parametrize(
    ("groups", "positions", "ratio"),
    [
        ([(3, [])], [0, 1, 2], 1.0),
        ([(3, [2])], [0, 1, 2, 3, 4], 1.0),
        ([(3, [0])], [0, 1, 2], 1.0),
        ([(3, [0, 0])], [0, 1, 2], 2.0),
        ([(2, [0, 1]), (1, [1])], [0, 1, 2, 0, 1], 7 / 5),
        ([], [], 1.0),
    ],
    ids=["no rollouts", "one rollout", "empty rollout", "two empty rollouts", "two groups", "nothing"],
)
def test_small_groups(groups, positions, ratio):
    layout = SharedPrefixLayout.from_groups(groups)
    assert layout.position_ids.tolist() == positions
    assert layout.position_ids.dtype == torch.int64
    assert layout.token_ratio == ratio


def test_an_empty_rollout_does_not_affect_visibility():
    with_empty = SharedPrefixLayout.from_groups([(2, [1, 0, 2])])
    without = SharedPrefixLayout.from_groups([(2, [1, 2])])
    assert torch.equal(visible(with_empty), visible(without))
    assert len(with_empty.segments) == 4


def test_group_ids_name_all_segments_of_a_group():
    layout = SharedPrefixLayout.from_groups([(2, [1, 1]), (3, [1])], ["a", ("b", 1)])
    assert [segment.group_id for segment in layout.segments] == ["a", "a", "a", ("b", 1), ("b", 1)]


def test_group_ids_of_the_wrong_length():
    with pytest.raises(ValueError, match="zip"):
        SharedPrefixLayout.from_groups([(2, [1]), (3, [1])], [0, 1, 2])
    with pytest.raises(ValueError, match="zip"):
        SharedPrefixLayout([2, 1], [None, 0], [0])


@pytest.mark.parametrize(
    ("lengths", "parents", "message"),
    [
        ([2, -1], [None, 0], r"lengths\[1\]"),
        ([1, 1, 1, 1, 1], [None, None, 0, 1, 2], r"parents\[2\]"),
        ([1, 1, 1], [None, 2, None], r"parents\[1\]"),
        ([1, 1, 1, 1], [None, 0, 0, 1], r"parents\[3\]"),
        ([1, 1], [None, 1], r"parents\[1\]"),
        ([1], [0], r"parents\[0\]"),
        ([1, 1], [None, -1], r"parents\[1\]"),
        ([1, 1], [None, 7], r"parents\[1\]"),
    ],
)
def test_only_forests_in_depth_first_order_are_accepted(lengths, parents, message):
    with pytest.raises(ValueError, match=message):
        SharedPrefixLayout(lengths, parents)


def test_memo_computes_a_value_once():
    layout, made = SharedPrefixLayout.from_groups([(1, [1])]), []
    for _ in range(2):
        assert layout.memo("key", lambda: made.append(0) or "value") == "value"
    assert made == [0]


def test_repr_says_what_is_shared():
    layout = SharedPrefixLayout.from_groups([(6, [2, 2])])
    assert repr(layout) == "SharedPrefixLayout(tokens=10, segments=3, token_ratio=1.60)"


def test_one_line_per_segment_in_row_order() -> None:
    layout = SharedPrefixLayout([9, 4, 2, 0, 5, 1, 7, 3], [None, 0, 1, 1, 0, 4, None, 6])
    expected = ["9", "├─ 4", "│  ├─ 2", "│  └─ 0", "└─ 5", "   └─ 1", "7", "└─ 3"]
    assert draw_forest(layout).splitlines() == expected


def test_a_long_comb_is_drawn_without_recursion() -> None:
    depth = 2000
    layout = SharedPrefixLayout([1] * depth, [None, *range(depth - 1)])
    assert draw_forest(layout).count("\n") == depth - 1


def test_no_segments() -> None:
    assert draw_forest(SharedPrefixLayout([], [])) == ""
