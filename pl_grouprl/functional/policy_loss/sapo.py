"""SAPO: a smooth gate instead of a clip.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.policy_loss.base import (
    PolicyLoss,
    check_positive,
    masked_inputs,
    token_ratio,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss


@register_policy_loss("sapo", is_zero_without_advantages=True)
def sapo_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
) -> PolicyLoss:
    """Pass the ratio of each token through a sigmoid gate (Soft Adaptive Policy Optimization, arXiv:2511.20347).

    L = -A sigmoid(T (r - 1)) 4 / T, where the temperature T depends on the sign of A. The gate's slope is 1 at r = 1,
    so the on-policy gradient is the plain policy gradient, and falls off smoothly on both sides, faster for a larger T.
    verl calls the temperatures `tau_pos` and `tau_neg`, and always aggregates by `seq-mean-token-mean`, as does the
    paper.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        sapo_temperature_pos: T where the advantage is positive.
        sapo_temperature_neg: T elsewhere.

    Returns:
        The loss of each token; no metrics, since nothing is clipped.

    Raises:
        ValueError: If shapes differ or a temperature is not positive.
    """
    check_positive(sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    temperature_N = torch.full_like(log_ratio_N, sapo_temperature_neg).masked_fill(
        advantages_N > 0, sapo_temperature_pos
    )
    gate_N = torch.sigmoid(temperature_N * (token_ratio(log_ratio_N) - 1)) * (4 / temperature_N)
    return PolicyLoss((-gate_N * advantages_N).masked_fill(~mask_N, 0), {}, mask_N.sum())
