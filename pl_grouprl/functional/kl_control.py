"""The coefficient of a KL penalty: fixed, or adapted to a target KL.

The adaptive one is the proportional controller of Ziegler et al. (arXiv:1909.08593, section 2.2): after each rollout
phase, of n rollouts with a measured KL,

    error = clip(KL / target - 1, -0.2, 0.2)
    coef <- coef * (1 + error * n / horizon)

with the paper's gain of 0.1 written as n / horizon, as in verl. If every rank passes the same KL, the
coefficients stay equal.
"""

from __future__ import annotations

import math

from pl_grouprl.utilities.options import check_options

MAX_ERROR = 0.2
"""The relative distance to the target is clipped to plus or minus this."""

DEFAULT_HORIZON = 10_000
"""Rollouts; verl's default."""


class FixedKLController:
    """A constant coefficient.

    Args:
        coef: Weight of the KL, 0 or larger.

    Raises:
        ValueError: If the coefficient is negative.
    """

    def __init__(self, coef: float) -> None:
        check_options({"coef": (coef, coef >= 0, "0 (no penalty) or larger")})
        self.coef = float(coef)

    def update(self, kl: float, num_rollouts: int) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, float]:
        """Empty: on resume, the configuration sets the coefficient."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Keep the coefficient of the configuration."""


class AdaptiveKLController:
    """A coefficient that rises while the KL is above its target and falls while it is below.

    Args:
        coef: Weight of the KL at the start, larger than 0 (0 could never rise).
        target: Target KL, in the unit passed to `update`.
        horizon: Time scale of the reaction, in rollouts, larger than 0.

    Raises:
        ValueError: If one of them is not positive.
    """

    def __init__(self, coef: float, target: float, horizon: int = DEFAULT_HORIZON) -> None:
        options = {"coef": coef, "target": target, "horizon": horizon}
        range_ = "larger than 0 for an adaptive coefficient"
        check_options({name: (value, value > 0, range_) for name, value in options.items()})
        self.coef = float(coef)
        self.target = float(target)
        self.horizon = horizon

    def update(self, kl: float, num_rollouts: int) -> None:
        """Adapt the coefficient after a rollout phase.

        Args:
            kl: Measured KL of the phase, the same on all ranks. NaN (no measurement) changes nothing.
            num_rollouts: Rollouts of the phase, over all ranks.

        Raises:
            ValueError: If the phase has so many rollouts that the coefficient could turn 0 or negative.
        """
        if num_rollouts * MAX_ERROR >= self.horizon:
            raise ValueError(
                f"horizon is {self.horizon} and a rollout phase has {num_rollouts} rollouts; the coefficient could "
                f"turn negative, so pass a horizon above {math.ceil(num_rollouts * MAX_ERROR)}."
            )
        if math.isnan(kl):
            return
        error = min(max(kl / self.target - 1, -MAX_ERROR), MAX_ERROR)
        self.coef *= 1 + error * num_rollouts / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the coefficient, the only thing that changes."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a saved coefficient; without one (it was fixed before), start from the configuration's."""
        self.coef = float(state.get("coef", self.coef))


def make_kl_controller(
    coef: float, target: float | None = None, horizon: int | None = None
) -> FixedKLController | AdaptiveKLController:
    """Build an adaptive controller if there is a target, else a fixed one.

    Args:
        coef: Weight of the KL (at the start).
        target: Target KL; None keeps the coefficient fixed.
        horizon: Time scale of the reaction, in rollouts; None is `DEFAULT_HORIZON`. Only with a target.

    Returns:
        The controller.

    Raises:
        ValueError: If a number is out of range, or there is a horizon without a target.
    """
    if target is not None:
        return AdaptiveKLController(coef, target, DEFAULT_HORIZON if horizon is None else horizon)
    if horizon is not None:
        raise ValueError(f"horizon is {horizon} and target is None; a fixed coefficient has no horizon. Set a target.")
    return FixedKLController(coef)
