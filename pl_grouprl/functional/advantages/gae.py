"""Advantages per token against a critic (generalized advantage estimation), and the sums over time below them.

Legend: B rollouts, T length of the longest row.

Every function here reads a row as its valid tokens one after another: gaps of the mask, such as tool output, are closed
first, so that neither their length nor what stands in them (NaN included) changes anything. What holds throughout:
- `mask` is bool, or 0 and 1 of another dtype;
- V_t is the critic's value before token t is sampled; the value after the last valid token is `bootstrap_value`: 0
  where the response ended by itself;
- a row with a reward of NaN has no reward: its errors and advantages are 0 and its returns are the values themselves
  (the caller leaves it out of the losses as well, by its mask);
- results are in the dtype of the arguments (at least float32), without gradient, and 0 outside the mask.

verl whitens the advantages of its `gae` in the same function, and TRL's PPO right after: here `masked_whiten` does.
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
    """Weigh the temporal-difference errors after each token: A_t = delta_t + gamma * lam * A_{t+1}.

    Generalized advantage estimation, arXiv:1506.02438, eq. 16, in its recursive form. The advantages are not whitened.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, shape [B, T], in units of the reward.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        lam: Weight of the errors further ahead, in [0, 1]; a tensor of shape [B] has one per rollout, such as
            `length_adaptive_lam`.
        critic_lam: The same for the returns (decoupled GAE, arXiv:2503.01491); None for `lam`.
        bootstrap_value: Value after the last valid token, shape [B]; None for 0.

    Returns:
        Advantages and returns, both [B, T]. Returns are the critic's target: the advantages under `critic_lam` plus
        the values.

    Raises:
        ValueError: If shapes differ, gamma or a lambda is outside [0, 1], a reward is infinite, or the mask holds
            anything but 0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values)
    _check_lam("lam", lam, len(mask_BT))
    errors_BT = td_errors(rewards, values, mask_BT, gamma=gamma, bootstrap_value=bootstrap_value)
    advantages_BT = _discounted_sum(errors_BT, mask_BT, _per_row(lam, errors_BT) * gamma)
    targets_BT = advantages_BT
    if critic_lam is not None:
        _check_lam("critic_lam", critic_lam, len(mask_BT))
        targets_BT = _discounted_sum(errors_BT, mask_BT, _per_row(critic_lam, errors_BT) * gamma)
    return advantages_BT, targets_BT + values.to(errors_BT.dtype).masked_fill(~mask_BT, 0)


@torch.no_grad()
def td_errors(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, bootstrap_value: Tensor | None = None
) -> Tensor:
    """Return delta_t = r_t + gamma * V_{t+1} - V_t (arXiv:1506.02438, section 3), t + 1 being the next valid token.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, shape [B, T], in units of the reward.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        bootstrap_value: Value after the last valid token, shape [B]; None for 0.

    Returns:
        Shape [B, T], 0 outside the mask.

    Raises:
        ValueError: If shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask holds anything but
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
    return errors_BT.masked_fill(_without_reward(rewards, mask_BT), 0)


@torch.no_grad()
def discounted_returns(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Add up the rewards from each token on: G_t = r_t + gamma * G_{t+1}, t + 1 being the next valid token.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].

    Returns:
        Shape [B, T], 0 outside the mask and in rows with a reward of NaN.

    Raises:
        ValueError: If shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask holds anything but
            0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards)
    check_unit("gamma", gamma)
    rewards_BT = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    rewards_BT = rewards_BT.masked_fill(_without_reward(rewards, mask_BT), 0)
    return _discounted_sum(rewards_BT, mask_BT, _per_row(gamma, rewards_BT))


@torch.no_grad()
def length_adaptive_lam(lengths: Tensor, alpha: float) -> Tensor:
    """Give long responses a larger lambda: lam = 1 - 1 / (alpha * l) (VAPO, arXiv:2504.05118, length-adaptive GAE).

    The weights lam^0 + lam^1 + ... of the errors then add up to alpha * l, a fixed share of the response; the paper
    takes alpha = 0.05. For responses of fewer than 1 / alpha tokens the formula is negative: they get 0 here, which is
    the one-step error.

    Args:
        lengths: Valid tokens of each rollout, shape [B], 0 or more.
        alpha: Share of the response, larger than 0.

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


def _per_row(factor: float | Tensor, like_BT: Tensor) -> Tensor:
    factor = torch.as_tensor(factor, dtype=like_BT.dtype, device=like_BT.device)
    return (factor[:, None] if factor.dim() else factor).expand_as(like_BT)


def _without_reward(rewards: Tensor, mask_BT: Tensor) -> Tensor:
    return (rewards.isnan() & mask_BT).any(dim=1, keepdim=True)


def check_rows(mask: Tensor, *, rewards: Tensor, values: Tensor | None = None) -> Tensor:
    """Refuse rows that do not fit together.

    Args:
        mask: What should be [B, T], bool or 0 and 1.
        rewards: What should be [B, T], finite or NaN where the mask is true.
        values: What should be [B, T].

    Returns:
        The mask as bool.

    Raises:
        ValueError: If shapes differ, a reward is infinite, or the mask holds anything but 0 and 1.
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
            "return a finite reward, or NaN for a rollout that is not to be trained."
        )
    return mask_BT


def check_unit(name: str, value: float) -> None:
    """Refuse a discount or a lambda outside [0, 1] with a ValueError that names it."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} is {value}; it must lie in [0, 1].")


def _check_lam(name: str, lam: float | Tensor, num_rollouts: int) -> None:
    if not isinstance(lam, Tensor):
        check_unit(name, lam)
        return
    if lam.shape not in ((), (num_rollouts,)):
        raise ValueError(
            f"{name} has shape {tuple(lam.shape)}; pass one number, or one per rollout of {num_rollouts}, shape [B]."
        )
    outside = ~((lam >= 0) & (lam <= 1))
    if outside.any():
        raise ValueError(f"{name} has the entry {lam[outside][0].item()}; each must lie in [0, 1].")


def _check_bootstrap(bootstrap_value: Tensor, num_rollouts: int) -> None:
    if bootstrap_value.shape != (num_rollouts,):
        raise ValueError(
            f"bootstrap_value has shape {tuple(bootstrap_value.shape)}; pass one value per rollout of {num_rollouts}, "
            "shape [B], 0 where the response ended by itself."
        )
