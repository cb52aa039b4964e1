import math

import pytest
import torch

from pl_grouprl.functional.masked import masked_sum, sum_per_rollout


def test_sum_ignores_values_outside_the_mask():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    mask = torch.tensor([True, False, True, False])
    total = masked_sum(values, mask)
    assert total == 4
    total.backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 0.0]


def test_nothing_selected_is_zero():
    nothing = torch.zeros(2, dtype=torch.bool)
    assert masked_sum(torch.ones(2), nothing) == 0
    assert masked_sum(torch.zeros(0), torch.zeros(0, dtype=torch.bool)) == 0


def test_sum_per_rollout_in_any_order():
    sums = sum_per_rollout(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0]), 4)
    assert sums.tolist() == [10.0, 0.0, 5.0, 0.0]


def test_errors():
    with pytest.raises(ValueError, match=r"mask_N has shape \(3,\) and values_N \(2,\)"):
        masked_sum(torch.ones(2), torch.ones(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask_N has dtype"):
        masked_sum(torch.ones(2), torch.ones(2, dtype=torch.int64))
