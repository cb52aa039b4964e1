"""Advantages per token without a critic, whitened over the whole batch (REINFORCE++).

Legend: B rollouts, T length of the longest row.

NaN rewards, masks and gaps are treated as in `gae`; a rollout without a reward is also left out of the statistics.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.gae import discounted_returns
from pl_grouprl.functional.advantages.groups import gather_groups
from pl_grouprl.functional.advantages.registry import register_advantage_estimator
from pl_grouprl.functional.masked import Reduce, bool_mask, masked_whiten


@register_advantage_estimator("reinforce_plus_plus", needs=("mask", "reduce"), per_token=True, takes_token_rewards=True)
@torch.no_grad()
def reinforce_plus_plus_advantages(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, reduce: Reduce | None = None
) -> Tensor:
    """Whiten the discounted reward-to-go of all tokens of the batch (REINFORCE++, arXiv:2501.03262).

    Equal to verl's `reinforce_plus_plus`, except that its older releases restart the sum at a gap in the mask.

    Args:
        rewards: Reward of each token, shape [B, T], any unit; the reward of a rollout is at its last token.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        reduce: Sums over ranks; None for this rank alone.

    Returns:
        Shape [B, T], 0 outside the mask. Exactly 0 where all tokens of the batch have the same reward-to-go.

    Raises:
        ValueError: If the shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask has other
            values than 0 and 1.
    """
    returns_BT = discounted_returns(rewards, mask, gamma)
    mask_BT = bool_mask(mask)
    missing_B1 = (rewards.isnan() & mask_BT).any(dim=1, keepdim=True)
    return masked_whiten(returns_BT, mask_BT & ~missing_B1, reduce=reduce)


@register_advantage_estimator("reinforce_plus_plus_baseline", needs=("group_ids", "mask", "reduce"), per_token=True)
@torch.no_grad()
def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], mask: Tensor, *, reduce: Reduce | None = None
) -> Tensor:
    """Subtract the group's mean from each reward, and whiten over all tokens of the batch (arXiv:2501.03262).

    Equal to verl's `reinforce_plus_plus_baseline` except for groups without spread and groups of one: here they enter
    the statistics as 0 and get exactly 0. verl whitens that 0, and uses the reward itself for groups of one.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for response tokens, shape [B, T].
        reduce: Sums over ranks; None for this rank alone.

    Returns:
        Shape [B, T], the same number for all tokens of a rollout, 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, or the mask has other values than 0 and 1.
    """
    groups = gather_groups(rewards, group_ids)
    if mask.dim() != 2 or len(mask) != len(rewards):
        raise ValueError(
            f"mask has shape {tuple(mask.shape)} for {len(rewards)} rewards; pass one row per rollout, shape [B, T]."
        )
    mask_BT = bool_mask(mask)
    centred_BT = groups.centred()[:, None].expand(mask_BT.shape)
    whitened_BT = masked_whiten(centred_BT, mask_BT & groups.valid_B[:, None], reduce=reduce)
    return whitened_BT.masked_fill(~groups.trained()[:, None], 0).to(groups.dtype)
