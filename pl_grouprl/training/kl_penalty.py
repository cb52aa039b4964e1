"""The KL penalty against the reference policy, in the loss or in the rewards, with a fixed or adaptive coefficient.

Legend: B rollouts, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from pl_grouprl.functional.kl import check_kl_kind, kl_estimate
from pl_grouprl.functional.kl_control import MAX_ERROR, AdaptiveKLController, make_kl_controller
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.utilities.distributed import sum_over_ranks
from pl_grouprl.utilities.options import check_options


class KLPenalty:
    """Penalizes the KL divergence from the reference policy.

    Args:
        beta: Coefficient; the initial one if it adapts. 0 is no penalty.
        kind: `k1`, `abs`, `k2` or `k3`, with or without `+`; see `pl_grouprl.functional.kl`.
        place: `loss` or `reward`.
        target: Target KL per rollout, in nats, for an adaptive coefficient; None keeps it fixed.
        horizon: Time scale of the adaptive coefficient, in rollouts; None is 10,000.

    Attributes:
        controller: Provides the current coefficient, `coef`.

    Raises:
        ValueError: If an option is out of range, or another option disables it.
    """

    def __init__(
        self,
        beta: float = 0.0,
        kind: str = "k3",
        place: Literal["loss", "reward"] = "loss",
        target: float | None = None,
        horizon: int | None = None,
    ) -> None:
        check_options(
            {
                "beta": (beta, 0 <= beta < math.inf, "0 (off) or a larger finite number"),
                "kl_in": (place, place in ("loss", "reward"), "'loss' or 'reward'"),
                "kl_target": (target, target is None or target > 0, "larger than 0, or None"),
                "kl_horizon": (horizon, horizon is None or horizon > 0, "larger than 0, or None"),
            }
        )
        if place == "reward" and beta == 0:
            raise ValueError("kl_in is 'reward' and beta is 0, so there is no penalty; set beta, or leave kl_in out.")
        if target is not None and beta == 0:
            raise ValueError(
                f"kl_target is {target} and beta is 0; an adaptive beta that starts at 0 stays 0. Set an initial beta."
            )
        if horizon is not None and target is None:
            raise ValueError(f"kl_horizon is {horizon} and kl_target is None; a fixed beta ignores it. Set kl_target.")
        check_kl_kind(kind, "kl_type")
        self.controller = make_kl_controller(beta, target=target, horizon=horizon)
        self.kind = kind
        self.place = place
        self.is_used = beta > 0

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.controller.coef

    @property
    def adapts(self) -> bool:
        """Whether the coefficient adapts."""
        return isinstance(self.controller, AdaptiveKLController)

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the penalty is computed before the updates, from old log-probabilities."""
        return self.is_used and (self.place == "reward" or self.adapts)

    @property
    def in_loss(self) -> bool:
        """Whether the penalty is in the loss."""
        return self.is_used and self.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is in the rewards."""
        return self.is_used and self.place == "reward"

    def check_horizon(self, batch_size: int | None, num_generations: int) -> None:
        """Refuse a horizon so short that one batch of rollouts could make the coefficient negative."""
        if isinstance(self.controller, AdaptiveKLController) and batch_size is not None:
            least = MAX_ERROR * batch_size * num_generations
            if self.controller.horizon <= least:
                raise ValueError(
                    f"kl_horizon is {self.controller.horizon} with {batch_size} prompts of {num_generations} rollouts "
                    f"in a batch; beta could turn negative, so pass one above {least:g}."
                )

    def of_rewards(self, buffer: RolloutBuffer, device: torch.device) -> Tensor:
        """Compute the penalty to subtract from each token's reward, and adapt the coefficient.

        A penalty in the rewards uses the coefficient before this adaptation; one in the loss uses the adapted one.

        Args:
            buffer: With `old_logprobs` and `ref_logprobs` if `needs_old_logprobs`; metrics are added to it.
            device: Device for communication.

        Returns:
            Penalties, shape [N], on the CPU.
        """
        mask_N = buffer.joined("loss_mask")
        penalty_N = torch.zeros(len(mask_N))
        if not self.is_used:
            return penalty_N
        if self.needs_old_logprobs:
            logprobs = buffer.joined("old_logprobs"), buffer.joined("ref_logprobs")
            kl_N = kl_estimate(*logprobs, self.kind).masked_fill(~mask_N, 0)
            counts = [mask_N.sum(), buffer.trained_episodes().sum()]
            total, tokens, episodes = sum_over_ranks([kl_N.sum(), *counts], device)
            if self.place == "reward":
                penalty_N = self.coef * kl_N
                buffer.metrics |= {"kl": total / max(tokens, 1.0), "kl_coef": self.coef}
            if episodes:
                self.controller.update(total / episodes, int(episodes))
        buffer.metrics.setdefault("kl_coef", self.coef)
        return penalty_N
