"""Advantages per rollout with baselines that need more than the rewards: lengths, or a greedy rollout.

Legend: B rollouts, P prompts (groups). `groups` has the conventions on NaN, equal rewards and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.groups import check_rewards, gather_groups
from pl_grouprl.functional.advantages.registry import register_advantage_estimator
from pl_grouprl.functional.masked import differ


@register_advantage_estimator("opo", needs=("group_ids", "lengths"))
@torch.no_grad()
def opo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int], lengths: Tensor) -> Tensor:
    """Subtract the group's length-weighted mean from each reward (OPO, arXiv:2505.23585).

    The baseline of least variance if the squared score of a rollout grows with its length. Equal to verl's `opo`.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        lengths: Tokens of each rollout that the model generated, shape [B], 0 or more.

    Returns:
        Advantages, shape [B], in units of the reward. Exactly zero where all rewards of a group are equal.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, or a length is negative.
    """
    groups = gather_groups(rewards, group_ids)
    _check_lengths(lengths, len(rewards))
    lengths_B = lengths.to(rewards.device, torch.float64).masked_fill(~groups.valid_B, 0)
    # Lengths are integers, so the clamp only affects groups without tokens, which train nothing.
    baseline_P = groups.sum(lengths_B * groups.rewards_B) / groups.sum(lengths_B).clamp(min=1)
    return groups.finish(groups.rewards_B - baseline_P[groups.index_B])


@register_advantage_estimator("remax", needs=("greedy_rewards",))
@torch.no_grad()
def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the prompt's greedy rollout from each reward (ReMax, arXiv:2310.10505).

    Equal to verl's `remax` for one reward at the end of a rollout. Uses no group statistics: one rollout per prompt is
    enough, and a group of equal rewards gets 0 only if the greedy rollout has the same reward.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        greedy_rewards: Reward of the greedy rollout of each rollout's prompt, shape [B]; NaN marks a prompt without a
            baseline.

    Returns:
        Advantages, shape [B], in units of the reward; 0 where either reward is missing.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    check_rewards(rewards)
    check_rewards(greedy_rewards, "greedy_rewards")
    if len(greedy_rewards) != len(rewards):
        raise ValueError(
            f"greedy_rewards has {len(greedy_rewards)} entries for {len(rewards)} rewards; "
            "pass the greedy reward of the prompt once per rollout."
        )
    rewards_B, greedy_B = rewards.to(torch.float64), greedy_rewards.to(rewards.device, torch.float64)
    advantages_B = (rewards_B - greedy_B).masked_fill(~differ(greedy_B, rewards_B), 0)
    return advantages_B.to(torch.promote_types(rewards.dtype, torch.float32))


def _check_lengths(lengths: Tensor, num_rollouts: int) -> None:
    if lengths.shape != (num_rollouts,):
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)} for {num_rollouts} rewards; "
            "pass the response tokens of each rollout, shape [B]."
        )
    negative = ~(lengths >= 0)
    if negative.any():
        raise ValueError(f"lengths has the entry {lengths[negative][0].item()}; pass numbers of tokens, 0 or more.")
