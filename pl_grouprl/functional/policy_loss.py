"""Policy losses per token, from log-probabilities and advantages on the flat token axis.

Legend: B rollouts, N response tokens of all rollouts in one row (flat, no padding).

With r the ratio of a token's probability under the policy to that under the policy before the update, A its advantage:

| name | loss of a token | TRL | verl |
|---|---|---|---|
| `ppo` | -min(r A, clip(r) A), see `clipped_policy_loss` | `grpo`, `dr_grpo`, `dapo`, `bnpo` | `vanilla` |
| `gspo` | the same with the ratio of the sequence, see `gspo_policy_loss` | sequence level (below) | `gspo` |
| `cispo` | -clip(r) A log p, see `cispo_policy_loss` | `cispo` | `cispo` |

Log-ratios are limited to [-20, 20] before `exp` (to at most 10 in `gspo`), as in verl; TRL does not limit them, and
the two agree inside. Tokens outside the mask get a loss of exactly 0 and no gradient, whatever their inputs hold.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pl_grouprl.functional.aggregation import aggregate as aggregate
from pl_grouprl.functional.masked import check_flat, check_mask, sum_per_rollout
from pl_grouprl.functional.registry import build

MAX_LOG_RATIO = 20.0
"""Limit of a token's log-ratio, in nats."""

MAX_SEQUENCE_LOG_RATIO = 10.0
"""Limit of a sequence's mean log-ratio, in nats."""


class PolicyLoss(NamedTuple):
    """A policy loss before aggregation, and what was clipped.

    Attributes:
        per_token_N: Loss of each token, shape [N], to be minimised; 0 outside the mask. Give it to `aggregate`.
        metrics: Detached sums `clip_ratio/{low,high,region}_mean`. Add them over micro-batches and ranks and divide
            by the sum of `metric_count`: a ratio of sums does not depend on how the step was cut.
        metric_count: What the sums are divided by: trained tokens, or trained rollouts where a ratio belongs to a whole
            sequence.
    """

    per_token_N: Tensor
    metrics: dict[str, Tensor]
    metric_count: Tensor


class PolicyLossFunction(Protocol):
    """What the registered classes build: one call for every loss, whether it needs the rollouts or not."""

    def __call__(
        self,
        policy_logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        mask_N: Tensor,
        rollout_index_N: Tensor,
        num_rollouts: int,
    ) -> PolicyLoss:
        """Return the loss of each token."""


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

    L = -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A), and with `delta`, where A < 0, at most delta |A| (dual
    clip, arXiv:1912.09729). TRL's `delta` limits the ratio itself, verl's `clip_ratio_c` the loss where A < 0; they
    are equal if and only if delta >= 1 + epsilon_high, so a smaller one is refused. (verl's default is 3, TRL's is
    none.)

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far the ratio may fall below 1.
        epsilon_high: How far it may rise above 1; None takes `epsilon`.
        delta: Limit of the ratio where the advantage is negative; None sets none.

    Returns:
        The loss of each token; clip fractions count tokens whose gradient the clip removed. With `delta` there is
        `clip_ratio/delta_mean` too (verl's `pg_clipfrac_lower`).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = _clip_bounds(epsilon, epsilon_high, delta)
    log_ratio_N, advantages_N = _masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))
    flags = _clip_flags(ratio_N, advantages_N, low, high)
    if delta is not None:
        loss_N = torch.where(advantages_N < 0, torch.minimum(loss_N, -advantages_N * delta), loss_N)
        flags["clip_ratio/delta_mean"] = (ratio_N > delta) & (advantages_N < 0)
    metrics = {name: (flag_N & mask_N).sum() for name, flag_N in flags.items()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, mask_N.sum())


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

    The value of every token is that of its sequence, s_i = exp(mean over the trained tokens of log r). The gradient
    is taken per token, through sg[s_i] p / sg[p] (eq. 14, as in verl): with one advantage per rollout it equals the
    gradient of s_i itself (as in TRL) under every aggregation, and with an advantage per token it is the paper's
    GSPO-token.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N]; others do not enter the mean.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be whole.
        num_rollouts: B.
        epsilon: How far the sequence ratio may fall below 1 (3e-4 in the paper).
        epsilon_high: How far it may rise above 1 (4e-4 in the paper); None takes `epsilon`.

    Returns:
        The loss of each token; the paper's aggregation is `seq-mean-token-mean`. Clip fractions count rollouts, as in
        TRL (verl counts tokens).

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = _clip_bounds(epsilon, epsilon_high)
    check_flat(policy_logprobs_N=policy_logprobs_N, rollout_index_N=rollout_index_N)
    log_ratio_N, advantages_N = _masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    lengths_B = sum_per_rollout(mask_N.to(log_ratio_N.dtype), rollout_index_N, num_rollouts)
    mean_B = sum_per_rollout(log_ratio_N.detach(), rollout_index_N, num_rollouts) / lengths_B.clamp(min=1)
    through_N = (policy_logprobs_N - policy_logprobs_N.detach()).masked_fill(~mask_N, 0)  # 0, with the token's gradient
    ratio_N = (mean_B[rollout_index_N] + through_N).clamp(max=MAX_SEQUENCE_LOG_RATIO).exp()
    loss_N = torch.maximum(-advantages_N * ratio_N, -advantages_N * ratio_N.clamp(low, high))
    share_N = mask_N / lengths_B.clamp(min=1)[rollout_index_N]
    flags = _clip_flags(ratio_N, advantages_N, low, high)
    metrics = {name: (flag_N * share_N).sum() for name, flag_N in flags.items()}
    return PolicyLoss(loss_N.masked_fill(~mask_N, 0), metrics, (lengths_B > 0).sum())


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
    gradient. With `epsilon_max`, w = min(r, epsilon_max) as in ScaleRL (arXiv:2510.13786, 5.0 there). TRL's
    `epsilon_high` means that `epsilon_max` when its loss is `cispo`.

    Args:
        policy_logprobs_N: Log-probabilities under the policy, with gradient, shape [N].
        old_logprobs_N: The same before the update, without gradient, shape [N].
        advantages_N: Advantage of each token, shape [N].
        mask_N: True for tokens to train, bool, shape [N].
        epsilon: How far the weight may fall below 1; 1 or more sets no lower bound.
        epsilon_high: How far it may rise above 1; None takes `epsilon`.
        epsilon_max: Upper bound of the weight itself, in place of both others.

    Returns:
        The loss of each token; clip fractions count tokens whose weight was changed, whatever their advantage.

    Raises:
        ValueError: If shapes differ or an option is out of range.
    """
    low, high = _weight_bounds(epsilon, epsilon_high, epsilon_max)
    log_ratio_N, advantages_N = _masked_inputs(policy_logprobs_N, old_logprobs_N, advantages_N, mask_N)
    ratio_N = log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    loss_N = -ratio_N.clamp(low, high) * advantages_N * policy_logprobs_N.masked_fill(~mask_N, 0)
    metrics = {
        "clip_ratio/low_mean": ((ratio_N < low) & mask_N).sum(),
        "clip_ratio/high_mean": ((ratio_N > high) & mask_N).sum(),
    }
    metrics["clip_ratio/region_mean"] = metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    return PolicyLoss(loss_N, metrics, mask_N.sum())


@dataclass(frozen=True)
class ClippedPolicyLoss:
    """`clipped_policy_loss` with its options, as a configuration names it.

    Attributes:
        epsilon: How far the ratio may fall below 1.
        epsilon_high: How far it may rise above 1; None takes `epsilon`.
        delta: Limit of the ratio where the advantage is negative; None sets none.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        _clip_bounds(self.epsilon, self.epsilon_high, self.delta)

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
        """Return `clipped_policy_loss`; the rollouts are not looked at."""
        return clipped_policy_loss(
            policy_logprobs_N,
            old_logprobs_N,
            advantages_N,
            mask_N=mask_N,
            **asdict(self),
        )


@dataclass(frozen=True)
class GSPOPolicyLoss:
    """`gspo_policy_loss` with its options, as a configuration names it.

    Attributes:
        epsilon: How far the sequence ratio may fall below 1.
        epsilon_high: How far it may rise above 1; None takes `epsilon`.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None

    def __post_init__(self) -> None:
        _clip_bounds(self.epsilon, self.epsilon_high)

    def __call__(
        self,
        policy_logprobs_N: Tensor,
        old_logprobs_N: Tensor,
        advantages_N: Tensor,
        *,
        mask_N: Tensor,
        rollout_index_N: Tensor,
        num_rollouts: int,
    ) -> PolicyLoss:
        """Return `gspo_policy_loss`."""
        return gspo_policy_loss(
            policy_logprobs_N,
            old_logprobs_N,
            advantages_N,
            mask_N=mask_N,
            rollout_index_N=rollout_index_N,
            num_rollouts=num_rollouts,
            **asdict(self),
        )


@dataclass(frozen=True)
class CISPOPolicyLoss:
    """`cispo_policy_loss` with its options, as a configuration names it.

    Attributes:
        epsilon: How far the weight may fall below 1.
        epsilon_high: How far it may rise above 1; None takes `epsilon`.
        epsilon_max: Upper bound of the weight itself, in place of both others.
    """

    epsilon: float = 0.2
    epsilon_high: float | None = None
    epsilon_max: float | None = None

    def __post_init__(self) -> None:
        _weight_bounds(self.epsilon, self.epsilon_high, self.epsilon_max)

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
        """Return `cispo_policy_loss`; the rollouts are not looked at."""
        return cispo_policy_loss(
            policy_logprobs_N,
            old_logprobs_N,
            advantages_N,
            mask_N=mask_N,
            **asdict(self),
        )


POLICY_LOSSES: dict[str, Callable[..., PolicyLossFunction]] = {
    "ppo": ClippedPolicyLoss,
    "gspo": GSPOPolicyLoss,
    "cispo": CISPOPolicyLoss,
}


def make_policy_loss(name: str, **options: Any) -> PolicyLossFunction:
    """Build the loss registered as `name`; an option that it does not take is a ValueError."""
    return build(POLICY_LOSSES, "policy_loss", name, options)


def _masked_inputs(policy_N: Tensor, old_N: Tensor, advantages_N: Tensor, mask_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-ratios and advantages, 0 where the mask is false."""
    check_flat(policy_logprobs_N=policy_N, old_logprobs_N=old_N, advantages_N=advantages_N, mask_N=mask_N)
    check_mask(mask_N)
    return (policy_N - old_N).masked_fill(~mask_N, 0), advantages_N.masked_fill(~mask_N, 0)


def _clip_flags(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> dict[str, Tensor]:
    is_low_N = (ratio_N < low) & (advantages_N < 0)
    is_high_N = (ratio_N > high) & (advantages_N > 0)
    return {
        "clip_ratio/low_mean": is_low_N,
        "clip_ratio/high_mean": is_high_N,
        "clip_ratio/region_mean": is_low_N | is_high_N,
    }


def _clip_bounds(epsilon: float, epsilon_high: float | None, delta: float | None = None) -> tuple[float, float]:
    high = epsilon if epsilon_high is None else epsilon_high
    for name, value in (("epsilon", epsilon), ("epsilon_high", high)):
        if value < 0:
            raise ValueError(f"{name} is {value}; it must be 0 or larger.")
    if delta is not None and delta < 1 + high:
        raise ValueError(f"delta is {delta}; it must be at least 1 + epsilon_high = {1 + high}, or None for no limit.")
    return 1 - epsilon, 1 + high


def _weight_bounds(epsilon: float, epsilon_high: float | None, epsilon_max: float | None) -> tuple[float, float]:
    if epsilon_max is None:
        return _clip_bounds(epsilon, epsilon_high)
    if epsilon_high is not None:
        raise ValueError(
            f"epsilon_high is {epsilon_high} and epsilon_max is {epsilon_max}; both bound the weight from above, so "
            "set only one."
        )
    if epsilon_max <= 0:
        raise ValueError(f"epsilon_max is {epsilon_max}; it must be larger than 0.")
    return 0.0, epsilon_max
