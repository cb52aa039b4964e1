"""Shared by all policy losses: the result type, checks of inputs and options, ratios and clip fractions.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, check_mask
from pl_grouprl.utilities.options import check_finite, check_options

MAX_LOG_RATIO = 20.0
"""Limit of a token's log-ratio, in nats."""


class PolicyLoss(NamedTuple):
    """A policy loss before aggregation, and what was clipped.

    Attributes:
        per_token_N: Loss of each token, shape [N], to be minimized; 0 outside the mask. Pass it to `aggregate`.
        metrics: Detached sums, named `clip_ratio/{low,high,region}_mean` unless a loss documents others. Add them over
            micro-batches and ranks and divide by the sum of `metric_count`; the result does not depend on how the step
            was split. All ranks must return the same names.
        metric_count: Divisor of the sums: the number of trained tokens, or of trained rollouts if a loss has one ratio
            per sequence.
    """

    per_token_N: Tensor
    metrics: dict[str, Tensor]
    metric_count: Tensor


def masked_inputs(policy_N: Tensor, old_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Check the inputs; return log-ratios and advantages, 0 where the mask is false."""
    check_flat(policy_logprobs_N=policy_N, old_logprobs_N=old_N, advantages_N=advantages_N, mask_N=mask_N)
    check_mask(mask_N)
    return (policy_N - old_N).masked_fill(~mask_N, 0), advantages_N.masked_fill(~mask_N, 0)


def token_ratio(log_ratio_N: Tensor) -> Tensor:
    """Return the ratio of each token's probabilities, between e^-20 and e^20."""
    return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_surrogate(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> Tensor:
    """Return PPO's loss -min(r A, clip(r, low, high) A)."""
    return torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))


def clip_flags(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Flag the tokens whose gradient the clip removes, by name of the metric."""
    return flags_by_side((ratio_N < low) & (advantages_N < 0), (ratio_N > high) & (advantages_N > 0))


def flags_by_side(is_low_N: Tensor, is_high_N: Tensor) -> dict[str, Tensor]:
    """Map the metrics' names to flags; the region is either side."""
    return {
        "clip_ratio/low_mean": is_low_N,
        "clip_ratio/high_mean": is_high_N,
        "clip_ratio/region_mean": is_low_N | is_high_N,
    }


def count_flags(flags: dict[str, Tensor], mask_N: Tensor) -> dict[str, Tensor]:
    """Count the flagged tokens inside the mask."""
    return {name: (flag_N & mask_N).sum() for name, flag_N in flags.items()}


def epsilons(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """Check and return the lower and the upper epsilon, which defaults to the lower.

    Raises:
        ValueError: If one is negative or not finite.
    """
    high = epsilon if epsilon_high is None else epsilon_high
    options = {"epsilon": epsilon, "epsilon_high": high}
    check_options({name: (value, value >= 0, "0 or larger") for name, value in options.items()})
    return epsilon, high


def clip_bounds(epsilon: float, epsilon_high: float | None, delta: float | None = None) -> tuple[float, float]:
    """Check all three options and return the bounds of the ratio.

    Raises:
        ValueError: If one is out of range.
    """
    low, high = epsilons(epsilon, epsilon_high)
    check_finite(delta=delta)
    if delta is not None and delta < 1 + high:
        raise ValueError(f"delta is {delta}; it must be at least 1 + epsilon_high = {1 + high}, or None for no limit.")
    return 1 - low, 1 + high


def check_positive(**options: float) -> None:
    """Refuse options that are not larger than 0.

    Raises:
        ValueError: If one is 0, negative or not finite.
    """
    check_options({name: (value, value > 0, "larger than 0") for name, value in options.items()})
