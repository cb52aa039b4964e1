"""Advantages per token from rewards per step of a rollout (process supervision).

Legend: B rollouts, N response tokens of all rollouts, concatenated, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.group_relative import group_relative_advantages


@torch.no_grad()
def process_supervision_advantages(
    token_rewards: Tensor,
    lengths: Tensor,
    group_ids: Tensor | Sequence[int],
    *,
    estimator: Callable[[Tensor, Tensor], Tensor] = group_relative_advantages,
) -> Tensor:
    """Normalize step rewards within each group, and sum those of the current and later steps for each token.

        A_t = sum over the steps j that end at t or later of (r_j - mean(R)) / std(R)

    R are the rewards of all steps of the group (GRPO with process supervision, arXiv:2402.03300, section 4.1.3). With
    one step per rollout, ending at its last token, this equals `group_relative_advantages`.

    Args:
        token_rewards: Reward of each step at its last token, any unit; NaN at all other tokens. Shape [N].
        lengths: Response tokens of each rollout, int64, shape [B], adding up to N.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        estimator: Normalizes step rewards [S], given the group of each [S]; for example `group_relative_advantages`
            with other options.

    Returns:
        Shape [N], in the dtype of the rewards (at least float32); 0 after the last step of a rollout. Exactly 0 where
        all steps of the group have the same reward, or where it has fewer than two.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    ids_B = torch.as_tensor(group_ids, device=token_rewards.device)
    if token_rewards.dim() != 1 or lengths.shape != ids_B.shape or int(lengths.sum()) != len(token_rewards):
        raise ValueError(
            f"token_rewards has shape {tuple(token_rewards.shape)}, lengths {tuple(lengths.shape)} (adding up to "
            f"{int(lengths.sum())}) and group_ids {tuple(ids_B.shape)}; pass one reward per token, and one length and "
            "one id per rollout."
        )
    index_N = torch.arange(len(ids_B), device=ids_B.device).repeat_interleave(lengths)
    ends_N = ~token_rewards.isnan()
    normalized_S = estimator(token_rewards[ends_N], ids_B[index_N[ends_N]])
    normalized_N = torch.zeros_like(token_rewards, dtype=torch.float64)
    normalized_N[ends_N] = normalized_S.to(torch.float64)
    rows = [rollout.flip(0).cumsum(0).flip(0) for rollout in normalized_N.split(lengths.tolist())]
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    return torch.cat(rows).to(dtype) if rows else normalized_N.to(dtype)
