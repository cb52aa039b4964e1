"""Panels of a run with tools."""

from pl_grouprl.callbacks.curves import PANELS, select


def test_the_panel_of_validation_has_scores_only():
    names = ["val/episode/turns", "val/tools/call_frequency", "val/reward", "val/math/mean@4"]
    points = {name: [(0, float(number))] for number, name in enumerate(names)}
    assert select(points, PANELS["validation"]) == ["val/reward", "val/math/mean@4"]


def test_other_numbers_of_a_reward_do_not_flatten_the_scores():
    names = ["val/rewards/f/mean", "val/rewards/f/length", "val/reward"]
    points = {name: [(0, float(number))] for number, name in enumerate(names)}
    assert select(points, PANELS["validation"]) == ["val/rewards/f/mean", "val/reward"]


def test_calls_of_tools_have_a_panel():
    points = {name: [(1, 2.0)] for name in ("tools/call_frequency", "tools/failures/raised")}
    assert select(points, PANELS["tools: calls per rollout, failed share"]) == ["tools/call_frequency"]
