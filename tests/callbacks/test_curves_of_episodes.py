"""Panels of a run with tools."""

from pl_grouprl.callbacks.curves import PANELS, select


def test_the_panel_of_validation_has_scores_only():
    points = dict.fromkeys(
        ["val/episode/turns", "val/tools/call_frequency", "val/reward", "val/math/mean@4"], [(0, 1.0)]
    )
    assert select(points, PANELS["validation"]) == ["val/reward", "val/math/mean@4"]


def test_calls_of_tools_have_a_panel():
    points = dict.fromkeys(["tools/call_frequency", "tools/failures/raised"], [(1, 2.0)])
    assert select(points, PANELS["tools: calls per rollout, failed share"]) == ["tools/call_frequency"]
