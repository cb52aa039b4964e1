import math
import threading

import pytest
import torch

from pl_grouprl.functional.losses import clipped_value_loss, explained_variance


def _tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def _ones(n):
    return torch.ones(n, dtype=torch.bool)


# Old values 0, 0.9, 0; the range 0.5 holds the first and the third at 0.5.
VALUES, OLD, RETURNS = _tensor([1.0, 1.0, 0.9]), _tensor([0.0, 0.9, 0.0]), _tensor([0.8, 2.0, 0.0])


def test_clipped_by_hand():
    """Errors 0.2 against 0.3 (held), -1 in both, 0.9 against 0.5 (held): the larger square counts."""
    values = VALUES.clone().requires_grad_()
    result = clipped_value_loss(values, OLD, RETURNS, mask_N=_ones(3), cliprange=0.5)
    torch.testing.assert_close(result.per_token_N, _tensor([0.045, 0.5, 0.405]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), values)
    torch.testing.assert_close(gradient, _tensor([0.0, -1.0, 0.9]))
    assert result.metrics == {"value/clip_ratio": 1}
    assert result.metric_count == 3


def test_without_a_clip_range_it_is_half_the_squared_error():
    values = VALUES.clone().requires_grad_()
    result = clipped_value_loss(values, OLD, RETURNS, mask_N=_ones(3))
    torch.testing.assert_close(result.per_token_N, _tensor([0.02, 0.5, 0.405]))
    (gradient,) = torch.autograd.grad(result.per_token_N.sum(), values)
    torch.testing.assert_close(gradient, VALUES - RETURNS)
    assert result.metrics == {"value/clip_ratio": 0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("cliprange", [0.2, 1.0])
def test_against_a_loop(dtype, cliprange):
    generator = torch.Generator().manual_seed(1)
    values, old, returns = torch.randn(3, 40, generator=generator, dtype=dtype)
    mask = torch.rand(40, generator=generator) < 0.8
    values.requires_grad_()
    losses, clipped = torch.zeros(40, dtype=dtype), 0
    for i in mask.nonzero().flatten().tolist():
        held = min(max(values[i].item(), old[i].item() - cliprange), old[i].item() + cliprange)
        plain, other = (values[i].item() - returns[i].item()) ** 2, (held - returns[i].item()) ** 2
        losses[i] = max(plain, other) / 2
        clipped += other > plain
    result = clipped_value_loss(values, old, returns, mask_N=mask, cliprange=cliprange)
    torch.testing.assert_close(result.per_token_N, losses)
    assert result.metrics["value/clip_ratio"] == clipped > 0
    assert result.metric_count == mask.sum()


@pytest.mark.parametrize("cliprange", [None, 0.5])
def test_masked_tokens_do_not_reach_loss_or_gradient(cliprange):
    values = _tensor([1.0, math.nan, math.inf]).requires_grad_()
    junk = _tensor([0.5, math.nan, -math.inf])
    result = clipped_value_loss(values, junk, junk, mask_N=torch.tensor([True, False, False]), cliprange=cliprange)
    result.per_token_N.sum().backward()
    assert result.per_token_N[1:].tolist() == [0, 0]
    assert values.grad.tolist() == [0.5, 0.0, 0.0]


def test_explained_variance_by_hand():
    """Returns 1 and 3 have the variance 1; errors 0 and 1 have 1/4."""
    returns = _tensor([1.0, 3.0, math.nan])
    mask = torch.tensor([True, True, False])

    def explained(values):
        return explained_variance(_tensor(values), returns, mask_N=mask).item()

    assert explained([1.0, 2.0, math.nan]) == pytest.approx(0.75)
    assert explained([1.0, 3.0, 0.0]) == 1.0
    assert explained([11.0, 13.0, 0.0]) == 1.0  # a constant error is no variance
    assert explained([5.0, 5.0, 0.0]) == 0.0
    assert explained([3.0, 1.0, 0.0]) == -3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_explained_variance_is_nan_where_returns_do_not_vary(dtype):
    returns = torch.full((1000,), 0.7, dtype=dtype)
    values = torch.linspace(0, 1, 1000, dtype=dtype)
    assert explained_variance(values, returns, mask_N=_ones(1000)).isnan()
    assert explained_variance(values, returns, mask_N=torch.zeros(1000, dtype=torch.bool)).isnan()
    assert explained_variance(values, torch.zeros(1000, dtype=dtype), mask_N=_ones(1000)).isnan()
    returns[0] = 0.701
    assert explained_variance(values, returns, mask_N=_ones(1000)).isfinite()


def test_explained_variance_far_from_zero():
    """Returns around 1e8 with a spread of 1: squares before centring would have nothing left of it."""
    assert explained_variance(1e8 + _tensor([1.0, 2.0]), 1e8 + _tensor([1.0, 3.0]), mask_N=_ones(2)) == 0.75


def test_explained_variance_over_ranks_equals_one_rank():
    generator = torch.Generator().manual_seed(2)
    values, returns = 3 + torch.randn(2, 50, generator=generator)
    whole = explained_variance(values, returns, mask_N=_ones(50))
    cuts = [slice(0, 20), slice(20, 50), slice(50, 50)]
    barrier, posted, results = threading.Barrier(len(cuts), timeout=30), {}, {}

    def run(rank):
        def reduce(sums):
            barrier.wait()
            posted[rank] = sums
            barrier.wait()
            return sum(posted[other] for other in range(len(cuts)))

        chosen = cuts[rank]
        results[rank] = explained_variance(
            values[chosen], returns[chosen], mask_N=_ones(len(values[chosen])), reduce=reduce
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(cuts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(len(cuts)):
        torch.testing.assert_close(results[rank], whole, atol=1e-12, rtol=1e-12)


def test_errors_name_the_argument():
    x = torch.zeros(3)
    with pytest.raises(ValueError, match="cliprange is 0"):
        clipped_value_loss(x, x, x, mask_N=_ones(3), cliprange=0)
    with pytest.raises(ValueError, match=r"returns_N has shape \(2,\) and values_N \(3,\)"):
        clipped_value_loss(x, x, x[:2], mask_N=_ones(3))
    with pytest.raises(ValueError, match="mask_N has dtype"):
        explained_variance(x, x, mask_N=torch.ones(3))


@pytest.mark.parametrize("reward", [0.0, 0.7, 1.0])
def test_explained_variance_of_returns_that_differ_by_rounding_alone(reward):
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)) * 0.03
    returns = (reward - values) + values  # as advantages plus values give them
    assert explained_variance(values, returns, mask_N=torch.ones(500, dtype=torch.bool)).isnan()


def test_small_returns_are_not_mistaken_for_rounding():
    returns = torch.tensor([1.0, 1.001, 1.002, 1.003])
    assert float(explained_variance(returns - 0.5, returns, mask_N=torch.ones(4, dtype=torch.bool))) == pytest.approx(1)
