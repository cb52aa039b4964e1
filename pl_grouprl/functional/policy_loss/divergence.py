"""DPPO: drops the gradient of tokens whose probability moved too far, measured by a divergence, not by the ratio.

Each token's distribution is reduced to two outcomes: this token, or any other. With the token's probability p under
the policy and q before the update, the divergences are

| name | divergence |
|---|---|
| `dppo_tv` | |p - q| (total variation) |
| `dppo_kl` | q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (KL of old against new) |

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.policy_loss.base import (
    PolicyLoss,
    check_positive,
    count_flags,
    epsilons,
    flags_by_side,
    masked_inputs,
    token_ratio,
)
from pl_grouprl.functional.policy_loss.registry import register_policy_loss

_REST_FLOOR = 1e-8
"""Added to the probability of the other outcome before its logarithm, as in verl."""


@register_policy_loss("dppo_tv", is_zero_without_advantages=True)
def dppo_tv_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    epsilon: float = 0.15,
    epsilon_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> PolicyLoss:
    """Bound the change of each token's probability by total variation (DPPO-Binary-TV, arXiv:2602.04879).

    L = -sg[min(r, clip_ratio_c)] A log p for tokens within the bounds, 0 for others. A token is outside if A > 0 and
    p - q > epsilon_high, or A < 0 and q - p > epsilon: it may always move back. Defaults are the paper's;
    verl takes the thresholds from `clip_ratio_low` and `clip_ratio_high`, and its actor's `clip_ratio_c` defaults to 3.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, log q, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far a probability may fall.
        epsilon_high: How far it may rise; None means `epsilon`.
        clip_ratio_c: Upper bound of the weight.

    Returns:
        The loss of each token. Clip fractions count tokens outside (verl also counts those with A = 0);
        `clip_ratio/delta_mean` counts tokens inside whose weight was clipped (verl's `pg_clipfrac_lower`).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = epsilons(epsilon, epsilon_high)
    check_positive(clip_ratio_c=clip_ratio_c)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    policy_logprobs_N, old_logprobs_N = _without_masked(policy_logprobs_N, old_logprobs_N, mask_N)
    rise_N = policy_logprobs_N.detach().exp() - old_logprobs_N.exp()
    outside = (rise_N < -low, rise_N > high)
    return _policy_gradient_within(policy_logprobs_N, log_ratio_N, advantages_N, outside, mask_N, clip_ratio_c)


@register_policy_loss("dppo_kl", is_zero_without_advantages=True)
def dppo_kl_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    epsilon: float = 0.05,
    epsilon_high: float | None = None,
    clip_ratio_c: float = 20.0,
) -> PolicyLoss:
    """Bound the change of each token's probability by the KL of two outcomes (DPPO-Binary-KL, arXiv:2602.04879).

    As `dppo_tv_policy_loss`, but with the KL of the module's table: a token is outside if A > 0, p > q and
    KL > epsilon_high, or A < 0, p < q and KL > epsilon. Like verl, adds 1e-8 to 1 - p and 1 - q, which matters for p
    above 1 - 1e-6.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, log q, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: Largest divergence of a falling probability, in nats.
        epsilon_high: Largest divergence of a rising one, in nats; None means `epsilon`.
        clip_ratio_c: Upper bound of the weight.

    Returns:
        The loss of each token; metrics as in `dppo_tv_policy_loss`.

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = epsilons(epsilon, epsilon_high)
    check_positive(clip_ratio_c=clip_ratio_c)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    policy_logprobs_N, old_logprobs_N = _without_masked(policy_logprobs_N, old_logprobs_N, mask_N)
    prob_N, old_prob_N = policy_logprobs_N.detach().exp(), old_logprobs_N.exp()
    other_N = torch.log((1 - old_prob_N + _REST_FLOOR) / (1 - prob_N + _REST_FLOOR))
    kl_N = (1 - old_prob_N) * other_N - old_prob_N * log_ratio_N.detach()
    outside = ((kl_N > low) & (prob_N < old_prob_N), (kl_N > high) & (prob_N > old_prob_N))
    return _policy_gradient_within(policy_logprobs_N, log_ratio_N, advantages_N, outside, mask_N, clip_ratio_c)


def _without_masked(policy_N: Tensor, old_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    return policy_N.masked_fill(~mask_N, 0), old_N.masked_fill(~mask_N, 0)


def _policy_gradient_within(
    policy_logprobs_N: Tensor,
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    outside: tuple[Tensor, Tensor],
    mask_N: Tensor,
    clip_ratio_c: float,
) -> PolicyLoss:
    """The policy gradient, weighted by the ratio, without tokens that are outside and would move further out.

    `outside` marks tokens whose probability fell too far, and those whose probability rose too far.
    """
    flags = flags_by_side(outside[0] & (advantages_N < 0), outside[1] & (advantages_N > 0))
    is_outside_N = flags["clip_ratio/region_mean"]
    ratio_N = token_ratio(log_ratio_N.detach())
    flags["clip_ratio/delta_mean"] = (ratio_N > clip_ratio_c) & ~is_outside_N
    loss_N = -ratio_N.clamp(max=clip_ratio_c) * advantages_N * policy_logprobs_N
    return PolicyLoss(loss_N.masked_fill(is_outside_N, 0), count_flags(flags, mask_N), mask_N.sum())
