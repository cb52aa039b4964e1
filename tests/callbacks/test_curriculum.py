from types import SimpleNamespace

import pytest
import torch

from pl_grouprl.callbacks import Curriculum
from pl_grouprl.types import Rollout, RolloutGroup


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"window": 0}, "Curriculum.window is 0"),
        ({"threshold": float("nan")}, "Curriculum.threshold is nan"),
        ({"threshold": 0.5, "fall_below": 0.5}, "Curriculum.fall_below is 0.5"),
    ],
)
def test_options_out_of_range(options, name):
    with pytest.raises(ValueError, match=name):
        Curriculum(**options)


def test_needs_a_data_module_with_levels(counter, fit):
    with pytest.raises(AttributeError, match="train_by_level"):
        fit(counter, Curriculum())


def test_batches_of_several_levels_do_not_count():
    """As with rollouts ahead, whose groups may be trained before those of earlier batches."""
    logged = []
    curriculum, found = Curriculum(threshold=0.5, window=1), []
    curriculum._num_levels = 3
    for number, levels in enumerate(([0, 0], [0, 1], [1, 1], [1, 1])):
        groups = [RolloutGroup([1], [Rollout([2])], columns={"level": level}) for level in levels]
        buffer = SimpleNamespace(rollout_number=number, groups=groups, metrics={"reward": 0.9})
        module = SimpleNamespace(last_rollouts=buffer, device=torch.device("cpu"))
        module.log = lambda name, value, batch_size: logged.append((name, value))
        curriculum.on_before_backward(None, module, None)
        found.append(curriculum.level)
    assert found == [1, 1, 2, 2]
    assert logged == [("curriculum/level", level) for level in (0, 0.5, 1, 1)]
