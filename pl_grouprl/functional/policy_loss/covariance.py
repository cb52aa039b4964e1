"""Clip-Cov and KL-Cov: restrain the few tokens whose updates lower the policy's entropy most.

A token's term in the covariance of log-probability and advantage, (log p - mean) (A - mean), measures how much its
update lowers the policy's entropy (arXiv:2505.22617, section 4). Clip-Cov drops the gradient of some tokens with large
terms; KL-Cov pulls the tokens with the largest terms back towards the old policy.

Means and selection are over the trained tokens of one call, i.e. one micro-batch, as in verl, so unlike the other
losses, these two depend on the size of the micro-batches. The number of selected tokens is the ratio times the trained
tokens, rounded down, but at least one, so small micro-batches select a larger fraction (the paper has no such minimum).

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.policy_loss.base import (
    PolicyLoss,
    check_positive,
    clip_bounds,
    clip_flags,
    clipped_surrogate,
    count_flags,
    masked_inputs,
    token_ratio,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss
from pl_grouprl.utilities.options import check_finite, check_options


@register_policy_loss("clip_cov", compares_tokens=True)
def clip_cov_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    clip_cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> PolicyLoss:
    """Drop the loss of a few tokens of large covariance, chosen at random (Clip-Cov, arXiv:2505.22617, section 4.2).

    L is that of `clipped_policy_loss`, but 0 for the chosen tokens. They are drawn from those that the ratio's clip
    does not affect and whose covariance lies between the bounds. verl draws with the global generator; here tokens are
    ranked by a hash of their log-probability (as float32), so the same inputs give the same choice on every device, in
    any order and after a resume.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far the ratio may fall below 1 (1 in the paper, which relies on the covariance instead).
        epsilon_high: How far it may rise above 1; None means `epsilon`.
        clip_cov_ratio: Fraction of the trained tokens to choose.
        clip_cov_lb: Lower bound of a chosen token's covariance.
        clip_cov_ub: Upper bound of a chosen token's covariance.

    Returns:
        The loss of each token; the clip fractions of `clipped_policy_loss`, and `clip_ratio/cov_mean` for the chosen
        tokens (verl's `pg_clipfrac`).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    _check_share(clip_cov_ratio=clip_cov_ratio)
    check_finite(clip_cov_lb=clip_cov_lb, clip_cov_ub=clip_cov_ub)
    if not clip_cov_lb < clip_cov_ub:
        raise ValueError(
            f"clip_cov_lb is {clip_cov_lb} and clip_cov_ub is {clip_cov_ub}; no token lies between them, so make the "
            "first one smaller."
        )
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N)
    flags = clip_flags(ratio_N, advantages_N, low, high)
    covariance_N = _covariance_shares(policy_logprobs_N, advantages_N, mask_N)
    candidates_N = mask_N & ~flags["clip_ratio/region_mean"]
    candidates_N &= (covariance_N > clip_cov_lb) & (covariance_N < clip_cov_ub)
    chosen_N = _largest(_hash(policy_logprobs_N), candidates_N, _num_chosen(mask_N, clip_cov_ratio))
    flags["clip_ratio/cov_mean"] = chosen_N
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high).masked_fill(chosen_N | ~mask_N, 0)
    return PolicyLoss(loss_N, count_flags(flags, mask_N), mask_N.sum())


@register_policy_loss("kl_cov", compares_tokens=True)
def kl_cov_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    kl_cov_ratio: float = 2e-4,
    ppo_kl_coef: float = 1.0,
) -> PolicyLoss:
    """Penalize tokens of the largest covariance for leaving the old policy (KL-Cov, arXiv:2505.22617, section 4.2).

    L = -r A, plus ppo_kl_coef times the absolute value of log r for the tokens of the largest covariance. There is no
    clip. The absolute value is verl's (and the authors') estimate of the paper's KL; its gradient is 0 on-policy.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        kl_cov_ratio: Fraction of the trained tokens that are penalized.
        ppo_kl_coef: Weight of the penalty.

    Returns:
        The loss of each token, and `clip_ratio/cov_mean` for the penalized tokens.

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    _check_share(kl_cov_ratio=kl_cov_ratio)
    check_options({"ppo_kl_coef": (ppo_kl_coef, ppo_kl_coef >= 0, "0 or larger")})
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    covariance_N = _covariance_shares(policy_logprobs_N, advantages_N, mask_N)
    chosen_N = _largest(covariance_N, mask_N, _num_chosen(mask_N, kl_cov_ratio))
    penalty_N = ppo_kl_coef * log_ratio_N.abs().masked_fill(~chosen_N, 0)
    loss_N = (penalty_N - advantages_N * token_ratio(log_ratio_N)).masked_fill(~mask_N, 0)
    return PolicyLoss(loss_N, count_flags({"clip_ratio/cov_mean": chosen_N}, mask_N), mask_N.sum())


def _check_share(**options: float) -> None:
    check_positive(**options)
    for name, value in options.items():
        if value > 1:
            raise ValueError(f"{name} is {value}; it is a fraction of the tokens, so at most 1.")


def _covariance_shares(policy_logprobs_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return (log p - mean) (A - mean) of each trained token, without gradient; arbitrary elsewhere."""
    count = mask_N.sum().clamp(min=1)
    logprobs_N = policy_logprobs_N.detach().masked_fill(~mask_N, 0)
    return (advantages_N - advantages_N.sum() / count) * (logprobs_N - logprobs_N.sum() / count)


def _num_chosen(mask_N: Tensor, fraction: float) -> Tensor:
    return (mask_N.sum().to(torch.float64) * fraction).floor().clamp(min=1)


def _largest(values_N: Tensor, eligible_N: Tensor, number: Tensor) -> Tensor:
    """Flag the `number` eligible tokens with the largest values (of equal ones, the first), without synchronizing."""
    order_N = values_N.masked_fill(~eligible_N, -torch.inf).argsort(descending=True, stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return eligible_N & (rank_N < number)


def _hash(values_N: Tensor) -> Tensor:
    """Hash the bits of each value, as float32 (multiply and shift, 32 bits)."""
    low_bits = 0xFFFFFFFF
    bits_N = values_N.detach().to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & low_bits
    for factor in (0x21F0AAAD, 0x735A2D97):
        bits_N = ((bits_N ^ (bits_N >> 16)) * factor) & low_bits
    return (bits_N ^ (bits_N >> 15)).to(torch.float64)
