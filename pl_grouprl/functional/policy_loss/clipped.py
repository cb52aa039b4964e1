"""PPO's clipped loss, with DAPO's asymmetric bounds and the dual clip.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.policy_loss.base import (
    PolicyLoss,
    clip_bounds,
    clip_flags,
    clipped_surrogate,
    count_flags,
    masked_inputs,
    token_ratio,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss


@register_policy_loss("ppo", is_zero_without_advantages=True)
def clipped_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> PolicyLoss:
    """Clip the ratio of each token (PPO, arXiv:1707.06347, eq. 7; asymmetric as in DAPO, arXiv:2503.14476).

    L = -min(ratio A, clip(ratio, 1 - epsilon, 1 + epsilon_high) A). With `delta`, the loss of tokens with A < 0 is at
    most delta |A| (dual clip, arXiv:1912.09729). TRL's `delta` bounds the ratio itself, verl's `clip_ratio_c` the loss
    where A < 0. These are equal if and only if delta >= 1 + epsilon_high, so smaller values are refused. (verl's
    default is 3, TRL's is no bound.)

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far the ratio may fall below 1.
        epsilon_high: How far it may rise above 1; None means `epsilon`.
        delta: Upper bound of the ratio where the advantage is negative; None for no bound.

    Returns:
        The loss of each token; clip fractions count tokens whose gradient the clip removed. With `delta`, the metrics
        include `clip_ratio/delta_mean` (verl's `pg_clipfrac_lower`).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = clip_bounds(epsilon, epsilon_high, delta)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N)
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    flags = clip_flags(ratio_N, advantages_N, low, high)
    if delta is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -advantages_N * delta), loss_N)
        flags["clip_ratio/delta_mean"] = (ratio_N > delta) & (advantages_N < 0)
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), count_flags(flags, mask_N), mask_N.sum())
