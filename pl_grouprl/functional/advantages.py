"""Advantages of whole rollouts from the rewards of their group.

Legend: B rollouts, P prompts (groups).

Groups come by explicit ids, in any order and of any size. What holds for every estimator here:
- a reward of NaN means that the rollout has none: it is left out of every statistic and gets 0 (the caller leaves it
  out of the loss as well, by its mask);
- a group whose rewards are all equal, or that has fewer than two, gets exactly 0, whatever rounding does to its mean;
- statistics are taken in float64 and returned in the dtype of the rewards (at least float32), without gradient.

verl gives a group of one rollout its reward as advantage (`grpo`, `rloo`); TRL gives 0, as here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.registry import build

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
    groups = _gather_groups(rewards, group_ids)
    centred_B = groups.rewards_B - groups.mean_P[groups.index_B]
    if scale == "group":
        squares_B = centred_B.square().masked_fill(~groups.valid_B, 0)
        std_P = (groups.sum(squares_B) / (groups.count_P - 1).clamp(min=1)).sqrt()
        centred_B = centred_B / (std_P[groups.index_B] + eps)
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
    groups = _gather_groups(rewards, group_ids)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    factor_P = groups.count_P / (groups.count_P - 1).clamp(min=1)
    return groups.finish((groups.rewards_B - groups.mean_P[groups.index_B]) * factor_P[groups.index_B])


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


AdvantageEstimator = Callable[[Tensor, "Tensor | Sequence[int]"], Tensor]
"""Rewards [B] and group ids [B] to advantages [B]."""

ADVANTAGE_ESTIMATORS: dict[str, Callable[..., AdvantageEstimator]] = {
    "grpo": GroupRelativeAdvantage,
    "rloo": RLOOAdvantage,
}


def make_advantage_estimator(name: str, **options: Any) -> AdvantageEstimator:
    """Build the estimator registered as `name`; an option that it does not take is a ValueError."""
    return build(ADVANTAGE_ESTIMATORS, "advantage_estimator", name, options)


class _Groups(NamedTuple):
    rewards_B: Tensor  # float64, 0 where there is none
    valid_B: Tensor  # bool: has a reward
    index_B: Tensor  # int64: group of each rollout, 0..P-1
    count_P: Tensor  # float64: rewards in the group
    mean_P: Tensor
    spread_P: Tensor  # bool: the largest reward of the group exceeds the smallest
    dtype: torch.dtype

    def sum(self, values_B: Tensor) -> Tensor:
        return torch.zeros_like(self.count_P).index_add(0, self.index_B, values_B)

    def finish(self, advantages_B: Tensor) -> Tensor:
        trained_B = self.valid_B & self.spread_P[self.index_B]
        return advantages_B.masked_fill(~trained_B, 0).to(self.dtype)


def _gather_groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> _Groups:
    ids_B = torch.as_tensor(group_ids, device=rewards.device)
    _check_rewards(rewards, ids_B)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    valid_B = ~rewards.isnan()
    rewards_B = rewards.to(torch.float64).masked_fill(~valid_B, 0)
    unique_P, index_B = ids_B.unique(return_inverse=True)

    zeros_P = rewards_B.new_zeros(len(unique_P))
    count_P = zeros_P.index_add(0, index_B, valid_B.to(torch.float64))
    mean_P = zeros_P.index_add(0, index_B, rewards_B) / count_P.clamp(min=1)
    highest_B, lowest_B = rewards_B.masked_fill(~valid_B, -torch.inf), rewards_B.masked_fill(~valid_B, torch.inf)
    highest_P = (zeros_P - torch.inf).scatter_reduce(0, index_B, highest_B, "amax")
    lowest_P = (zeros_P + torch.inf).scatter_reduce(0, index_B, lowest_B, "amin")
    return _Groups(rewards_B, valid_B, index_B, count_P, mean_P, highest_P > lowest_P, dtype)


def _check_rewards(rewards: Tensor, ids_B: Tensor) -> None:
    if rewards.dim() != 1:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; pass one scalar per rollout, shape [B].")
    if ids_B.dim() != 1 or len(ids_B) != len(rewards):
        raise ValueError(
            f"group_ids has {ids_B.numel()} entries (shape {tuple(ids_B.shape)}) for {len(rewards)} rewards; "
            "pass the prompt's number once per rollout, in the order of the rewards."
        )
    if len(ids_B) and (ids_B.is_floating_point() or ids_B.is_complex() or ids_B.dtype == torch.bool):
        raise ValueError(f"group_ids has dtype {ids_B.dtype}; pass integers, one number per prompt.")
    infinite = rewards.isinf().nonzero().flatten()
    if len(infinite):
        raise ValueError(
            f"rewards is infinite for rollouts {infinite[:5].tolist()} ({len(infinite)} in all); "
            "return a finite reward, or NaN for a rollout that is not to be trained."
        )


def _check_scale(scale: str) -> None:
    if scale not in REWARD_SCALES:
        raise ValueError(f"scale is {scale!r}; it must be one of {', '.join(REWARD_SCALES)}.")
