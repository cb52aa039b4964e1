"""The threshold controller, and its effect on `find_token_groups`."""

import math

import pytest
import torch

from pl_grouprl.functional.token_groups import (
    ThresholdController,
    find_token_groups,
    token_group_counts,
    token_group_metrics,
)


def test_one_step_by_hand():
    controller = ThresholdController(2.0, threshold_lr=0.1, target_compression=0.75)
    controller.update(0.25)  # too little is shared: the threshold rises, by 0.1 * 0.5 in the logarithm
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.05))
    controller.update(0.95)
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.05 - 0.02))
    controller.update(math.nan)
    assert controller.threshold == pytest.approx(2.0 * math.exp(0.03))


def test_start():
    assert ThresholdController().threshold == pytest.approx(4.0)  # 1 / (1 - 0.75)
    assert ThresholdController(target_compression=0.5).threshold == 2.0
    assert ThresholdController(target_compression=0.0).threshold == 1.0
    assert ThresholdController(target_compression=0.9375).threshold == 10.0  # 16, clipped
    assert ThresholdController(3.0).threshold == 3.0
    assert ThresholdController(0.5).threshold == 1.0
    assert ThresholdController(adaptive_threshold=False).threshold == 1.0
    assert ThresholdController(0.5, adaptive_threshold=False).threshold == 0.5


def test_clips():
    up = ThresholdController(threshold_lr=5.0, max_threshold=6.0)
    down = ThresholdController(threshold_lr=5.0, min_threshold=2.5)
    lowest = ThresholdController(threshold_lr=5.0, min_threshold=0.1)
    for _ in range(5):
        up.update(0.0)
        down.update(0.9)
        lowest.update(0.9)
    assert (up.threshold, down.threshold, lowest.threshold) == (6.0, 2.5, 1.0)
    up.update(0.9)  # no wind-up: it comes down at once
    assert up.threshold < 6.0


def test_fixed_threshold_does_not_move():
    controller = ThresholdController(3.0, adaptive_threshold=False, threshold_lr=1.0)
    controller.update(0.0)
    assert controller.threshold == 3.0
    controller.load_state_dict({"threshold": 7.0})
    assert controller.threshold == 3.0


def compression_of(threshold, seed):
    generator = torch.Generator().manual_seed(seed)
    deltas = 1 + 0.5 * torch.randn(16, 64, generator=generator)
    norms = torch.rand(16, 64, generator=generator)
    groups = find_token_groups(deltas, norms, torch.ones(16, 64, dtype=torch.bool), threshold=threshold)
    return token_group_metrics(token_group_counts(groups))["compression_ratio"].item()


@pytest.mark.parametrize(("learning_rate", "steps", "arrives"), [(0.1, 250, True), (0.01, 250, False)])
def test_converges_to_the_target(learning_rate, steps, arrives):
    controller = ThresholdController(1.0, threshold_lr=learning_rate)
    last = []
    for step in range(steps):
        compression = compression_of(controller.threshold, step)
        controller.update(compression)
        last = [*last[-19:], compression]
    assert (abs(sum(last) / len(last) - 0.75) < 0.02) == arrives


def test_resumes():
    whole, first, second = (ThresholdController(threshold_lr=0.3) for _ in range(3))
    for step in range(6):
        whole.update(compression_of(whole.threshold, step))
    for step in range(3):
        first.update(compression_of(first.threshold, step))
    second.load_state_dict(first.state_dict())
    for step in range(3, 6):
        second.update(compression_of(second.threshold, step))
    assert second.threshold == whole.threshold != ThresholdController().threshold


@pytest.mark.parametrize(
    "change",
    [
        {"group_variance_threshold": 2.0},
        {"adaptive_threshold": False},
        {"threshold_lr": 0.2},
        {"min_threshold": 5.0},
        {"max_threshold": 3.0},
        {"target_compression": 0.5},
    ],
)
def test_each_option_changes_the_threshold(change):
    plain, changed = ThresholdController(), ThresholdController(**change)
    plain.update(0.6)
    changed.update(0.6)
    assert plain.threshold != changed.threshold


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target_compression": 0.3}, r"target_compression is 0.3; .* 0, or between 0.5 and 0.9375"),
        ({"target_compression": 0.9, "max_size": 8}, r"target_compression is 0.9; .* 0.875"),
        ({"target_compression": 1.0}, r"target_compression is 1.0; .* group_max_size"),
        ({"target_compression": -0.1}, "target_compression is -0.1"),
        ({"target_compression": 1.2}, "target_compression is 1.2"),
        ({"target_compression": math.nan}, "target_compression is nan"),
        ({"max_size": 1}, "target_compression is 0.75; .* adaptive_threshold"),
        ({"group_variance_threshold": 0.0}, "group_variance_threshold is 0.0"),
        ({"threshold_lr": -1.0}, "threshold_lr is -1.0"),
        ({"min_threshold": 0.0}, "min_threshold is 0.0"),
        ({"min_threshold": 4.0, "max_threshold": 3.0}, r"max_threshold is 3.0; .* min_threshold \(4.0\)"),
        ({"max_threshold": 0.5}, "max_threshold is 0.5"),
        ({"max_size": 0}, r"group_max_size \(max_size\) is 0"),
        ({"max_size": 2.5}, r"group_max_size \(max_size\) is 2.5"),
        ({"max_size": math.inf}, r"group_max_size \(max_size\) is inf"),
        ({"max_size": math.nan}, r"group_max_size \(max_size\) is nan"),
        (
            {"group_variance_threshold": 50.0},
            r"group_variance_threshold is 50.0, outside min_threshold \(0.1\) and max_threshold \(10.0\)",
        ),
        (
            {"group_variance_threshold": 2.0, "min_threshold": 3.0},
            r"group_variance_threshold is 2.0, outside min_threshold \(3.0\) and max_threshold \(10.0\)",
        ),
        ({"group_variance_threshold": 0.5, "min_threshold": 3.0}, "group_variance_threshold is 0.5, outside "),
        ({"adaptive_threshold": False, "threshold_lr": -5.0}, "threshold_lr is -5.0"),
        ({"adaptive_threshold": False, "threshold_lr": math.nan}, "threshold_lr is nan"),
        ({"adaptive_threshold": False, "min_threshold": 0.0}, "min_threshold is 0.0"),
        ({"adaptive_threshold": False, "max_threshold": math.inf}, "max_threshold is inf"),
    ],
)
def test_errors_name_the_option(options, message):
    with pytest.raises(ValueError, match=message):
        ThresholdController(**options)


def test_largest_target_of_each_size_is_accepted():
    for size in range(2, 200):
        ThresholdController(target_compression=1 - 1 / size, max_size=size)
        ThresholdController(target_compression=(size - 1) / size, max_size=size)
    ThresholdController(target_compression=0.0, max_size=1)


def test_a_fixed_threshold_ignores_bounds_and_target():
    assert ThresholdController(50.0, adaptive_threshold=False).threshold == 50.0
    assert ThresholdController(adaptive_threshold=False, target_compression=0.3, max_size=1).threshold == 1.0


def test_an_adaptive_threshold_may_start_at_its_bounds():
    assert ThresholdController(10.0).threshold == 10.0
    assert ThresholdController(3.0, min_threshold=3.0).threshold == 3.0
    assert ThresholdController(0.05).threshold == 1.0  # below 1, and below min_threshold too
