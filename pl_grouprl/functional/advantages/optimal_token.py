"""Per-token advantages against the minimum-variance baseline of each position in the group.

Legend: B rollouts, P prompts (groups), T length of the longest row.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.gae import check_rows, discounted_returns
from pl_grouprl.functional.advantages.groups import gather_groups
from pl_grouprl.functional.advantages.registry import register_advantage_estimator
from pl_grouprl.functional.masked import differ
from pl_grouprl.functional.rows import compact
from pl_grouprl.utilities.options import check_options

NEEDS = ("group_ids", "mask", "score_norms")


@register_advantage_estimator("optimal_token_baseline", needs=NEEDS, per_token=True, takes_token_rewards=True)
@torch.no_grad()
def optimal_token_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    score_norms: Tensor,
    *,
    handle_zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Subtract from each reward-to-go the group's mean at that position, weighted by the scores so far.

        A_t = G_t - B_t,  B_t = sum_i G_t W_t / sum_i W_t  over the rollouts i of the group that are trained at t,
        W_t = |s_1|^2 + ... + |s_t|^2,  s_j the gradient of token j's log-probability by the logits

    Equal to verl's `optimal_token_baseline` (without its importance weights), except that a group of one rollout, or
    whose rewards-to-go are all equal, gets exactly 0. A rollout's own reward is part of its baseline, so the gradient
    is biased as with the group's mean in `grpo`.

    Args:
        rewards: Reward of each token, shape [B, T], any unit; NaN marks a rollout without rewards.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for trained tokens, shape [B, T].
        score_norms: |s_t|^2 = 1 - 2 p_t + sum of p^2 over the vocabulary, shape [B, T].
        handle_zero_tail: Once all other rollouts of the group have ended, use 0 as the baseline of the longest one. Its
            baseline would otherwise be its own reward-to-go, and its advantage 0.
        eps: Added to the sum of weights.

    Returns:
        Shape [B, T], in units of the reward, 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, eps is not positive, or the mask has other values than 0
            and 1.
    """
    return _advantages(rewards, group_ids, mask, score_norms, False, handle_zero_tail, eps)


@register_advantage_estimator("tir_optimal_token_baseline", needs=NEEDS, per_token=True, takes_token_rewards=True)
@torch.no_grad()
def tir_optimal_token_baseline_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    score_norms: Tensor,
    *,
    handle_zero_tail: bool = True,
    eps: float = 1e-8,
) -> Tensor:
    """Compare the t-th trained tokens, not the t-th tokens: tool output between them does not shift positions.

    Otherwise `optimal_token_baseline_advantages`, with its arguments, result and errors; equal to verl's
    `tir_optimal_token_baseline` with the same exceptions.
    """
    return _advantages(rewards, group_ids, mask, score_norms, True, handle_zero_tail, eps)


def _advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    score_norms: Tensor,
    close_gaps: bool,
    handle_zero_tail: bool,
    eps: float,
) -> Tensor:
    check_options({"eps": (eps, eps > 0, "larger than 0")})
    mask_BT = check_rows(mask, rewards=rewards)
    if score_norms.shape != rewards.shape:
        raise ValueError(
            f"score_norms has shape {tuple(score_norms.shape)} and rewards {tuple(rewards.shape)}; pass one number per "
            "token, shape [B, T]."
        )
    mask_BT = mask_BT & ~(rewards.isnan() & mask_BT).any(dim=1, keepdim=True)
    returns_BT = discounted_returns(rewards.to(torch.float64), mask_BT, 1.0)
    weights_BT = score_norms.to(torch.float64).masked_fill(~mask_BT, 0).cumsum(dim=1)
    rows, inside_BT = compact(mask_BT), mask_BT
    if close_gaps:
        returns_BT, weights_BT, inside_BT = rows.close(returns_BT), rows.close(weights_BT), rows.mask_BT
    counts_B = mask_BT.sum(dim=1)
    groups = gather_groups(counts_B.to(torch.float64), group_ids)
    baseline_BT = _baseline(returns_BT, weights_BT * inside_BT, groups.index_B, eps)
    if handle_zero_tail:
        tail_BT = (
            torch.arange(mask_BT.shape[1], device=mask.device) >= _second_longest(counts_B, groups.index_B)[:, None]
        )
        baseline_BT = baseline_BT.masked_fill(tail_BT, 0)
    advantages_BT = (returns_BT - baseline_BT) * (inside_BT & _differs(returns_BT, inside_BT, groups.index_B)[:, None])
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    return (rows.reopen(advantages_BT) if close_gaps else advantages_BT).to(dtype)


def _baseline(returns_BT: Tensor, weights_BT: Tensor, index_B: Tensor, eps: float) -> Tensor:
    """Weighted mean over each group, by position."""
    zeros_PT = returns_BT.new_zeros(_num_groups(index_B), returns_BT.shape[1])
    total_PT = zeros_PT.index_add(0, index_B, returns_BT * weights_BT)
    return (total_PT / (zeros_PT.index_add(0, index_B, weights_BT) + eps))[index_B]


def _second_longest(counts_B: Tensor, index_B: Tensor) -> Tensor:
    """Trained tokens of the runner-up, for a group's one longest rollout; more than any rollout has, for all others."""
    zeros_P = counts_B.new_zeros(_num_groups(index_B))
    longest_B = zeros_P.scatter_reduce(0, index_B, counts_B, "amax")[index_B]
    is_longest_B = counts_B == longest_B
    alone_B = is_longest_B & (zeros_P.index_add(0, index_B, is_longest_B.to(counts_B.dtype))[index_B] == 1)
    second_P = zeros_P.scatter_reduce(0, index_B, counts_B.masked_fill(is_longest_B, 0), "amax")
    return torch.where(alone_B, second_P[index_B], counts_B.max() + 1 if len(counts_B) else counts_B)


def _differs(returns_BT: Tensor, inside_BT: Tensor, index_B: Tensor) -> Tensor:
    """Whether a rollout's group has two trained rollouts or more, and different rewards-to-go."""
    inf_P = returns_BT.new_full((_num_groups(index_B),), torch.inf)
    if not returns_BT.shape[1]:
        return torch.zeros_like(index_B, dtype=torch.bool)
    low_B = returns_BT.masked_fill(~inside_BT, torch.inf).amin(dim=1)
    high_B = returns_BT.masked_fill(~inside_BT, -torch.inf).amax(dim=1)
    low_P, high_P = inf_P.scatter_reduce(0, index_B, low_B, "amin"), (-inf_P).scatter_reduce(0, index_B, high_B, "amax")
    count_P = torch.zeros_like(inf_P).index_add(0, index_B, inside_BT.any(dim=1).to(inf_P.dtype))
    return (differ(low_P, high_P) & (count_P > 1))[index_B]


def _num_groups(index_B: Tensor) -> int:
    return int(index_B.max()) + 1 if len(index_B) else 0
