"""Advantages and returns per token group: GAE of the semi-MDP whose steps are the groups.

Legend: B rollouts, T length of the longest row.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.gae import lambda_rows, td_errors
from pl_grouprl.functional.masked import bool_mask
from pl_grouprl.functional.rows import compact, reverse_scan
from pl_grouprl.functional.token_groups.find import TokenGroups

AdvantageMode = Literal["broadcast", "endpoint", "variable_lambda"]
"""How a group's tokens get its advantage; see `token_group_advantages`."""

ADVANTAGE_MODES: tuple[AdvantageMode, ...] = get_args(AdvantageMode)


@torch.no_grad()
def token_group_advantages(
    rewards: Tensor,
    values: Tensor,
    groups: TokenGroups,
    mask: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | Tensor | None = None,
    bootstrap_value: Tensor | None = None,
    mode: AdvantageMode = "broadcast",
) -> tuple[Tensor, Tensor]:
    """Estimate one advantage per token group, of b .. e with n = e - b + 1 tokens, and the critic's target.

        A_g = sum_{j<n} gamma^j r_{b+j} + gamma^n V_{e+1} - V_b + gamma^n * lam * A_{g+1}

    This is token-level GAE (arXiv:1506.02438, eq. 16) with a lambda of 1 inside groups and `lam` at endpoints, read at
    the starts, so one reverse scan computes it. The advantages are not whitened.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, the critic's value before token t is sampled, shape [B, T], in units of the reward.
        groups: Result of `find_token_groups` with the same mask.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        lam: Decay of later groups' errors per group, in [0, 1]; or one per rollout, shape [B].
        critic_lam: The same for the returns; None for `lam`.
        bootstrap_value: Value after the last valid token, shape [B]; None for 0.
        mode: `broadcast` gives A_g to every token of the group. `endpoint` gives it to the endpoint and 0 to the
            others: the literal reading of Algorithm 2, which biases the gradient; kept for comparison.
            `variable_lambda` gives each token its own value of the scan, with less variance; at starts it is A_g.

    Returns:
        Advantages and returns, both [B, T], in the dtype of the arguments (at least float32), 0 outside the mask. The
        return is V_t plus the token's own value of the scan (under `critic_lam`), in every mode; at starts that is
        A_g + V_b, the critic's target.

    Raises:
        ValueError: If shapes differ, the groups were found with another mask, gamma or a lambda is outside [0, 1], a
            reward is infinite, or the mode is unknown.
    """
    if mode not in ADVANTAGE_MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(ADVANTAGE_MODES)}.")
    errors_BT = td_errors(rewards, values, mask, gamma=gamma, bootstrap_value=bootstrap_value)
    mask_BT = bool_mask(mask)
    if groups.starts.shape != mask_BT.shape:
        raise ValueError(
            f"groups has shape {tuple(groups.starts.shape)} and mask {tuple(mask_BT.shape)}; pass the groups that were "
            "found with this mask."
        )
    if not torch.equal(groups.group_index >= 0, mask_BT):
        raise ValueError(
            "groups were found with another mask: groups.group_index is not -1 exactly where mask is False. Pass the "
            "mask that was passed to find_token_groups."
        )
    scanned_BT = _scan(errors_BT, groups.ends, mask_BT, gamma, lambda_rows("lam", lam, errors_BT))
    target_BT = scanned_BT
    if critic_lam is not None:
        target_BT = _scan(errors_BT, groups.ends, mask_BT, gamma, lambda_rows("critic_lam", critic_lam, errors_BT))
    returns_BT = target_BT + values.to(errors_BT.dtype).masked_fill(~mask_BT, 0)
    if mode == "variable_lambda":
        return scanned_BT, returns_BT
    advantages_BT = scanned_BT.gather(1, _own_start(groups.starts))
    return advantages_BT.masked_fill_(~(mask_BT if mode == "broadcast" else groups.ends), 0), returns_BT


def _scan(errors_BT: Tensor, ends_BT: Tensor, mask_BT: Tensor, gamma: float, lam_BT: Tensor) -> Tensor:
    decay_BT = torch.where(ends_BT, lam_BT * gamma, gamma)
    if not (mask_BT[:, 1:] & ~mask_BT[:, :-1]).any():
        return reverse_scan(errors_BT, decay_BT)
    rows = compact(mask_BT)
    return rows.reopen(reverse_scan(rows.close(errors_BT), rows.close(decay_BT)))


def _own_start(starts_BT: Tensor) -> Tensor:
    """Start position of each token's group (0 before the first group)."""
    positions_T = torch.arange(starts_BT.shape[1], device=starts_BT.device)
    return torch.where(starts_BT, positions_T, 0).cummax(dim=1).values
