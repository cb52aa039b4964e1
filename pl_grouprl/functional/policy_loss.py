"""Weighted policy gradients, -w A log p: CISPO, GPG with w = 1, and DRO, which adds a penalty."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, check_mask, sum_per_rollout
from pl_grouprl.functional.registry import F, RegisteredFunction, build, registering
from pl_grouprl.utilities.options import check_finite, check_options, describe_value

# Shared by all policy losses: the result type, checks of inputs and options, ratios and clip fractions.
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).

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


# Policy losses by name, with their options.
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).


@dataclass(frozen=True, repr=False)
class PolicyLossFunction(RegisteredFunction):
    """A registered policy loss bound to its options; all losses are called the same way.

    Attributes:
        uses_rollouts: Whether the function takes `rollout_index_N` and `num_rollouts`.
        compares_tokens: Whether the loss of a token depends on the other tokens of the call, and so on how a mini-batch
            is split into micro-batches.
        is_zero_without_advantages: Whether loss and gradient of a rollout are 0 if all its advantages are.
    """

    uses_rollouts: bool = False
    compares_tokens: bool = False
    is_zero_without_advantages: bool = False

    argument: ClassVar[str] = "policy_loss"
    data: ClassVar[tuple[str, ...]] = ("mask_N", "rollout_index_N", "num_rollouts")

    @property
    def takes(self) -> tuple[str, ...]:
        """The mask, and the rollouts if used."""
        return self.data if self.uses_rollouts else self.data[:1]

    def __call__(
        self,
        policy_logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        mask_N: Tensor,
        rollout_index_N: Tensor | None = None,
        num_rollouts: int | None = None,
    ) -> PolicyLoss:
        """Return the loss of each token."""
        rollouts = {"rollout_index_N": rollout_index_N, "num_rollouts": num_rollouts} if self.uses_rollouts else {}
        tensors = (policy_logprobs_N, old_logprobs_N, advantages_N)
        result: PolicyLoss = self.function(*tensors, mask_N=mask_N, **rollouts, **self.options)
        return result

    def try_out(self) -> None:
        """Call the function on two tokens of one rollout, both trained, then both masked (as in a dummy micro-batch).

        Raises:
            TypeError: If it returns anything but a `PolicyLoss` with a loss per token and scalar metrics.
        """
        zeros_N = torch.zeros(2, device="cpu")
        for mask_N in (zeros_N == 0, zeros_N != 0):
            loss = self(zeros_N, zeros_N, zeros_N, mask_N=mask_N, rollout_index_N=zeros_N.long(), num_rollouts=1)
            if not isinstance(loss, PolicyLoss) or loss.per_token_N.shape != zeros_N.shape:
                raise TypeError(
                    f"policy_loss={self.name!r} returned {describe_value(loss)} for two tokens; return a PolicyLoss "
                    "whose per_token_N has one loss for each token, shape [N]."
                )
            numbers = {"metric_count": loss.metric_count} | dict(loss.metrics or {})
            wrong = [name for name, value in numbers.items() if not isinstance(value, Tensor) or value.dim()]
            if loss.metrics is None or wrong:
                raise TypeError(
                    f"policy_loss={self.name!r} returned {', '.join(wrong) or 'metrics=None'}; metrics must map names "
                    "to sums over tokens, and these and metric_count must be tensors of shape []."
                )


POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
"""The registered losses."""


def register_policy_loss(
    name: str,
    *,
    uses_rollouts: bool = False,
    compares_tokens: bool = False,
    is_zero_without_advantages: bool = False,
) -> Callable[[F], F]:
    """Register a function as a policy loss; a decorator, `@register_policy_loss("name")`.

    The function takes `(policy_logprobs_N, old_logprobs_N, advantages_N, *, mask_N, ...)`, all of shape [N], and
    returns a `PolicyLoss`. Its other keyword-only arguments are the loss's options, with their types and defaults; it
    should raise a ValueError for values out of range. It is called on two tokens whenever it is chosen, as a check.

    Args:
        name: Its name as a value of the option `policy_loss`.
        uses_rollouts: The function also takes `rollout_index_N`, the rollout of each token, shape [N], and
            `num_rollouts`.
        compares_tokens: The loss of a token depends on the other tokens of the call.
        is_zero_without_advantages: Loss and gradient of a rollout are 0 if all its advantages are. Updates then leave
            out the rollouts that the estimator `vine` does not train.

    Raises:
        ValueError: If the name belongs to another function.
        TypeError: If the function's arguments do not fit what is declared.
    """
    return registering(
        POLICY_LOSSES,
        PolicyLossFunction,
        name,
        uses_rollouts=uses_rollouts,
        compares_tokens=compares_tokens,
        is_zero_without_advantages=is_zero_without_advantages,
    )


def make_policy_loss(name: str, /, **options: Any) -> PolicyLossFunction:
    """Return the loss registered as `name`, bound to options.

    Raises:
        ValueError: If the name is not registered, or an option is unknown, of the wrong type or out of range.
    """
    return build(POLICY_LOSSES, "policy_loss", name, options)


# PPO's clipped loss, with DAPO's asymmetric bounds and the dual clip.
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).


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


# Clip-Cov and KL-Cov: restrain the few tokens whose updates lower the policy's entropy most.
#
# A token's term in the covariance of log-probability and advantage, (log p - mean) (A - mean), measures how much its
# update lowers the policy's entropy (arXiv:2505.22617, section 4). Clip-Cov drops the gradient of some tokens with
# large
# terms; KL-Cov pulls the tokens with the largest terms back towards the old policy.
#
# Means and selection are over the trained tokens of one call, i.e. one micro-batch, as in verl, so unlike the other
# losses, these two depend on the size of the micro-batches. The number of selected tokens is the ratio times the
# trained
# tokens, rounded down, but at least one, so small micro-batches select a larger fraction (the paper has no such
# minimum).
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).


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


# DPPO: drops the gradient of tokens whose probability moved too far, measured by a divergence, not by the ratio.
#
# Each token's distribution is reduced to two outcomes: this token, or any other. With the token's probability p under
# the policy and q before the update, the divergences are
#
# | name | divergence |
# |---|---|
# | `dppo_tv` | |p - q| (total variation) |
# | `dppo_kl` | q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (KL of old against new) |
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).

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


# SAPO: a smooth gate instead of a clip.
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).


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


# Losses with one ratio per sequence: GSPO, GSPO-token and GMPO.
#
# All three use the mean of a rollout's log-ratios, the logarithm of the geometric mean of its tokens' ratios. GSPO
# clips
# that mean; GMPO clips each token, then takes the mean. Every token has its rollout's loss, so `seq-mean-token-mean`
# gives the mean over rollouts of both papers.
#
# Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding).

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


# Weighted policy gradients, -w A log p: CISPO, GPG with w = 1, and DRO, which adds a penalty.
#
# Legend: N response tokens of all rollouts, concatenated (flat, no padding).


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
