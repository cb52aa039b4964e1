"""The critic's loss, and the explained variance of the returns.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, check_mask

_ROUNDING = 8
"""Returns count as constant if they vary by fewer ulps than this."""


class ValueLoss(NamedTuple):
    """A value loss before aggregation.

    Attributes:
        per_token_N: Loss of each token, shape [N], to be minimized; 0 outside the mask. Pass it to `aggregate`.
        metrics: Detached sum `value/clip_ratio`, the number of tokens whose clipped value has the larger error. Add it
            over micro-batches and ranks, and divide by the sum of `metric_count`.
        metric_count: Tokens in the mask.
    """

    per_token_N: Tensor
    metrics: dict[str, Tensor]
    metric_count: Tensor


def clipped_value_loss(
    values_N: Tensor,
    old_values_N: Tensor,
    returns_N: Tensor,
    *,
    mask_N: Tensor,
    cliprange: float | None = None,
) -> ValueLoss:
    """PPO's value loss: the larger of the squared errors of each value and of its clipped version.

    L = 0.5 max((V - R)^2, (clip(V, old - cliprange, old + cliprange) - R)^2), as in OpenAI's baselines (ppo2) and
    verl (`cliprange_value`). Without `cliprange`, 0.5 (V - R)^2.

    Args:
        values_N: Values of the critic, with gradient, shape [N].
        old_values_N: The same before the update, shape [N].
        returns_N: Targets of the values, shape [N].
        mask_N: True for tokens to train, bool, shape [N]; inputs elsewhere may be NaN.
        cliprange: How far a value may move from the old one, in units of the return; None for no limit.

    Returns:
        The loss of each token.

    Raises:
        ValueError: If shapes differ or the range is not positive.
    """
    if cliprange is not None and not 0 < cliprange < math.inf:
        raise ValueError(f"cliprange is {cliprange}; it must be larger than 0, or None for no limit.")
    check_flat(values_N=values_N, old_values_N=old_values_N, returns_N=returns_N, mask_N=mask_N)
    check_mask(mask_N)
    values_N, old_values_N, returns_N = (x.masked_fill(~mask_N, 0) for x in (values_N, old_values_N, returns_N))
    error_N = (values_N - returns_N).square()
    if cliprange is None:
        return ValueLoss(0.5 * error_N, {"value/clip_ratio": torch.zeros_like(mask_N.sum())}, mask_N.sum())
    clipped_N = torch.clamp(values_N, old_values_N - cliprange, old_values_N + cliprange)
    clipped_error_N = (clipped_N - returns_N).square()
    is_clipped_N = ~(clipped_error_N <= error_N)  # also for NaN, as in torch.maximum, whose gradient ties would split
    loss_N = 0.5 * torch.where(is_clipped_N, clipped_error_N, error_N)
    return ValueLoss(loss_N, {"value/clip_ratio": is_clipped_N.sum()}, mask_N.sum())


@torch.no_grad()
def explained_variance(
    values_N: Tensor,
    returns_N: Tensor,
    *,
    mask_N: Tensor,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Fraction of the returns' variance that the values explain, 1 - Var(R - V) / Var(R).

    1 is a perfect critic (up to a constant), 0 is as good as a constant, below 0 is worse. Computed in float64, in two
    passes. verl adds 1e-5 to Var(R); here it is exact.

    Args:
        values_N: Values of the critic, shape [N].
        returns_N: Returns, shape [N].
        mask_N: True for tokens that count, bool, shape [N]; inputs elsewhere may be NaN.
        reduce: Sums a 1-D float64 tensor over ranks; called twice. None for one rank.

    Returns:
        A float64 scalar; NaN if the returns are equal up to rounding, or there are none.

    Raises:
        ValueError: If the shapes differ.
    """
    check_flat(values_N=values_N, returns_N=returns_N, mask_N=mask_N)
    check_mask(mask_N)
    add = (lambda sums: sums) if reduce is None else reduce
    returns, values = returns_N[mask_N].double(), values_N[mask_N].double()
    errors = returns - values
    size = returns.square().sum() + values.square().sum()
    count, return_sum, error_sum, size = add(torch.stack([mask_N.sum().double(), returns.sum(), errors.sum(), size]))
    mean = return_sum / count
    spreads = torch.stack([(errors - error_sum / count).square().sum(), (returns - mean).square().sum()])
    error_spread, return_spread = add(spreads)
    is_constant = return_spread <= (_ROUNDING * torch.finfo(returns_N.dtype).eps) ** 2 * size
    return torch.where(is_constant, torch.nan, 1 - error_spread / return_spread)
