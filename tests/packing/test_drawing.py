"""The drawing of a forest."""

from __future__ import annotations

from pl_grouprl.packing import SharedPrefixLayout, draw_forest


def test_one_line_per_segment_in_row_order() -> None:
    layout = SharedPrefixLayout([9, 4, 2, 0, 5, 1, 7, 3], [None, 0, 1, 1, 0, 4, None, 6])
    assert draw_forest(layout).splitlines() == [
        "9",
        "├─ 4",
        "│  ├─ 2",
        "│  └─ 0",
        "└─ 5",
        "   └─ 1",
        "7",
        "└─ 3",
    ]


def test_a_long_comb_is_drawn_without_recursion() -> None:
    depth = 2000
    layout = SharedPrefixLayout([1] * depth, [None, *range(depth - 1)])
    assert draw_forest(layout).count("\n") == depth - 1


def test_no_segments() -> None:
    assert draw_forest(SharedPrefixLayout([], [])) == ""
