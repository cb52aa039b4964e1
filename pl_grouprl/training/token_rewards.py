"""Rewards per token.

Legend: E episodes, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.training.group_rewards import has_token_rewards
from pl_grouprl.training.metrics import number_or_nan
from pl_grouprl.training.rollout_buffer import RolloutBuffer


def rewards_per_token(buffer: RolloutBuffer) -> Tensor:
    """Assign each episode's reward to its trained tokens, whose rewards sum to it.

    A token's reward goes to the last trained token at or before it (a reward on tool output to the end of the tool
    call), or to the first trained token if there is none before. The outcome reward (the reward without all token
    rewards) goes to the last trained token.

    Returns:
        Rewards, shape [N], float32; 0 at tokens that are not trained, and in episodes without a reward.
    """
    episodes = buffer.episodes
    mask_N, lengths_E = buffer.joined("loss_mask"), buffer.episode_lengths
    rewards_N = torch.zeros(len(mask_N), dtype=torch.float64)
    trained = mask_N.nonzero().flatten()  # indices of trained tokens
    episode_index = torch.arange(len(episodes)).repeat_interleave(lengths_E)[trained]
    last_E = torch.full((len(episodes),), -1).scatter_reduce(0, episode_index, trained, "amax")
    outcomes_E = torch.tensor([number_or_nan(episode.outcome_reward) for episode in episodes], dtype=torch.float64)
    rewarded_E = (last_E >= 0) & ~outcomes_E.isnan()
    rewards_N[last_E[rewarded_E]] = outcomes_E[rewarded_E]
    if not has_token_rewards(buffer.groups):
        return rewards_N.float()
    starts = (lengths_E.cumsum(0) - lengths_E).tolist()
    for index in rewarded_E.nonzero().flatten().tolist():
        if steps := episodes[index].step_rewards:
            of_episode = trained[episode_index == index]
            receiver = torch.searchsorted(of_episode, starts[index] + torch.tensor(list(steps)), right=True) - 1
            rewards_N.index_add_(
                0, of_episode[receiver.clamp(min=0)], torch.tensor(list(steps.values()), dtype=torch.float64)
            )
    return rewards_N.float()
