"""Advantages of whole rollouts from the rewards of their group.

Legend: B rollouts, P prompts (groups). What holds for all of them (NaN, equal rewards, dtypes) is said in `groups`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.groups import gather_groups

REWARD_SCALES = ("group", "batch", "none")


@torch.no_grad()
def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], *, scale: str = "group", eps: float = 1e-6
) -> Tensor:
    """Centre each reward on its group's mean and divide by a standard deviation (GRPO, arXiv:2402.03300, eq. 3).

    Equal to verl's `grpo` and, with `eps=1e-4`, to TRL's `scale_rewards` of the same name.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        scale: `group` divides by the group's standard deviation, `batch` by that of all rewards, `none` does not
            divide (Dr. GRPO, arXiv:2503.20783). Standard deviations are the unbiased ones (n - 1).
        eps: Added to the standard deviation, in units of the reward.

    Returns:
        Advantages, shape [B]. Exactly zero where all rewards of a group are equal, or where there is none.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, or the scale is unknown.
    """
    _check_scale(scale)
    groups = gather_groups(rewards, group_ids)
    centred_B = groups.centred()
    if scale == "group":
        centred_B = centred_B / (groups.std()[groups.index_B] + eps)
    elif scale == "batch":
        valid = groups.rewards_B[groups.valid_B]
        std = valid.std() if len(valid) > 1 else valid.new_zeros(())
        centred_B = centred_B / (std + eps)
    return groups.finish(centred_B)


@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Tensor:
    """Subtract from each reward the mean of the others of its group (RLOO, arXiv:2402.14740).

    Equal to verl's `rloo` and to TRL's RLOO without `normalize_advantages`.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.

    Returns:
        Advantages, shape [B], in units of the reward. Exactly zero where all rewards of a group are equal.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    groups = gather_groups(rewards, group_ids)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    factor_P = groups.count_P / (groups.count_P - 1).clamp(min=1)
    return groups.finish(groups.centred() * factor_P[groups.index_B])


@dataclass(frozen=True)
class GroupRelativeAdvantage:
    """`group_relative_advantages` with its options, as a configuration names it.

    Attributes:
        scale: `group`, `batch` or `none`.
        eps: Added to the standard deviation.
    """

    scale: str = "group"
    eps: float = 1e-6

    def __post_init__(self) -> None:
        _check_scale(self.scale)

    def __call__(self, rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Tensor:
        """Return `group_relative_advantages` of rewards [B] and group ids [B], shape [B]."""
        return group_relative_advantages(rewards, group_ids, scale=self.scale, eps=self.eps)


@dataclass(frozen=True)
class RLOOAdvantage:
    """`rloo_advantages`, as a configuration names it."""

    def __call__(self, rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Tensor:
        """Return `rloo_advantages` of rewards [B] and group ids [B], shape [B]."""
        return rloo_advantages(rewards, group_ids)


def _check_scale(scale: str) -> None:
    if scale not in REWARD_SCALES:
        raise ValueError(f"scale is {scale!r}; it must be one of {', '.join(REWARD_SCALES)}.")
