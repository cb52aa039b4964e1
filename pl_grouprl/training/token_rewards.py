"""Rewards per token.

Legend: B rollouts, T length of the longest one, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_grouprl.functional.rows import from_rows, to_rows
from pl_grouprl.training.rollout_buffer import RolloutBuffer


def outcome_rewards(buffer: RolloutBuffer) -> Tensor:
    """Put the reward of each rollout at its last trained token, 0 elsewhere.

    Returns:
        Rewards, shape [N]; NaN at the last token of a rollout without a reward.
    """
    lengths_B = buffer.rollout_lengths
    mask_BT = to_rows(buffer.joined("loss_mask"), lengths_B)
    last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
    rewards = [rollout.reward for group in buffer.groups for rollout in group.rollouts]
    rewards_B = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float32)
    return from_rows(torch.where(last_BT, rewards_B[:, None], 0.0), lengths_B)
