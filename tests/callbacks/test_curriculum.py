import pytest

from pl_grouprl.callbacks import Curriculum


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 0}, "Curriculum.window is 0; it must be at least 1"),
        ({"threshold": float("nan")}, "Curriculum.threshold is nan; it must be a finite number"),
        (
            {"threshold": 0.5, "fall_below": 0.5},
            "Curriculum.fall_below is 0.5; it must be .*below threshold=0.5, or None",
        ),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Curriculum(**options)


def test_needs_a_data_module_with_levels(counter, fit):
    with pytest.raises(ValueError, match="Curriculum chooses the training prompts, and the data module is NoneType"):
        fit(counter, Curriculum())
