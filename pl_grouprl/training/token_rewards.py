"""Rewards per token.

Legend: N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.training.metrics import number_or_nan
from pl_grouprl.training.rollout_buffer import RolloutBuffer


def rewards_per_token(buffer: RolloutBuffer) -> Tensor:
    """Distribute each rollout's reward over its trained tokens, so that they sum to it.

    A token's reward goes to the last trained token at or before it, so a reward on tool output goes to the end of the
    tool call; rewards before the first trained token go to that one. The outcome, which is the rest of the reward, goes
    to the last trained token.

    Returns:
        Rewards, shape [N], float32, 0 at tokens that are not trained. A rollout without a trained token has none.
    """
    rollouts = [rollout for group in buffer.groups for rollout in group.rollouts]
    mask_N, lengths_B = buffer.joined("loss_mask"), buffer.rollout_lengths
    rewards_N = torch.zeros(len(mask_N), dtype=torch.float64)
    trained = mask_N.nonzero().flatten()  # indices of trained tokens
    rollout_index = torch.arange(len(rollouts)).repeat_interleave(lengths_B)[trained]
    last_B = torch.full((len(rollouts),), -1).scatter_reduce(0, rollout_index, trained, "amax")
    outcomes_B = torch.tensor([number_or_nan(rollout.outcome_reward) for rollout in rollouts], dtype=torch.float64)
    earning_B = (last_B >= 0) & ~outcomes_B.isnan()
    rewards_N[last_B[earning_B]] = outcomes_B[earning_B]
    firsts = (lengths_B.cumsum(0) - lengths_B).tolist()
    for index in earning_B.nonzero().flatten().tolist():
        if steps := rollouts[index].step_rewards:
            of_rollout = trained[rollout_index == index]
            earner = torch.searchsorted(of_rollout, firsts[index] + torch.tensor(list(steps)), right=True) - 1
            rewards_N.index_add_(
                0, of_rollout[earner.clamp(min=0)], torch.tensor(list(steps.values()), dtype=torch.float64)
            )
    return rewards_N.float()
