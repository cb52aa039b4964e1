"""Advantages per token with a critic (generalized advantage estimation), and the recursions they use.

Legend: B rollouts, T length of the longest row.

Every function treats a row as the sequence of its valid tokens: gaps in the mask, such as tool output, are closed
first, so neither their length nor their contents (even NaN) matter. Conventions:
- `mask` is bool, or 0 and 1 of another dtype;
- V_t is the critic's value before token t is sampled; `bootstrap_value` is the value after the last valid token, 0
  where the response ended by itself;
- a NaN reward means that the rollout has none: its errors and advantages are 0 and its returns are its values (callers
  also mask it out of the losses);
- results are in the dtype of the arguments (at least float32), without gradient, and 0 outside the mask.

Advantages are not whitened; use `masked_whiten`. verl whitens inside its `gae`, TRL's former PPO did right after.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pl_grouprl.functional.masked import bool_mask
from pl_grouprl.functional.rows import compact, reverse_scan


@torch.no_grad()
def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | Tensor | None = None,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sum the discounted temporal-difference errors from each token on: A_t = delta_t + gamma * lam * A_{t+1}.

    Generalized advantage estimation, arXiv:1506.02438, eq. 16, in its recursive form.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, shape [B, T], in units of the reward.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        lam: Decay of later errors per token, in [0, 1]; a tensor of shape [B] has one per rollout, as from
            `length_adaptive_lam`.
        critic_lam: Lambda of the returns (decoupled GAE, arXiv:2503.01491); None for `lam`.
        bootstrap_value: Value after the last valid token, shape [B]; None for 0.

    Returns:
        Advantages and returns, both [B, T]. Returns are the critic's target: the advantages under `critic_lam` plus
        the values.

    Raises:
        ValueError: If shapes differ, gamma or a lambda is outside [0, 1], a reward is infinite, or the mask has other
            values than 0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values)
    errors_BT = td_errors(rewards, values, mask_BT, gamma=gamma, bootstrap_value=bootstrap_value)
    advantages_BT = _discounted_sum(errors_BT, mask_BT, lambda_rows("lam", lam, errors_BT) * gamma)
    critic_advantages_BT = advantages_BT
    if critic_lam is not None:
        critic_advantages_BT = _discounted_sum(
            errors_BT, mask_BT, lambda_rows("critic_lam", critic_lam, errors_BT) * gamma
        )
    return advantages_BT, critic_advantages_BT + values.to(errors_BT.dtype).masked_fill(~mask_BT, 0)


@torch.no_grad()
def td_errors(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, bootstrap_value: Tensor | None = None
) -> Tensor:
    """Return delta_t = r_t + gamma * V_{t+1} - V_t (arXiv:1506.02438, section 3), where t + 1 is the next valid token.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, shape [B, T], in units of the reward.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        bootstrap_value: Value after the last valid token, shape [B]; None for 0.

    Returns:
        Shape [B, T], 0 outside the mask.

    Raises:
        ValueError: If shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask has other values than
            0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values)
    check_unit("gamma", gamma)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rows = compact(mask_BT)
    rewards_BT, values_BT = rows.close(rewards.to(dtype)), rows.close(values.to(dtype))
    next_BT = _shift_left(values_BT)
    if bootstrap_value is not None:
        _check_bootstrap(bootstrap_value, len(mask_BT))
        last_BT = rows.mask_BT & ~_shift_left(rows.mask_BT)
        next_BT = torch.where(last_BT, bootstrap_value.to(dtype)[:, None], next_BT)
    errors_BT = rows.reopen(rewards_BT + gamma * next_BT - values_BT)
    return errors_BT.masked_fill(_rows_without_reward(rewards, mask_BT), 0)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Sum the discounted rewards from each token on: G_t = r_t + gamma * G_{t+1}, where t + 1 is the next valid token.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].

    Returns:
        Shape [B, T], 0 outside the mask and in rows with a NaN reward.

    Raises:
        ValueError: If shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask has other values than
            0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards)
    check_unit("gamma", gamma)
    rewards_BT = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    rewards_BT = rewards_BT.masked_fill(_rows_without_reward(rewards, mask_BT), 0)
    return _discounted_sum(rewards_BT, mask_BT, torch.full_like(rewards_BT, gamma))


@torch.no_grad()
def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """Give long responses a larger lambda: lam = 1 - 1 / (alpha * l) (VAPO, arXiv:2504.05118, length-adaptive GAE).

    The weights of the errors, lam^0 + lam^1 + ..., then add up to alpha * l, a fixed fraction of the response; the
    paper uses alpha = 0.05. Where the formula is negative, for responses of fewer than 1 / alpha tokens, lambda is 0
    (the one-step error).

    Args:
        lengths: Valid tokens of each rollout, shape [B], 0 or more.
        alpha: Fraction of the response, larger than 0.

    Returns:
        Lambdas in [0, 1), shape [B], float32 (float64 for lengths in float64).

    Raises:
        ValueError: If alpha is not positive.
    """
    if not 0 < alpha < math.inf:
        raise ValueError(f"alpha is {alpha}; pass a number larger than 0, such as 0.05.")
    dtype = torch.promote_types(lengths.dtype, torch.float32)
    return (1 - 1 / (alpha * lengths.to(dtype))).clamp(min=0)


def _discounted_sum(values_BT: Tensor, mask_BT: Tensor, decay_BT: Tensor) -> Tensor:
    rows = compact(mask_BT)
    return rows.reopen(reverse_scan(rows.close(values_BT), decay_BT))


def _shift_left(values_BT: Tensor) -> Tensor:
    return torch.cat([values_BT[:, 1:], torch.zeros_like(values_BT[:, :1])], dim=1)


def _rows_without_reward(rewards: Tensor, mask_BT: Tensor) -> Tensor:
    """Which rows have a NaN reward, shape [B, 1]."""
    return (rewards.isnan() & mask_BT).any(dim=1, keepdim=True)


def check_rows(mask: Tensor, *, rewards: Tensor, values: Tensor | None = None) -> Tensor:
    """Refuse rows that do not match; return the mask as bool.

    Args:
        mask: Shape [B, T], bool or 0 and 1.
        rewards: Shape [B, T], finite or NaN where the mask is true.
        values: Shape [B, T].

    Raises:
        ValueError: If shapes differ, a reward is infinite, or the mask has other values than 0 and 1.
    """
    if rewards.dim() != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; pass one row of tokens per rollout, shape [B, T].")
    for name, tensor in (("mask", mask), ("values", values)):
        if tensor is not None and tensor.shape != rewards.shape:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and rewards {tuple(rewards.shape)}; pass both as [B, T]."
            )
    mask_BT = bool_mask(mask)
    infinite = (rewards.isinf() & mask_BT).any(dim=1).nonzero().flatten()
    if len(infinite):
        raise ValueError(
            f"rewards is infinite for rollouts {infinite[:5].tolist()} ({len(infinite)} in all); "
            "return a finite reward, or NaN to leave a rollout out of training."
        )
    return mask_BT


def check_unit(name: str, value: float) -> None:
    """Refuse a discount or a lambda outside [0, 1] with a ValueError that names it."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1].")


def lambda_rows(name: str, lam: float | Tensor, like_BT: Tensor) -> Tensor:
    """Check a lambda, one number or one per rollout [B], and expand it to [B, T].

    Raises:
        ValueError: If it has another shape, or is outside [0, 1].
    """
    if not isinstance(lam, Tensor):
        check_unit(name, lam)
        return torch.full_like(like_BT, lam)
    if lam.shape not in ((), (len(like_BT),)):
        raise ValueError(
            f"{name} has shape {tuple(lam.shape)}; pass one number, or one per rollout of {len(like_BT)}, shape [B]."
        )
    outside = ~((lam >= 0) & (lam <= 1))
    if outside.any():
        raise ValueError(f"{name} has the entry {lam[outside][0].item()}; each must lie in [0, 1].")
    return lam.to(like_BT).expand(len(like_BT))[:, None].expand_as(like_BT)


def _check_bootstrap(bootstrap_value: Tensor, num_rollouts: int) -> None:
    if bootstrap_value.shape != (num_rollouts,):
        raise ValueError(
            f"bootstrap_value has shape {tuple(bootstrap_value.shape)}; pass one value per rollout of {num_rollouts}, "
            "shape [B], 0 where the response ended by itself."
        )
