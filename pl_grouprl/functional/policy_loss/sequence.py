"""Losses with one ratio per sequence: GSPO, GSPO-token and GMPO.

All three use the mean of a rollout's log-ratios, the logarithm of the geometric mean of its tokens' ratios. GSPO clips
that mean; GMPO clips each token, then takes the mean. Every token has its rollout's loss, so `seq-mean-token-mean`
gives the mean over rollouts of both papers.

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, sum_per_rollout
from pl_grouprl.functional.policy_loss.base import (
    MAX_LOG_RATIO,
    PolicyLoss,
    clip_bounds,
    clip_flags,
    clipped_surrogate,
    count_flags,
    epsilons,
    flags_by_side,
    masked_inputs,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Limit of a sequence's mean log-ratio, in nats."""


@register_policy_loss("gspo", uses_rollouts=True, is_zero_without_advantages=True)
def gspo_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> PolicyLoss:
    """Clip the ratio of each sequence, the geometric mean of its tokens' ratios (GSPO, arXiv:2507.18071, eq. 5-7).

    Every token has the loss of its sequence, -min(s A, clip(s) A) with s = exp(mean of log r over the trained tokens),
    and the gradient flows through s, as in TRL. verl's `gspo` has the gradient of `gspo_token_policy_loss`; with one
    advantage per rollout the two are equal under every aggregation.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N]; the mean is over these.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete.
        num_rollouts: B.
        epsilon: How far the sequence ratio may fall below 1 (3e-4 in the paper).
        epsilon_high: How far it may rise above 1 (4e-4 in the paper); None means `epsilon`.

    Returns:
        The loss of each token; the paper's aggregation is `seq-mean-token-mean`. Clip fractions count rollouts, as in
        TRL (verl counts tokens).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    mean_B, lengths_B = _mean_per_rollout(log_ratio_N, mask_N, rollout_index_N, num_rollouts)
    ratio_N = mean_B.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()[rollout_index_N]
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    weight_N = mask_N / lengths_B.clamp(min=1)[rollout_index_N]
    flags = clip_flags(ratio_N, advantages_N, low, high)
    metrics = {name: (flag_N * weight_N).sum() for name, flag_N in flags.items()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, (lengths_B > 0).sum())


@register_policy_loss("gspo_token", uses_rollouts=True, is_zero_without_advantages=True)
def gspo_token_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
) -> PolicyLoss:
    """Clip the ratio of each sequence, with a gradient per token (GSPO-token, arXiv:2507.18071, eq. 13-14).

    L = -min(s_t A_t, clip(s_t) A_t) with s_t = sg[s] p / sg[p]: the value is that of `gspo_policy_loss`, but the
    gradient of each token flows through its own log-probability only. It differs from GSPO if the tokens of a rollout
    have different advantages, as with a critic. verl's `gspo` is this loss.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N]; the mean is over these.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete.
        num_rollouts: B.
        epsilon: How far the sequence ratio may fall below 1.
        epsilon_high: How far it may rise above 1; None means `epsilon`.

    Returns:
        The loss of each token; the paper's aggregation is `seq-mean-token-mean`. Clip fractions count tokens, as in
        verl.

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    mean_B, _ = _mean_per_rollout(log_ratio_N.detach(), mask_N, rollout_index_N, num_rollouts)
    zero_N = (policy_logprobs_N - policy_logprobs_N.detach()).masked_fill(~mask_N, 0)  # carries the token's gradient
    ratio_N = (mean_B[rollout_index_N] + zero_N).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    metrics = count_flags(clip_flags(ratio_N, advantages_N, low, high), mask_N)
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


@register_policy_loss("gmpo", uses_rollouts=True, is_zero_without_advantages=True)
def gmpo_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
    epsilon: float = 0.4,
    epsilon_high: float | None = None,
) -> PolicyLoss:
    """Clip the log-ratio of each token, then take the geometric mean of the sequence (GMPO, arXiv:2507.20673).

    L = -A exp(mean of c over the trained tokens), where c = min(log r, epsilon_high) for A > 0, max(log r, -epsilon)
    for A < 0, and 0 for A = 0. Every token has the loss of its rollout (times its own advantage), and the gradient
    reaches every token of the rollout through the mean. So `seq-mean-token-mean` gives the paper's loss and gradient
    exactly, like verl's `geo_mean` (which takes that mean itself, over all rows of a micro-batch; here rollouts without
    a trained token do not count). Under `token-mean`, long rollouts weigh more.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N]; one per rollout in the paper.
        mask_N: True for tokens to train, bool, shape [N]; the mean is over these.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete.
        num_rollouts: B.
        epsilon: How far a log-ratio may fall below 0, in nats: e^-0.4 is the paper's lower bound of the ratio.
        epsilon_high: How far it may rise above 0, in nats; None means `epsilon`.

    Returns:
        The loss of each token; clip fractions count tokens whose gradient the clip removed (verl's count tokens
        outside the bounds on either side).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = epsilons(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    limited_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero_N = torch.zeros_like(limited_N)
    clipped_N = torch.where(advantages_N < 0, limited_N.clamp(min=-low), zero_N)
    clipped_N = torch.where(advantages_N > 0, limited_N.clamp(max=high), clipped_N)
    mean_B, _ = _mean_per_rollout(clipped_N, mask_N, rollout_index_N, num_rollouts)
    loss_N = -advantages_N * mean_B.exp()[rollout_index_N]
    flags = flags_by_side((log_ratio_N < -low) & (advantages_N < 0), (log_ratio_N > high) & (advantages_N > 0))
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), count_flags(flags, mask_N), mask_N.sum())


def _mean_per_rollout(
    log_ratio_N: Tensor, mask_N: Tensor, rollout_index_N: Tensor, num_rollouts: int
) -> tuple[Tensor, Tensor]:
    """Mean log-ratio (0 outside the mask) over each rollout's trained tokens, and their number."""
    check_flat(policy_logprobs_N=log_ratio_N, rollout_index_N=rollout_index_N)
    lengths_B = sum_per_rollout(mask_N.to(log_ratio_N.dtype), rollout_index_N, num_rollouts)
    return sum_per_rollout(log_ratio_N, rollout_index_N, num_rollouts) / lengths_B.clamp(min=1), lengths_B
