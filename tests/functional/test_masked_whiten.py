"""Whitening over the valid entries of a batch, on one rank and on several."""

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from pl_grouprl.functional.masked import bool_mask, masked_whiten

NAN = math.nan


def test_by_hand():
    # Valid 1, 3, 5, 7: mean 4, squares 9 + 1 + 1 + 9 = 20, variance 20 / 3.
    values = torch.tensor([[1.0, NAN, 3.0], [5.0, 7.0, math.inf]])
    mask = torch.tensor([[1, 0, 1], [1, 1, 0]])
    std = math.sqrt(20 / 3)
    expected = torch.tensor([[-3 / std, 0.0, -1 / std], [1 / std, 3 / std, 0.0]])
    torch.testing.assert_close(masked_whiten(values, mask), expected)
    torch.testing.assert_close(masked_whiten(values, mask.bool()), expected)


def test_epsilon_is_added_to_the_variance():
    # Variance 2e-8, of which 1e-8 is added: values divided by sqrt(3e-8).
    values = torch.tensor([0.0, 2e-4], dtype=torch.float64)
    whitened = masked_whiten(values, torch.ones(2))
    torch.testing.assert_close(whitened, torch.tensor([-1e-4, 1e-4], dtype=torch.float64) / math.sqrt(3e-8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.7, -1e6, 1e-9, 0.0])
@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 1000])
def test_equal_values_give_exactly_zero(dtype, value, count):
    values = torch.full((1001,), value, dtype=dtype)
    mask = torch.arange(1001) < count
    assert masked_whiten(values, mask).abs().max() == 0


def test_ranks_whiten_with_global_statistics():
    generator = torch.Generator().manual_seed(0)
    values = 100 + torch.randn(6, 11, generator=generator)
    mask = torch.rand(6, 11, generator=generator) < 0.6
    mask[4:] = False  # the last rank has nothing valid
    parts = [(values[rows], mask[rows]) for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]

    split = whiten_on_ranks(parts)
    torch.testing.assert_close(torch.cat(split), masked_whiten(values, mask), atol=1e-6, rtol=1e-6)


def whiten_on_ranks(parts):
    """Whiten each part in a thread of its own, the sums added over all threads."""
    barrier, sums = threading.Barrier(len(parts)), [None] * len(parts)

    def whiten(rank):
        def reduce(mine):
            sums[rank] = mine
            barrier.wait(timeout=60)
            total = torch.stack(sums).sum(dim=0)
            barrier.wait(timeout=60)
            return total

        return masked_whiten(*parts[rank], reduce=reduce)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(whiten, range(len(parts))))


def test_dtype_gradient_and_inputs():
    values = torch.tensor([1.0, 2.0, 4.0]).bfloat16().requires_grad_()
    whitened = masked_whiten(values, torch.ones(3, dtype=torch.bool))
    assert whitened.dtype == torch.float32
    assert not whitened.requires_grad
    assert values.tolist() == [1.0, 2.0, 4.0]
    assert masked_whiten(torch.zeros(0, 3), torch.zeros(0, 3)).shape == (0, 3)


def test_integer_masks_and_errors():
    assert bool_mask(torch.tensor([1.0, 0.0])).tolist() == [True, False]
    with pytest.raises(ValueError, match=r"mask has the entry 2; pass bool, or 0 and 1"):
        masked_whiten(torch.zeros(2), torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"mask has shape \(3,\) and values \(2,\); pass one per value"):
        masked_whiten(torch.zeros(2), torch.ones(3))
