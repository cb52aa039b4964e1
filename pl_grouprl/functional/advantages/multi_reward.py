"""Several rewards per rollout, summed before or after normalization within the group.

Legend: B rollouts, F reward functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.group_relative import group_relative_advantages
from pl_grouprl.functional.advantages.groups import gather_groups
from pl_grouprl.functional.masked import differ

REWARD_AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")


@torch.no_grad()
def combine_rewards(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """Add up the weighted rewards of each rollout.

    Args:
        rewards: Reward of each function for each rollout, shape [B, F], any unit; NaN where a function does not apply.
        weights: Weight of each function, shape [F].

    Returns:
        Shape [B], in the dtype of the rewards (at least float32); NaN where no function applies.

    Raises:
        ValueError: If the shapes differ, a reward is infinite or a weight is not finite.
    """
    weights_F = _check(rewards, weights)
    applies_BF = ~rewards.isnan()
    total_B = (rewards.to(torch.float64) * weights_F).nansum(dim=1)
    return total_B.masked_fill(~applies_BF.any(dim=1), torch.nan).to(_dtype(rewards))


@torch.no_grad()
def multi_reward_advantages(
    rewards: Tensor,
    weights: Tensor | Sequence[float],
    group_ids: Tensor | Sequence[int],
    *,
    estimator: Callable[..., Tensor],
    aggregation: str = "sum_then_normalize",
    eps: float = 1e-6,
    lengths: Tensor | None = None,
    greedy_rewards: Tensor | None = None,
) -> Tensor:
    """Turn several rewards into one advantage; `aggregation` has the values of TRL's `multi_objective_aggregation`.

    `sum_then_normalize` passes the weighted sum to the estimator. `normalize_then_sum` (GDPO, arXiv:2601.05242) passes
    each reward separately, adds up the weighted advantages and standardizes the sum over the batch, so that no reward
    drowns out the others. Equal to TRL with the estimator `grpo` and `eps=1e-4` in both, except that TRL always divides
    each reward by its group's standard deviation, whatever its `scale_rewards`; here the estimator's scale applies.
    verl's `gdpo` standardizes over tokens.

    Args:
        rewards: Reward of each function for each rollout, shape [B, F], any unit; NaN where a function does not apply.
        weights: Weight of each function, shape [F].
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        estimator: Maps rewards [B] and group ids [B] to advantages [B]; also gets the keyword arguments `lengths` and
            `greedy_rewards` if they are passed.
        aggregation: `sum_then_normalize` or `normalize_then_sum`.
        eps: Added to the standard deviation over the batch (`normalize_then_sum` only).
        lengths: Response tokens of each rollout, shape [B], for the estimator.
        greedy_rewards: Rewards of the greedy rollout of each rollout's prompt, shape [B, F], for the estimator.

    Returns:
        Advantages, shape [B]. 0 where no function applies; exactly 0 in groups where the estimator gives 0 for every
        function, such as groups of equal rewards.

    Raises:
        ValueError: If the shapes differ, the aggregation is unknown, a reward is infinite or a weight is not finite.
    """
    if aggregation not in REWARD_AGGREGATIONS:
        raise ValueError(f"aggregation is {aggregation!r}; it must be one of {', '.join(REWARD_AGGREGATIONS)}.")
    weights_F = _check(rewards, weights)
    if greedy_rewards is not None and greedy_rewards.shape != rewards.shape:
        raise ValueError(
            f"greedy_rewards has shape {tuple(greedy_rewards.shape)} and rewards {tuple(rewards.shape)}; "
            "pass both as [B, F]."
        )
    extras = {} if lengths is None else {"lengths": lengths}
    if aggregation == "sum_then_normalize":
        if greedy_rewards is not None:
            extras["greedy_rewards"] = combine_rewards(greedy_rewards, weights_F)
        return estimator(combine_rewards(rewards, weights_F), group_ids, **extras)

    total_B = torch.zeros(len(rewards), dtype=torch.float64, device=rewards.device)
    for column, weight in enumerate(weights_F):
        if greedy_rewards is not None:
            extras["greedy_rewards"] = greedy_rewards[:, column]
        total_B += weight * estimator(rewards[:, column].to(torch.float64), group_ids, **extras)
    return _standardize(total_B, group_ids, ~rewards.isnan().all(dim=1), eps).to(_dtype(rewards))


def _standardize(total_B: Tensor, group_ids: Tensor | Sequence[int], valid_B: Tensor, eps: float) -> Tensor:
    groups = gather_groups(total_B, group_ids)
    nonzero_B = differ(0, groups.largest(total_B.abs()))[groups.index_B]
    one_group_B = torch.zeros_like(groups.index_B)
    standardized_B = group_relative_advantages(total_B.masked_fill(~valid_B, torch.nan), one_group_B, eps=eps)
    return standardized_B.masked_fill(~nonzero_B, 0)


def _dtype(rewards: Tensor) -> torch.dtype:
    return torch.promote_types(rewards.dtype, torch.float32)


def _check(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    if rewards.dim() != 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}; pass one column per reward function, shape [B, F]."
        )
    weights_F = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    if weights_F.shape != rewards.shape[1:]:
        raise ValueError(
            f"weights has shape {tuple(weights_F.shape)} for {rewards.shape[1]} reward functions; "
            "pass one number per column of rewards."
        )
    if not weights_F.isfinite().all():
        raise ValueError(f"weights is {weights_F.tolist()}; pass finite numbers, 0 to leave a reward out.")
    infinite = rewards.isinf().any(dim=1).nonzero().flatten()
    if len(infinite):
        raise ValueError(
            f"rewards is infinite for rollouts {infinite[:5].tolist()} ({len(infinite)} in all); "
            "return a finite reward, or NaN where a function does not apply."
        )
    return weights_F
