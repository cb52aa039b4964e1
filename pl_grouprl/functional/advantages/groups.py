"""Group statistics of rewards, the first step of every group-based estimator.

Legend: B rollouts, P prompts (groups).

Groups are given by explicit ids, in any order and of any size. Conventions of all group-based estimators:
- a NaN reward means that the rollout has none: it is left out of all statistics and its advantage is 0 (callers also
  mask it out of the loss);
- a group whose rewards are all equal up to rounding (`differ`), or with fewer than two, gets exactly 0;
- statistics are computed in float64 and returned in the dtype of the rewards (at least float32), without gradient.

The only rollout of a group gets an advantage of 0, as in TRL; in verl it gets its reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import differ


class Groups(NamedTuple):
    """Rewards, the group of each, and statistics per group.

    Attributes:
        rewards_B: float64, 0 where a rollout has none.
        valid_B: True for rollouts with a reward.
        index_B: Group of each rollout, int64 in [0, P), in the order of the sorted ids.
        count_P: Rewards of each group, float64.
        mean_P: Their mean, 0 where there is none.
        spread_P: True where the rewards of the group differ.
        dtype: Dtype of the results.
    """

    rewards_B: Tensor
    valid_B: Tensor
    index_B: Tensor
    count_P: Tensor
    mean_P: Tensor
    spread_P: Tensor
    dtype: torch.dtype

    def sum(self, values_B: Tensor) -> Tensor:
        """Add up the values of each group, shape [P]; they must be 0 where there is no reward."""
        return torch.zeros_like(self.count_P).index_add(0, self.index_B, values_B)

    def largest(self, values_B: Tensor) -> Tensor:
        """Return the largest value of each group, shape [P]; -inf for a group without any."""
        return torch.full_like(self.count_P, -torch.inf).scatter_reduce(0, self.index_B, values_B, "amax")

    def centred(self) -> Tensor:
        """Subtract from each reward the mean of its group, shape [B]; exactly 0 without a reward or without spread."""
        centred_B = self.rewards_B - self.mean_P[self.index_B]
        return centred_B.masked_fill(~self.trained(), 0)

    def std(self) -> Tensor:
        """Return the unbiased standard deviation of each group, shape [P]; 0 for fewer than two rewards."""
        return (self.sum(self.centred().square()) / (self.count_P - 1).clamp(min=1)).sqrt()

    def finish(self, advantages_B: Tensor) -> Tensor:
        """Zero advantages without reward or spread, and cast to the dtype of the results."""
        return advantages_B.masked_fill(~self.trained(), 0).to(self.dtype)

    def trained(self) -> Tensor:
        """Whether each rollout has a reward and its group has spread, bool, shape [B]."""
        return self.valid_B & self.spread_P[self.index_B]


def gather_groups(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Groups:
    """Gather the rewards of each group.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.

    Raises:
        ValueError: If the shapes differ, the ids are not integers, or a reward is infinite.
    """
    ids_B = torch.as_tensor(group_ids, device=rewards.device)
    check_rewards(rewards)
    _check_ids(ids_B, len(rewards))
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
    return Groups(rewards_B, valid_B, index_B, count_P, mean_P, differ(lowest_P, highest_P), dtype)


def check_rewards(rewards: Tensor, name: str = "rewards") -> None:
    """Refuse rewards that are not one finite scalar (or NaN) per rollout.

    Args:
        rewards: Shape [B].
        name: Name of the argument, for the error.

    Raises:
        ValueError: If it has another shape, or an entry is infinite.
    """
    if rewards.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(rewards.shape)}; pass one scalar per rollout, shape [B].")
    infinite = rewards.isinf().nonzero().flatten()
    if len(infinite):
        raise ValueError(
            f"{name} is infinite for rollouts {infinite[:5].tolist()} ({len(infinite)} in all); "
            "return a finite reward, or NaN to leave a rollout out of training."
        )


def _check_ids(ids_B: Tensor, num_rollouts: int) -> None:
    if ids_B.dim() != 1 or len(ids_B) != num_rollouts:
        raise ValueError(
            f"group_ids has {ids_B.numel()} entries (shape {tuple(ids_B.shape)}) for {num_rollouts} rewards; "
            "pass the prompt's number once per rollout, in the order of the rewards."
        )
    if len(ids_B) and (ids_B.is_floating_point() or ids_B.is_complex() or ids_B.dtype == torch.bool):
        raise ValueError(f"group_ids has dtype {ids_B.dtype}; pass integers, one number per prompt.")
