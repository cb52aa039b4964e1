"""Advantages per token from a teacher's log-probabilities (on-policy distillation).

Legend: B rollouts, T length of the longest row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.gae import discounted_returns


@torch.no_grad()
def distillation_advantages(
    old_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor, *, gamma: float = 0.0
) -> Tensor:
    """Reward each token with the teacher's minus the student's log-probability, and sum the discounted rewards.

        r_t = log pi_teacher(y_t | y_<t) - log pi_old(y_t | y_<t)
        A_t = r_t + gamma r_{t+1} + gamma^2 r_{t+2} + ...

    For y_t sampled from pi_old, -r_t is an unbiased estimate of the reverse KL of the next token, KL(pi_old ||
    pi_teacher). At pi = pi_old, the expectation of A_t grad log pi(y_t), summed over t, is

    - with `gamma` = 1, minus the gradient of the reverse KL of whole responses (MiniLLM, arXiv:2306.08543, eq. 2):
      differentiating -log pi in the reward itself contributes 0 in expectation;
    - with `gamma` = 0, minus the sum of the gradients of the reverse KL of each next token, with the distribution of
      the tokens before it held fixed (GKD, arXiv:2306.13649, section 3; Thinking Machines, "On-policy distillation",
      2025). It ignores that a token also determines the prefixes of later KLs, and has less variance.

    Args:
        old_logprobs: The student's log-probabilities of its sampled tokens, in nats, shape [B, T].
        teacher_logprobs: The teacher's of the same tokens, shape [B, T].
        mask: True for trained tokens, shape [B, T]. Tokens between them, such as tool output, are skipped.
        gamma: Discount per token, in [0, 1].

    Returns:
        Advantages in nats, not normalized, shape [B, T]; 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, gamma is outside [0, 1], the teacher gives a token probability 0, or the mask
            has other values than 0 and 1.
    """
    if old_logprobs.shape != teacher_logprobs.shape:
        raise ValueError(
            f"teacher_logprobs has shape {tuple(teacher_logprobs.shape)} and old_logprobs has "
            f"{tuple(old_logprobs.shape)}; pass one value per token, shape [B, T]."
        )
    return discounted_returns(teacher_logprobs - old_logprobs, mask, gamma)
