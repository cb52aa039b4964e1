"""Rewards per token.

Legend: N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.types import Rollout


def rewards_per_token(buffer: RolloutBuffer) -> Tensor:
    """Lay the reward of each rollout on its trained tokens: they add up to it.

    A reward of a token is earned by the last trained token up to it, so that one for tool output goes to the token that
    called the tool; the first trained token gets those before it. The outcome, the rest of the reward, stands at the
    last trained token.

    Returns:
        Rewards, shape [N], float32, 0 at tokens that are not trained. A rollout without a trained token has none.
    """
    rollouts = [rollout for group in buffer.groups for rollout in group.rollouts]
    masks = buffer.joined("loss_mask").split(buffer.rollout_lengths.tolist())
    rows = [_rewards_of_rollout(rollout, mask) for rollout, mask in zip(rollouts, masks, strict=True)]
    return torch.cat(rows).float() if rows else torch.zeros(0)


def _rewards_of_rollout(rollout: Rollout, mask_T: Tensor) -> Tensor:
    rewards_T = torch.zeros(len(mask_T), dtype=torch.float64)
    trained = mask_T.nonzero().flatten()
    if len(trained) == 0 or rollout.outcome_reward is None:
        return rewards_T
    rewards_T[trained[-1]] = rollout.outcome_reward
    if steps := rollout.step_rewards:
        earner = torch.searchsorted(trained, torch.tensor(list(steps)), right=True) - 1
        rewards_T.index_add_(0, trained[earner.clamp(min=0)], torch.tensor(list(steps.values()), dtype=torch.float64))
    return rewards_T
