"""Weights that are not finite are found by name, in every dtype and in shards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pl_grouprl.utilities.modes import nonfinite_parameters

_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("place", [0, 500, 1000])
def test_a_single_entry_is_found(dtype: torch.dtype, place: int) -> None:
    weights = torch.ones(1001)
    weights[place] = torch.nan
    named = [("good", torch.ones(3).to(dtype)), ("bad", weights.to(dtype)), ("empty", torch.ones(0).to(dtype))]
    assert nonfinite_parameters(named) == ["bad"]


@pytest.mark.parametrize("value", [torch.inf, -torch.inf])
def test_infinities_count_and_the_largest_finite_value_does_not(value: float) -> None:
    largest = torch.full((4, 4), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    infinite = largest.clone()
    infinite[1, 2] = value
    assert nonfinite_parameters([("largest", largest), ("infinite", infinite)]) == ["infinite"]


def test_what_has_no_floating_point_values_is_finite() -> None:
    named = [("codes", torch.arange(3)), ("meta", torch.empty(2, device="meta"))]
    assert nonfinite_parameters(named) == []
    assert nonfinite_parameters([]) == []


def test_a_shard_is_looked_at_in_place_of_the_empty_whole() -> None:
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, torch.nan])  # as ZeRO-3 leaves it between forward passes
    assert nonfinite_parameters([("sharded", parameter)]) == ["sharded"]
