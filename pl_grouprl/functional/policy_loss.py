"""Policy losses per token, from log-probabilities and advantages on the flat token axis.

p is a token's probability under the policy, r the ratio of p to the probability before the update, A the token's
advantage, and s the ratio of its sequence, the geometric mean of the tokens' r:

| name | loss of a token | TRL | verl |
|---|---|---|---|
| `ppo` | -min(r A, clip(r) A), see `clipped_policy_loss` | `grpo`, `dr_grpo`, `dapo`, `bnpo` | `vanilla` |
| `gspo` | -min(s A, clip(s) A), see `gspo_policy_loss` | sequence level (below) | |
| `gspo_token` | the same value, a gradient per token, see `gspo_token_policy_loss` | | `gspo` |
| `gmpo` | -A times the geometric mean of clipped ratios, see `gmpo_policy_loss` | experimental | `geo_mean` |
| `cispo` | -clip(r) A log p, see `cispo_policy_loss` | `cispo` | `cispo` |
| `gpg` | -A log p, see `gpg_policy_loss` | | `gpg` |
| `dro` | -A log p + (log r)^2 dro_beta / 2, see `dro_policy_loss` | | `dro` |
| `sapo` | -A gate(r), see `sapo_policy_loss` | `sapo` | `sapo` |
| `clip_cov` | `ppo`, but 0 for a few tokens, see `clip_cov_policy_loss` | | `clip_cov` |
| `kl_cov` | -r A and a penalty for a few tokens, see `kl_cov_policy_loss` | | `kl_cov` |
| `vespo` | -phi(product of the sequence's r) A log p, see `vespo_policy_loss` | `vespo` | |
| `dppo_tv`, `dppo_kl` | -min(r, c) A log p up to a divergence, see `dppo_tv_policy_loss` | | same names |

TRL's sequence level is `importance_sampling_level="sequence"`.

All losses take the same tensors, and return a `PolicyLoss`; their other arguments are options:

- `policy_logprobs_N`: log-probabilities under the policy, with gradient, shape [N];
- `old_logprobs_N`: the same before the update, without gradient, shape [N];
- `advantages_N`: advantage of each token, shape [N];
- `mask_N`: True for tokens to train, bool, shape [N];
- `rollout_index_N`, `num_rollouts`: for losses of whole sequences, the rollout of each token, int64, shape [N], and B.
  Rollouts must be complete;
- `importance_weights_N`: for losses that fold the sampler's correction into their own ratio, `importance_weights` of a
  token kind, shape [N], or None for no correction. All other losses are multiplied by them.

They raise a ValueError if shapes differ or an option is out of range.

Log-ratios are clamped to [-20, 20] before `exp` (to at most 10 in `gspo` and `gspo_token`), as in most of verl's
losses; TRL does not clamp them. Within these limits all three agree. Tokens outside the mask have a loss of exactly 0
and no gradient, whatever their inputs.

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, sum_per_rollout
from pl_grouprl.functional.registry import F, RegisteredFunction, choose
from pl_grouprl.utilities.options import check_finite, check_options

__all__ = [
    "MAX_LOG_RATIO",
    "MAX_SEQUENCE_LOG_RATIO",
    "POLICY_LOSSES",
    "PolicyLoss",
    "PolicyLossFunction",
    "cispo_policy_loss",
    "clip_cov_policy_loss",
    "clipped_policy_loss",
    "dppo_kl_policy_loss",
    "dppo_tv_policy_loss",
    "dro_policy_loss",
    "gmpo_policy_loss",
    "gpg_policy_loss",
    "gspo_policy_loss",
    "gspo_token_policy_loss",
    "kl_cov_policy_loss",
    "make_policy_loss",
    "register_policy_loss",
    "sapo_policy_loss",
    "vespo_policy_loss",
]

MAX_LOG_RATIO = 20.0
"""Limit of a token's log-ratio, in nats."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Limit of a sequence's mean log-ratio, in nats."""

_LEAST_LOG_WEIGHT = math.log(1e-8)


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


# The registry.


@dataclass(frozen=True, repr=False)
class PolicyLossFunction(RegisteredFunction):
    """A registered policy loss bound to its options; all losses are called the same way.

    Attributes:
        compares_tokens: Whether the loss of a token depends on the other tokens of the call, and so on how a mini-batch
            is split into micro-batches.
        is_zero_without_advantages: Whether loss and gradient of a rollout are 0 if all its advantages are.
    """

    compares_tokens: bool = False
    is_zero_without_advantages: bool = False

    argument: ClassVar[str] = "policy_loss"
    data: ClassVar[tuple[str, ...]] = ("mask_N", "rollout_index_N", "num_rollouts", "importance_weights_N")

    @property
    def uses_rollouts(self) -> bool:
        """Whether the loss of a token depends on its rollout."""
        return "rollout_index_N" in self.needs

    @property
    def uses_importance_weights(self) -> bool:
        """Whether the loss applies the correction for the sampler itself."""
        return "importance_weights_N" in self.needs

    def __call__(
        self, policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, **data: Any
    ) -> PolicyLoss:
        """Return the loss of each token; see the module for the tensors.

        Raises:
            ValueError: If the function returns another shape than [N], which would broadcast.
        """
        loss: PolicyLoss = self.call(policy_logprobs_N, old_logprobs_N, advantages_N, **data)
        check_flat(policy_logprobs_N=policy_logprobs_N, per_token_N=loss.per_token_N)
        return loss


POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""The registered losses."""


def register_policy_loss(
    name: str, *, compares_tokens: bool = False, is_zero_without_advantages: bool = False
) -> Callable[[F], F]:
    """Register a function as a policy loss; a decorator, `@register_policy_loss("name")`.

    The function takes `(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, ...)`, all of shape [N], and
    returns a `PolicyLoss`. It may also take `rollout_index_N` and `num_rollouts`. Its other keyword-only arguments are
    the loss's options; it should raise a ValueError for values out of range.

    Args:
        name: Its name as a value of the option `policy_loss`. The last function registered under a name counts.
        compares_tokens: The loss of a token depends on the other tokens of the call.
        is_zero_without_advantages: Loss and gradient of a rollout are 0 if all its advantages are. Updates then omit
            the rollouts that the estimator `vine` does not train.
    """

    def register(function: F) -> F:
        POLICY_LOSSES[name] = PolicyLossFunction(
            name, function, compares_tokens=compares_tokens, is_zero_without_advantages=is_zero_without_advantages
        )
        return function

    return register


def make_policy_loss(name: str, /, **options: Any) -> PolicyLossFunction:
    """Return the loss registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown.
    """
    return choose(POLICY_LOSSES, "policy_loss", name, options)


# Steps that the losses share.


def masked_inputs(policy_N: Tensor, old_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Check the inputs; return log-ratios and advantages, 0 where the mask is false."""
    check_flat(policy_logprobs_N=policy_N, old_logprobs_N=old_N, advantages_N=advantages_N, mask_N=mask_N)
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
    names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
    return dict(zip(names, (is_low_N, is_high_N, is_low_N | is_high_N), strict=True))


def finish(loss_N: Tensor, mask_N: Tensor, flags: dict[str, Tensor] | None = None) -> PolicyLoss:
    """Zero the loss outside the mask, and count the flagged tokens inside it."""
    metrics = {name: (flag_N & mask_N).sum() for name, flag_N in (flags or {}).items()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


def epsilons(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """Check and return the lower and the upper epsilon, which defaults to the lower."""
    high = epsilon if epsilon_high is None else epsilon_high
    options = {"epsilon": epsilon, "epsilon_high": high}
    check_options({name: (value, value >= 0, "0 or larger") for name, value in options.items()})
    return epsilon, high


def clip_bounds(epsilon: float, epsilon_high: float | None) -> tuple[float, float]:
    """Check both options and return the bounds of the ratio."""
    low, high = epsilons(epsilon, epsilon_high)
    return 1 - low, 1 + high


def check_positive(**options: float) -> None:
    """Raise a ValueError for an option that is 0, negative or not finite."""
    check_options({name: (value, value > 0, "larger than 0") for name, value in options.items()})


# PPO's clipped loss, which is GRPO's too.


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
    where A < 0. These are equal if and only if delta >= 1 + epsilon_high, so smaller values are an error. (verl's
    default is 3, TRL's is no bound.)

    Options:
        epsilon: How far the ratio may fall below 1.
        epsilon_high: How far it may rise above 1; defaults to `epsilon`.
        delta: Upper bound of the ratio where the advantage is negative; no bound if None.

    Returns:
        The loss of each token; clip fractions count tokens whose gradient the clip removed. With `delta`, the metrics
        include `clip_ratio/delta_mean` (verl's `pg_clipfrac_lower`).
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    check_finite(delta=delta)
    if delta is not None and delta < high:
        raise ValueError(f"delta is {delta}; it must be at least 1 + epsilon_high = {high}, or None for no limit.")
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N)
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    flags = clip_flags(ratio_N, advantages_N, low, high)
    if delta is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -advantages_N * delta), loss_N)
        flags["clip_ratio/delta_mean"] = (ratio_N > delta) & (advantages_N < 0)
    return finish(loss_N, mask_N, flags)


# Clip-Cov and KL-Cov restrain the few tokens whose updates lower the policy's entropy most.
#
# A token's term in the covariance of log-probability and advantage, (log p - mean) (A - mean), measures how much its
# update lowers the policy's entropy (arXiv:2505.22617, section 4). Clip-Cov drops the gradient of some tokens with
# large terms; KL-Cov pulls the tokens with the largest terms back towards the old policy.
#
# Means and selection are over the trained tokens of one call, i.e. one micro-batch, as in verl, so unlike the other
# losses, these two depend on the size of the micro-batches. The number of selected tokens is the ratio times the
# trained tokens, rounded down, but at least one, so small micro-batches select a larger fraction (the paper has no
# such minimum).


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

    L is the loss of `clipped_policy_loss`, but 0 for the chosen tokens. They are drawn from tokens that the ratio's
    clip does not affect and whose covariance lies between the bounds. verl draws with the global generator; here tokens
    are ranked by a hash of their log-probability (as float32), so the same inputs give the same choice on every device,
    in any order and after a resume.

    Options:
        epsilon: How far the ratio may fall below 1 (1 in the paper, which relies on the covariance instead).
        epsilon_high: How far it may rise above 1; defaults to `epsilon`.
        clip_cov_ratio: Fraction of the trained tokens to choose.
        clip_cov_lb: Lower bound of a chosen token's covariance.
        clip_cov_ub: Upper bound of a chosen token's covariance.

    Returns:
        The loss of each token; the clip fractions of `clipped_policy_loss`, and `clip_ratio/cov_mean` for the chosen
        tokens (verl's `pg_clipfrac`).
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    check_finite(clip_cov_ub=clip_cov_ub)
    check_options(
        {
            "clip_cov_ratio": (clip_cov_ratio, 0 < clip_cov_ratio <= 1, "a fraction of the tokens, in (0, 1]"),
            "clip_cov_lb": (clip_cov_lb, clip_cov_lb < clip_cov_ub, f"smaller than clip_cov_ub ({clip_cov_ub})"),
        }
    )
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N)
    flags = clip_flags(ratio_N, advantages_N, low, high)
    covariance_N = covariance_terms(policy_logprobs_N, advantages_N, mask_N)
    candidates_N = mask_N & ~flags["clip_ratio/region_mean"]
    candidates_N &= (covariance_N > clip_cov_lb) & (covariance_N < clip_cov_ub)
    chosen_N = choose_largest(hash_bits(policy_logprobs_N), candidates_N, mask_N, clip_cov_ratio)
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high).masked_fill(chosen_N, 0)
    return finish(loss_N, mask_N, flags | {"clip_ratio/cov_mean": chosen_N})


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

    Options:
        kl_cov_ratio: Fraction of the trained tokens that are penalized.
        ppo_kl_coef: Weight of the penalty.

    Returns:
        The loss of each token, and `clip_ratio/cov_mean` for the penalized tokens.
    """
    check_options(
        {
            "kl_cov_ratio": (kl_cov_ratio, 0 < kl_cov_ratio <= 1, "a fraction of the tokens, in (0, 1]"),
            "ppo_kl_coef": (ppo_kl_coef, ppo_kl_coef >= 0, "0 or larger"),
        }
    )
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    covariance_N = covariance_terms(policy_logprobs_N, advantages_N, mask_N)
    chosen_N = choose_largest(covariance_N, mask_N, mask_N, kl_cov_ratio)
    penalty_N = ppo_kl_coef * log_ratio_N.abs().masked_fill(~chosen_N, 0)
    loss_N = penalty_N - advantages_N * token_ratio(log_ratio_N)
    return finish(loss_N, mask_N, {"clip_ratio/cov_mean": chosen_N})


def covariance_terms(policy_logprobs_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> Tensor:
    """Return (log p - mean) (A - mean) of each trained token, without gradient; arbitrary elsewhere."""
    count = mask_N.sum().clamp(min=1)
    logprobs_N = policy_logprobs_N.detach().masked_fill(~mask_N, 0)
    return (advantages_N - advantages_N.sum() / count) * (logprobs_N - logprobs_N.sum() / count)


def choose_largest(values_N: Tensor, eligible_N: Tensor, mask_N: Tensor, fraction: float) -> Tensor:
    """Flag the eligible tokens with the largest values, a fraction of the mask but at least one, without synchronizing.

    Of equal values, the first are chosen.
    """
    number = (mask_N.sum().to(torch.float64) * fraction).floor().clamp(min=1)
    order_N = values_N.masked_fill(~eligible_N, -torch.inf).argsort(descending=True, stable=True)
    rank_N = torch.empty_like(order_N)
    rank_N[order_N] = torch.arange(len(order_N), device=order_N.device)
    return eligible_N & (rank_N < number)


def hash_bits(values_N: Tensor) -> Tensor:
    """Hash the bits of each value, as float32 (multiply and shift, 32 bits)."""
    low_bits = 0xFFFFFFFF
    bits_N = values_N.detach().to(torch.float32).contiguous().view(torch.int32).to(torch.int64) & low_bits
    for factor in (0x21F0AAAD, 0x735A2D97):
        bits_N = ((bits_N ^ (bits_N >> 16)) * factor) & low_bits
    return (bits_N ^ (bits_N >> 15)).to(torch.float64)


# DPPO drops the gradient of tokens whose probability moved too far, measured by a divergence, not by the ratio.
#
# Each token's distribution is reduced to two outcomes: this token, or any other. With the token's probability p under
# the policy and q before the update, the divergences are
#
# | name | divergence |
# |---|---|
# | `dppo_tv` | |p - q| (total variation) |
# | `dppo_kl` | q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (KL of old against new) |

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

    Options:
        epsilon: How far a probability may fall.
        epsilon_high: How far it may rise; defaults to `epsilon`.
        clip_ratio_c: Upper bound of the weight.

    Returns:
        The loss of each token. Clip fractions count tokens outside (verl also counts those with A = 0);
        `clip_ratio/delta_mean` counts tokens inside whose weight was clipped (verl's `pg_clipfrac_lower`).
    """
    low, high = epsilons(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    logprobs_N, old_N = (x_N.masked_fill(~mask_N, 0) for x_N in (policy_logprobs_N, old_logprobs_N))
    rise_N = logprobs_N.detach().exp() - old_N.exp()
    return loss_inside(logprobs_N, log_ratio_N, advantages_N, mask_N, rise_N < -low, rise_N > high, clip_ratio_c)


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

    As `dppo_tv_policy_loss`, but with the KL of the table above: a token is outside if A > 0, p > q and
    KL > epsilon_high, or A < 0, p < q and KL > epsilon. Like verl, adds 1e-8 to 1 - p and 1 - q, which matters for p
    above 1 - 1e-6.

    Options:
        epsilon: Largest divergence of a falling probability, in nats.
        epsilon_high: Largest divergence of a rising one, in nats; defaults to `epsilon`.
        clip_ratio_c: Upper bound of the weight.

    Returns:
        The loss of each token; metrics as in `dppo_tv_policy_loss`.
    """
    low, high = epsilons(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    logprobs_N, old_N = (x_N.masked_fill(~mask_N, 0) for x_N in (policy_logprobs_N, old_logprobs_N))
    prob_N, old_prob_N = logprobs_N.detach().exp(), old_N.exp()
    other_N = torch.log((1 - old_prob_N + _REST_FLOOR) / (1 - prob_N + _REST_FLOOR))
    kl_N = (1 - old_prob_N) * other_N - old_prob_N * log_ratio_N.detach()
    fell_N, rose_N = (kl_N > low) & (prob_N < old_prob_N), (kl_N > high) & (prob_N > old_prob_N)
    return loss_inside(logprobs_N, log_ratio_N, advantages_N, mask_N, fell_N, rose_N, clip_ratio_c)


def loss_inside(
    logprobs_N: Tensor,
    log_ratio_N: Tensor,
    advantages_N: Tensor,
    mask_N: Tensor,
    fell_N: Tensor,
    rose_N: Tensor,
    clip_ratio_c: float,
) -> PolicyLoss:
    """The policy gradient weighted by the ratio, without tokens that fell or rose too far and would move further."""
    check_positive(clip_ratio_c=clip_ratio_c)
    flags = flags_by_side(fell_N & (advantages_N < 0), rose_N & (advantages_N > 0))
    is_outside_N = flags["clip_ratio/region_mean"]
    ratio_N = token_ratio(log_ratio_N.detach())
    flags["clip_ratio/delta_mean"] = (ratio_N > clip_ratio_c) & ~is_outside_N
    loss_N = -ratio_N.clamp(max=clip_ratio_c) * advantages_N * logprobs_N
    return finish(loss_N.masked_fill(is_outside_N, 0), mask_N, flags)


# SAPO has a smooth gate instead of a clip.


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

    Options:
        sapo_temperature_pos: T where the advantage is positive.
        sapo_temperature_neg: T elsewhere.

    Returns:
        The loss of each token; no metrics, since nothing is clipped.
    """
    check_positive(sapo_temperature_pos=sapo_temperature_pos, sapo_temperature_neg=sapo_temperature_neg)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    temperature_N = torch.full_like(log_ratio_N, sapo_temperature_neg).masked_fill(
        advantages_N > 0, sapo_temperature_pos
    )
    gate_N = torch.sigmoid(temperature_N * (token_ratio(log_ratio_N) - 1)) * (4 / temperature_N)
    return finish(-gate_N * advantages_N, mask_N)


# Losses with one ratio per sequence: GSPO, GSPO-token, GMPO and VESPO.
#
# The first three use the mean of a rollout's log-ratios, the logarithm of the geometric mean of its tokens' ratios.
# GSPO clips that mean; GMPO clips each token, then takes the mean. Every token has its rollout's loss, so
# `seq-mean-token-mean` gives the mean over rollouts of both papers.


@register_policy_loss("gspo", is_zero_without_advantages=True)
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

    Options:
        epsilon: How far the sequence ratio may fall below 1 (3e-4 in the paper).
        epsilon_high: How far it may rise above 1 (4e-4 in the paper); defaults to `epsilon`.

    Returns:
        The loss of each token; the paper's aggregation is `seq-mean-token-mean`. Clip fractions count rollouts, as in
        TRL (verl counts tokens).
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    mean_B, lengths_B = mean_per_rollout(log_ratio_N, mask_N, rollout_index_N, num_rollouts)
    ratio_N = mean_B.clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()[rollout_index_N]
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    weight_N = mask_N / lengths_B.clamp(min=1)[rollout_index_N]
    flags = clip_flags(ratio_N, advantages_N, low, high)
    metrics = {name: (flag_N * weight_N).sum() for name, flag_N in flags.items()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, (lengths_B > 0).sum())


@register_policy_loss("gspo_token", is_zero_without_advantages=True)
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

    L = -min(s_t A_t, clip(s_t) A_t) with s_t = sg[s] p / sg[p]: the value equals `gspo_policy_loss`, but the
    gradient of each token flows through its own log-probability only. It differs from GSPO if the tokens of a rollout
    have different advantages, as with a critic. verl's `gspo` is this loss.

    Options:
        epsilon: How far the sequence ratio may fall below 1.
        epsilon_high: How far it may rise above 1; defaults to `epsilon`.

    Returns:
        The loss of each token; the paper's aggregation is `seq-mean-token-mean`. Clip fractions count tokens, as in
        verl.
    """
    low, high = clip_bounds(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    mean_B, _ = mean_per_rollout(log_ratio_N.detach(), mask_N, rollout_index_N, num_rollouts)
    zero_N = (policy_logprobs_N - policy_logprobs_N.detach()).masked_fill(~mask_N, 0)  # carries the token's gradient
    ratio_N = (mean_B[rollout_index_N] + zero_N).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss_N = clipped_surrogate(ratio_N, advantages_N, low, high)
    return finish(loss_N, mask_N, clip_flags(ratio_N, advantages_N, low, high))


@register_policy_loss("gmpo", is_zero_without_advantages=True)
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

    Options:
        epsilon: How far a log-ratio may fall below 0, in nats: e^-0.4 is the paper's lower bound of the ratio.
        epsilon_high: How far it may rise above 0, in nats; defaults to `epsilon`.

    Returns:
        The loss of each token; clip fractions count tokens whose gradient the clip removed (verl's count tokens
        outside the bounds on either side).
    """
    low, high = epsilons(epsilon, epsilon_high)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    limited_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero_N = torch.zeros_like(limited_N)
    clipped_N = torch.where(advantages_N < 0, limited_N.clamp(min=-low), zero_N)
    clipped_N = torch.where(advantages_N > 0, limited_N.clamp(max=high), clipped_N)
    mean_B, _ = mean_per_rollout(clipped_N, mask_N, rollout_index_N, num_rollouts)
    loss_N = -advantages_N * mean_B.exp()[rollout_index_N]
    return finish(loss_N, mask_N, clip_flags(log_ratio_N, advantages_N, -low, high))


@register_policy_loss("vespo", is_zero_without_advantages=True)
def vespo_policy_loss(
    policy_logprobs_N: Tensor,
    old_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
    importance_weights_N: Tensor | None = None,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> PolicyLoss:
    """Weight each sequence smoothly by its ratio W (VESPO, arXiv:2602.10693).

    From "VESPO: Variational Sequence-Level Soft Policy Optimization for Stable Off-Policy LLM Training", the gamma
    kernel: L = -sg[phi(W)] A log p with phi(W) = W^k exp(lambda (1 - W)), which is 1 on-policy and falls on both
    sides. W is the product of the ratios of all trained tokens of the rollout, not their geometric mean, times their
    importance weights if the sampler is corrected for. k and lambda depend on the sign of A. Like TRL, limits W and
    each importance weight to [1e-8, e^20].

    Options:
        vespo_k_pos: k where the advantage is 0 or larger: how fast small W lose weight.
        vespo_lambda_pos: lambda there: how fast large W lose weight.
        vespo_k_neg: k where the advantage is negative.
        vespo_lambda_neg: lambda there.

    Returns:
        The loss of each token; TRL's aggregation is `token-mean`. The metric `vespo/phi_seq_mean` is the mean weight
        over tokens, as in TRL.
    """
    check_positive(vespo_lambda_pos=vespo_lambda_pos, vespo_lambda_neg=vespo_lambda_neg)
    check_positive(vespo_k_pos=vespo_k_pos, vespo_k_neg=vespo_k_neg)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    log_weight_N = log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if importance_weights_N is not None:
        weights_N = importance_weights_N.masked_fill(~mask_N, 1)
        log_weight_N = log_weight_N + weights_N.log().clamp(_LEAST_LOG_WEIGHT, MAX_LOG_RATIO)
    log_weight_B = sum_per_rollout(log_weight_N, rollout_index_N, num_rollouts)
    log_weight_N = log_weight_B.clamp(_LEAST_LOG_WEIGHT, MAX_LOG_RATIO)[rollout_index_N]
    is_negative_N = advantages_N < 0
    k_N = torch.full_like(log_weight_N, vespo_k_pos).masked_fill(is_negative_N, vespo_k_neg)
    lambda_N = torch.full_like(log_weight_N, vespo_lambda_pos).masked_fill(is_negative_N, vespo_lambda_neg)
    phi_N = (k_N * log_weight_N - lambda_N * log_weight_N.expm1()).exp()
    loss_N = -phi_N * advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    metrics = {"vespo/phi_seq_mean": phi_N.masked_fill(~mask_N, 0).sum()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


def mean_per_rollout(
    log_ratio_N: Tensor, mask_N: Tensor, rollout_index_N: Tensor, num_rollouts: int
) -> tuple[Tensor, Tensor]:
    """Mean log-ratio (0 outside the mask) over each rollout's trained tokens, and their number."""
    lengths_B = sum_per_rollout(mask_N.to(log_ratio_N.dtype), rollout_index_N, num_rollouts)
    return sum_per_rollout(log_ratio_N, rollout_index_N, num_rollouts) / lengths_B.clamp(min=1), lengths_B


# Weighted policy gradients, -w A log p: CISPO, GPG with w = 1, and DRO, which adds a penalty.


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

    Options:
        epsilon: How far the weight may fall below 1; 1 or more sets no lower bound.
        epsilon_high: How far it may rise above 1; defaults to `epsilon`.
        epsilon_max: Upper bound of the weight itself, instead of the other two.

    Returns:
        The loss of each token; clip fractions count tokens whose weight was clipped, whatever their advantage.
    """
    if epsilon_max is None:
        low, high = clip_bounds(epsilon, epsilon_high)
    elif epsilon_high is not None:
        raise ValueError(f"epsilon_high is {epsilon_high} and epsilon_max is {epsilon_max}; set only one upper bound.")
    else:
        check_positive(epsilon_max=epsilon_max)
        low, high = 0.0, epsilon_max
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = token_ratio(log_ratio_N.detach())
    loss_N = -ratio_N.clamp(low, high) * advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    return finish(loss_N, mask_N, flags_by_side(ratio_N < low, ratio_N > high))


@register_policy_loss("gpg", is_zero_without_advantages=True)
def gpg_policy_loss(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, mask_N: Tensor
) -> PolicyLoss:
    """Return the plain policy gradient, L = -A log p (GPG, arXiv:2504.02546; REINFORCE, Williams 1992).

    There is no ratio and no clip: it is meant for one update per rollout. The paper also rescales advantages to
    compensate for prompts whose rewards are all equal; here, as in verl, that is left to the advantages.

    Options:

    Returns:
        The loss of each token; no metrics, since nothing is clipped.
    """
    _, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    return finish(-advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0), mask_N)


@register_policy_loss("dro")
def dro_policy_loss(
    policy_logprobs_N: Tensor, old_logprobs_N: Tensor, advantages_N: Tensor, *, mask_N: Tensor, dro_beta: float = 1.0
) -> PolicyLoss:
    """Keep the policy near the old one by a squared penalty, not by clipping: L = -A log p + dro_beta / 2 (log r)^2.

    Its gradient per token is, up to a factor, DRO's (direct reward optimization, arXiv:2405.19107), with the
    advantage for r - V and the policy before the update for the reference. Equal to verl's `dro`, which has no
    default for `dro_beta`. The log-ratio is not clamped.

    Options:
        dro_beta: Weight of the penalty.

    Returns:
        The loss of each token; no metrics, since nothing is clipped.
    """
    check_positive(dro_beta=dro_beta)
    log_ratio_N, advantages_N = masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    loss_N = 0.5 * dro_beta * log_ratio_N.square() - advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    return finish(loss_N, mask_N)
