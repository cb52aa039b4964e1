"""Sums, whitening and rows over the valid entries of a batch."""

import math
from functools import partial

import pytest
import torch
from helpers.ranks import on_ranks

from pl_grouprl.functional.masked import (
    compact,
    from_rows,
    masked_sum,
    masked_whiten,
    places_of,
    reverse_scan,
    sum_per_rollout,
    to_rows,
)

NAN = math.nan


def test_sum_ignores_values_outside_the_mask():
    values = torch.tensor([1.0, math.nan, 3.0, math.inf], requires_grad=True)
    total = masked_sum(values, torch.tensor([True, False, True, False]))
    assert total == 4
    total.backward()
    assert values.grad.tolist() == [1.0, 0.0, 1.0, 0.0]
    for size in (2, 0):
        assert masked_sum(torch.ones(size), torch.zeros(size, dtype=torch.bool)) == 0


def test_sum_per_rollout_in_any_order():
    sums = sum_per_rollout(torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0]), 4)
    assert sums.tolist() == [10.0, 0.0, 5.0, 0.0]


def test_whitened_by_hand():
    # Valid 1, 3, 5, 7: mean 4, squares 9 + 1 + 1 + 9 = 20, variance 20 / 3.
    values = torch.tensor([[1.0, NAN, 3.0], [5.0, 7.0, math.inf]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    std = math.sqrt(20 / 3)
    expected = torch.tensor([[-3 / std, 0.0, -1 / std], [1 / std, 3 / std, 0.0]])
    for kind in (torch.int64, torch.float32, torch.bool):
        torch.testing.assert_close(masked_whiten(values, mask.to(kind)), expected)
    # Variance 2e-8, to which 1e-8 is added: values divided by sqrt(3e-8).
    whitened = masked_whiten(torch.tensor([0.0, 2e-4], dtype=torch.float64), torch.ones(2))
    torch.testing.assert_close(whitened, torch.tensor([-1e-4, 1e-4], dtype=torch.float64) / math.sqrt(3e-8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.7, -1e6, 1e-9, 0.0])
def test_equal_values_are_whitened_to_exactly_zero(dtype, value):
    values = torch.full((1001,), value, dtype=dtype)
    for count in (0, 1, 2, 3, 7, 1000):
        assert masked_whiten(values, torch.arange(1001) < count).abs().max() == 0


def test_ranks_whiten_with_global_statistics():
    generator = torch.Generator().manual_seed(0)
    values = 100 + torch.randn(6, 11, generator=generator)
    mask = torch.rand(6, 11, generator=generator) < 0.6
    mask[4:] = False  # the last rank has nothing valid
    parts = [(values[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    split = on_ranks(lambda part, reduce: masked_whiten(*part, reduce=reduce), parts)
    torch.testing.assert_close(torch.cat(split), masked_whiten(values, mask), atol=1e-6, rtol=1e-6)


def test_whitening_of_bfloat16_is_in_float32_without_gradient():
    values = torch.tensor([1.0, 2.0, 4.0]).bfloat16().requires_grad_()
    whitened = masked_whiten(values, torch.ones(3, dtype=torch.bool))
    assert whitened.dtype == torch.float32
    assert not whitened.requires_grad
    assert values.tolist() == [1.0, 2.0, 4.0]
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (partial(masked_sum, torch.ones(2), torch.ones(3, dtype=torch.bool)), "mask_N"),
        (partial(masked_sum, torch.ones(2), torch.ones(2, dtype=torch.int64)), "mask_N"),
        (partial(masked_whiten, torch.zeros(2), torch.tensor([1, 2])), "mask"),
        (partial(masked_whiten, torch.zeros(2), torch.ones(3)), "mask"),
        (partial(to_rows, torch.zeros(2), torch.tensor([1, 2])), "lengths_B"),
    ],
)
def test_errors_name_the_argument(call, argument):
    with pytest.raises(ValueError, match=argument):
        call()


def test_rows_and_back():
    values, lengths = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.tensor([2, 0, 3, 1])
    rows = to_rows(values, lengths)
    assert rows.tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5], [6, 0, 0]]
    assert torch.equal(from_rows(rows, lengths), values)


def test_vectors():
    values, lengths = torch.arange(12.0).view(3, 4), torch.tensor([1, 2])
    rows = to_rows(values, lengths)
    assert rows.shape == (2, 2, 4)
    assert torch.equal(rows[1], values[1:])
    assert torch.equal(from_rows(rows, lengths), values)


def test_no_rollouts_and_no_tokens():
    assert to_rows(torch.zeros(0), torch.zeros(0, dtype=torch.long)).shape == (0, 0)
    assert to_rows(torch.zeros(0), torch.tensor([0, 0])).shape == (2, 0)


def test_places_of_some_rollouts():
    lengths = torch.tensor([2, 1, 3, 0])
    assert places_of(torch.tensor([2, 3, 0]), lengths).tolist() == [3, 4, 5, 0, 1]
    assert places_of(torch.tensor([], dtype=torch.long), lengths).shape == (0,)


def test_gaps_close_and_reopen():
    mask = torch.tensor([[0, 1, 1, 0, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)
    values = torch.arange(15.0).view(3, 5) + 1
    rows = compact(mask)
    closed = rows.close(values)
    assert closed.tolist() == [[2, 3, 5, 0, 0], [0, 0, 0, 0, 0], [11, 12, 13, 14, 15]]
    assert rows.mask_BT.sum(1).tolist() == [3, 0, 5]
    assert torch.equal(rows.reopen(closed), values * mask)
    assert torch.equal(rows.reopen(closed, fill=-1), values.masked_fill(~mask, -1))


@pytest.mark.parametrize("length", [0, 1, 2, 3, 7, 8, 33])
def test_scan_is_the_recursion(length):
    generator = torch.Generator().manual_seed(length)
    values, decay = torch.randn(2, 4, length, dtype=torch.float64, generator=generator).unbind(0)
    expected, after = torch.zeros_like(values), torch.zeros(4, dtype=torch.float64)
    for t in range(length - 1, -1, -1):
        after = expected[:, t] = values[:, t] + decay[:, t] * after
    torch.testing.assert_close(reverse_scan(values, decay), expected, rtol=1e-12, atol=1e-12)
