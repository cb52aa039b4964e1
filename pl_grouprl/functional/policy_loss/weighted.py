"""Weighted policy gradients, -w A log p: CISPO, GPG with w = 1, and DRO, which adds a penalty.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

from torch import Tensor

from pl_grouprl.functional.policy_loss.base import (
    PolicyLoss,
    check_positive,
    clip_bounds,
    count_flags,
    flags_by_side,
    masked_inputs,
    token_ratio,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss


@register_policy_loss("cispo", is_zero_without_advantages=True)
def cispo_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    epsilon_max: float | None = None,
) -> PolicyLoss:
    """Clip the weight of each token's policy gradient instead of its loss (CISPO, arXiv:2506.13585, eq. 4-5).

    L = -sg[w] A log p with w = clip(r, 1 - epsilon, 1 + epsilon_high), as in the paper and in verl; every token keeps a
    gradient. With `epsilon_max`, w = min(r, epsilon_max) as in ScaleRL (arXiv:2510.13786, 5.0 there). TRL calls it
    `epsilon_high` in its loss `cispo`.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far the weight may fall below 1; 1 or more sets no lower bound.
        epsilon_high: How far it may rise above 1; None means `epsilon`.
        epsilon_max: Upper bound of the weight itself, instead of the other two.

    Returns:
        The loss of each token; clip fractions count tokens whose weight was clipped, whatever their advantage.

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = _weight_bounds(epsilon, epsilon_high, epsilon_max)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N.detach())
    loss_N = -ratio_N.clamp(low, high) * advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    return PolicyLoss(loss_N, count_flags(flags_by_side(ratio_N < low, ratio_N > high), mask_N), mask_N.sum())


@register_policy_loss("gpg", is_zero_without_advantages=True)
def gpg_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
) -> PolicyLoss:
    """Return the plain policy gradient, L = -A log p (GPG, arXiv:2504.02546; REINFORCE, Williams 1992).

    There is no ratio and no clip: it is meant for one update per rollout. The paper also rescales advantages to
    compensate for prompts whose rewards are all equal; here, as in verl, that is left to the advantages.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: Only its shape is checked.
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].

    Returns:
        The loss of each token; no metrics, since nothing is clipped.

    Raises:
        ValueError: If shapes differ.
    """
    _, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    return PolicyLoss(-advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0), {}, mask_N.sum())


@register_policy_loss("dro")
def dro_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    dro_beta: float = 1.0,
) -> PolicyLoss:
    """Keep the policy near the old one by a squared penalty, not by clipping: L = -A log p + dro_beta / 2 (log r)^2.

    Its gradient per token is, up to a factor, that of DRO (direct reward optimization, arXiv:2405.19107), with the
    advantage for r - V and the policy before the update for the reference. Equal to verl's `dro`, which has no
    default for `dro_beta`. The log-ratio is not clamped.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        dro_beta: Weight of the penalty.

    Returns:
        The loss of each token; no metrics, since nothing is clipped.

    Raises:
        ValueError: If shapes differ, or `dro_beta` is not positive.
    """
    check_positive(dro_beta=dro_beta)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    loss_N = 0.5 * dro_beta * log_ratio_N.square() - advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    return PolicyLoss(loss_N, {}, mask_N.sum())


def _weight_bounds(epsilon: float, epsilon_high: float | None, epsilon_max: float | None) -> tuple[float, float]:
    if epsilon_max is None:
        return clip_bounds(epsilon, epsilon_high)
    if epsilon_high is not None:
        raise ValueError(
            f"epsilon_high is {epsilon_high} and epsilon_max is {epsilon_max}; both bound the weight from above, so "
            "set only one."
        )
    check_positive(epsilon_max=epsilon_max)
    return 0.0, epsilon_max
