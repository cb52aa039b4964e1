"""Estimates of KL(policy || reference) from the log-probabilities of sampled tokens, and the coefficient of a penalty.

With x = ref_logp - logp and the token sampled from the policy (J. Schulman, "Approximating KL divergence", 2020):

| kind | value | gradient with respect to logp |
|---|---|---|
| `k1` (`kl`) | -x | 1, an expected gradient of zero: for a KL in the reward, useless in a loss |
| `abs` | absolute value of x | sign(-x) |
| `k2` (`mse`) | x^2 / 2 | -x, in expectation the gradient of KL(policy, reference) |
| `k3` (`low_var_kl`) | e^x - x - 1 | 1 - e^x, in expectation the gradient of KL(reference, policy) |
| any with `+` | as without `+` | -x, as for `k2` (straight-through) |

The values of `k1` and `k3` are unbiased, so `k3+` has an unbiased value of low variance and an unbiased gradient.

`bias_corrected_kl` multiplies an estimate by the importance ratio.

TRL has only `k3`, without any clamp. verl has all of these; in `k3` it clamps x to [-20, 20] and then the value to at
most 10. Here x is clamped the same way (e^20 is 4.9e8; beyond it TRL's value differs), but the value only with
`max_value=10.0`. Where a clamp is active, the gradient of a kind without `+` is zero.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_grouprl.utilities.options import check_options

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to plus or minus this before `exp`, in nats (as in verl)."""

KL_KINDS = ("k1", "abs", "k2", "k3")
_ALIASES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"}


def kl_estimate(logp: Tensor, ref_logp: Tensor, kind: str = "k3", *, max_value: float | None = None) -> Tensor:
    """Estimate KL(policy || reference) for each token; the module's table gives the formulas.

    Args:
        logp: Log-probabilities of the sampled tokens under the policy, in nats, any shape.
        ref_logp: The same under the reference, same shape.
        kind: `k1`, `abs`, `k2` or `k3`, or verl's names `kl`, `mse`, `low_var_kl`. A trailing `+` keeps the value and
            uses the gradient of `k2`, that is (logp - ref_logp) times the gradient of logp.
        max_value: Upper limit of the value for `k3`; 10 gives verl's numbers; no limit (as in TRL) if None.

    Returns:
        One estimate per token, in nats, in the shape of `logp`.

    Raises:
        ValueError: If the shapes differ, the kind is unknown, or `max_value` is given for another kind than `k3`.
    """
    if logp.shape != ref_logp.shape:
        raise ValueError(
            f"ref_logp has shape {tuple(ref_logp.shape)} and logp has {tuple(logp.shape)}; pass one value per token."
        )
    base = check_kl_kind(kind)
    if max_value is not None and base != "k3":
        raise ValueError(f"max_value={max_value} has no meaning for kind={kind!r}; leave it None, or use k3.")
    difference = logp - ref_logp
    if base == "k1":
        value = difference
    elif base == "abs":
        value = difference.abs()
    elif base == "k2":
        value = 0.5 * difference.square()
    else:
        log_ratio = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        value = torch.expm1(log_ratio) - log_ratio  # expm1 avoids cancellation if the two policies are close
        value = value if max_value is None else value.clamp(max=max_value)
    if not kind.endswith("+"):
        return value
    surrogate = 0.5 * difference.square()
    return value.detach() + (surrogate - surrogate.detach())


def bias_corrected_kl(logp: Tensor, old_logp: Tensor, ref_logp: Tensor, kind: str = "k3") -> Tensor:
    """Weight the estimate by the importance ratio ("DeepSeek-V3.2", arXiv:2512.02556, section 3.1, eq. 7).

    The estimate is r times `kl_estimate`, where r is the ratio of p to its value before the update, with its gradient.
    For `k1` and `k3`, value and gradient are then unbiased for KL(policy || reference) even off-policy; on-policy the
    value stays, and the gradient of a token gains its value times the gradient of logp. TRL's `use_bias_correction_kl`,
    with the ratio of the token (TRL: of the sequence with `importance_sampling_level="sequence"`).

    Args:
        logp: Log-probabilities of the sampled tokens under the policy, in nats, any shape.
        old_logp: The same before the update, without gradient, same shape.
        ref_logp: The same under the reference, same shape.
        kind: As in `kl_estimate`, without `+`, whose gradient needs no correction.

    Returns:
        One estimate per token, in nats, in the shape of `logp`.

    Raises:
        ValueError: If the shapes differ, or the kind is unknown or ends in `+`.
    """
    if kind.endswith("+"):
        raise ValueError(f"kind is {kind!r}, which has the gradient of k2; a bias correction needs a kind without '+'.")
    ratio = (logp - old_logp).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio * kl_estimate(logp, ref_logp, kind)


def check_kl_kind(kind: str, argument: str = "kind") -> str:
    """Return our name of a kind, without `+`.

    Raises:
        ValueError: If it is unknown; names the caller's argument.
    """
    name = kind.removesuffix("+")
    base = _ALIASES.get(name, name)
    if base not in KL_KINDS:
        known = ", ".join((*KL_KINDS, *_ALIASES))
        raise ValueError(f"{argument} is {kind!r}; it must be one of {known}, with or without '+' at the end.")
    return base


# The coefficient of a KL penalty: fixed, or adapted to a target KL.
#
# The adaptive one is the proportional controller of Ziegler et al. (arXiv:1909.08593, section 2.2): after each rollout
# phase, of n rollouts with a measured KL,
#
#     error = clip(KL / target - 1, -0.2, 0.2)
#     coef <- coef * (1 + error * n / horizon)
#
# with the paper's gain of 0.1 written as n / horizon, as in verl. If every rank passes the same KL, the
# coefficients stay equal.

MAX_ERROR = 0.2
"""The relative distance to the target is clipped to plus or minus this."""

DEFAULT_HORIZON = 10_000
"""Rollouts; verl's default."""


class KLController:
    """The coefficient of a KL penalty: fixed, or rising while the KL is above its target and falling while it is below.

    Args:
        coef: Weight of the KL (at the start), 0 or larger; larger than 0 with a target, as 0 could never rise.
        target: Target KL, in the unit passed to `update`; the coefficient is fixed if None.
        horizon: Time scale of the reaction, in rollouts; defaults to `DEFAULT_HORIZON`. Ignored without a target.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(self, coef: float, target: float | None = None, horizon: int | None = None) -> None:
        self.coef, self.target = float(coef), target
        self.horizon = DEFAULT_HORIZON if horizon is None else horizon
        if target is None:
            check_options({"coef": (coef, coef >= 0, "0 (no penalty) or larger")})
        else:
            options = {"coef": coef, "target": target, "horizon": self.horizon}
            check_options({name: (value, value > 0, "larger than 0 with a target") for name, value in options.items()})

    def update(self, kl: float, num_rollouts: int) -> None:
        """Adapt the coefficient after a rollout phase.

        Args:
            kl: Measured KL of the phase, the same on all ranks. NaN (no measurement) changes nothing.
            num_rollouts: Rollouts of the phase, over all ranks.

        Raises:
            ValueError: If the phase has so many rollouts that the coefficient could turn 0 or negative.
        """
        if self.target is None:
            return
        if num_rollouts * MAX_ERROR >= self.horizon:
            least = math.ceil(num_rollouts * MAX_ERROR)
            phase = f"a rollout phase has {num_rollouts} rollouts"
            raise ValueError(f"horizon is {self.horizon} and {phase}; pass a horizon above {least}.")
        if not math.isnan(kl):
            error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
            self.coef *= 1 + error * num_rollouts / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient if it adapts; a fixed one always comes from the configuration."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved coefficient if it adapts; start from the configuration's if it was fixed before."""
        if self.target is not None:
            self.coef = float(state.get("coef", self.coef))
