"""One table of tolerances, and the measures that it is in, by hand."""

import math

import pytest
import torch

from pl_grouprl.utilities.tolerances import TOLERANCES, compare, computing_dtype, gradient_difference, tolerance_of


def test_a_difference_by_hand():
    found, expected = torch.tensor([1.0, -2.0, 3.5]), torch.tensor([1.0, -4.0, 3.0])
    difference = compare(found, expected)
    assert (difference.largest, difference.largest_size) == (2.0, 4.0)
    assert difference.mean == pytest.approx(2.5 / 3)
    assert difference.relative_mean == pytest.approx(2.5 / 8)
    assert difference.relative_largest == 0.5


def test_differences_of_narrow_types_are_taken_in_float32():
    found = torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)
    assert compare(found, torch.ones(2, dtype=torch.bfloat16)).largest == 0.0078125


def test_nothing_differs_by_nothing_and_nan_by_nan():
    assert compare(torch.empty(0), torch.empty(0)).largest == 0.0
    assert math.isnan(compare(torch.tensor([1.0, math.nan]), torch.ones(2)).relative_mean)


def test_gradients_relative_to_their_norm_with_none_as_zero():
    expected = [torch.tensor([3.0]), torch.tensor([4.0]), None]
    assert gradient_difference([torch.tensor([3.0]), torch.tensor([4.5]), None], expected) == pytest.approx(0.1)
    assert gradient_difference([None, torch.tensor([4.0]), None], expected) == pytest.approx(0.6)
    assert gradient_difference([torch.tensor([2.0])], [None]) == 2.0


def test_wider_types_allow_no_more():
    for narrow in (torch.bfloat16, torch.float16):
        for name, limit in vars(TOLERANCES[torch.float32]).items():
            assert limit <= getattr(TOLERANCES[narrow], name)
    assert tolerance_of(torch.float8_e4m3fn) == TOLERANCES[torch.float32]


def test_autocast_computes_in_its_own_dtype():
    model = torch.nn.Linear(1, 1)
    model.dtype, model.device = torch.float32, torch.device("cpu")
    assert computing_dtype(model) == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert computing_dtype(model) == torch.bfloat16
