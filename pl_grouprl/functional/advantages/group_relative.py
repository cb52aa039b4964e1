"""Advantages per rollout from the rewards of its group alone.

Legend: B rollouts, P prompts (groups). `groups` has the conventions on NaN, equal rewards and dtypes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.groups import gather_groups
from pl_grouprl.functional.advantages.registry import register_advantage_estimator
from pl_grouprl.functional.masked import differ
from pl_grouprl.utilities.options import check_options

REWARD_SCALES = ("group", "batch", "none")
PASSK_SCALES = ("group", "none")


@register_advantage_estimator("grpo", takes_steps=True)
@torch.no_grad()
def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], *, scale: str = "group", eps: float = 1e-6
) -> Tensor:
    """Centre each reward on its group's mean and divide by a standard deviation (GRPO, arXiv:2402.03300, eq. 3).

    Equal to verl's `grpo` and, with `eps=1e-4`, to TRL's `scale_rewards` of the same name.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        scale: `group` divides by the group's standard deviation, `batch` by that of all rewards, `none` does not
            divide (Dr. GRPO, arXiv:2503.20783). Standard deviations are unbiased (n - 1).
        eps: Added to the standard deviation, in units of the reward.

    Returns:
        Advantages, shape [B]. Exactly zero where all rewards of a group are equal, and without a reward.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, the scale is unknown, or eps is negative.
    """
    _check_scale(scale)
    _check_eps(eps)
    groups = gather_groups(rewards, group_ids)
    centred_B = groups.centred()
    if scale == "group":
        centred_B = centred_B / (groups.std()[groups.index_B] + eps)
    elif scale == "batch":
        valid = groups.rewards_B[groups.valid_B]
        std = valid.std() if len(valid) > 1 else valid.new_zeros(())
        centred_B = centred_B / (std + eps)
    return groups.finish(centred_B)


@register_advantage_estimator("rloo")
@torch.no_grad()
def rloo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int]) -> Tensor:
    """Subtract from each reward the mean of the group's other rewards (RLOO, arXiv:2402.14740).

    Equal to verl's `rloo` and to TRL's RLOO without `normalize_advantages`.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.

    Returns:
        Advantages, shape [B], in units of the reward. Exactly zero where all rewards of a group are equal.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    groups = gather_groups(rewards, group_ids)
    # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
    factor_P = groups.count_P / (groups.count_P - 1).clamp(min=1)
    return groups.finish(groups.centred() * factor_P[groups.index_B])


@register_advantage_estimator("gpg")
@torch.no_grad()
def gpg_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int], *, f_norm: float = 1.0) -> Tensor:
    """Centre each reward on its group's mean, and divide by the share of nonzero rewards in all groups.

    A variant of GPG (arXiv:2504.02546), which divides by the share of rollouts with a gradient. Equal to verl's `gpg`,
    except that a group of one rollout gets 0. Use it with `policy_loss: gpg`.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        f_norm: Divides the advantages.

    Returns:
        Advantages, shape [B]. Exactly zero where all rewards of a group are equal.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, or f_norm is not positive.
    """
    check_options({"f_norm": (f_norm, f_norm > 0, "larger than 0")})
    groups = gather_groups(rewards, group_ids)
    alpha = groups.valid_B.sum() / differ(0.0, groups.rewards_B).sum().clamp(min=1)
    return groups.finish(groups.centred() * alpha / f_norm)


@register_advantage_estimator("grpo_passk")
@torch.no_grad()
def grpo_passk_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], *, scale: str = "group", eps: float = 1e-6
) -> Tensor:
    """Give the best rollout of a group its lead over the second best, and the others 0 (arXiv:2503.19595).

    This gives the gradient of the group's largest reward, with the largest of the other rewards as each rollout's
    baseline. If two rollouts share the best reward, the whole group gets 0. Equal to verl's `grpo_passk`
    (`scale="none"` is its `norm_adv_by_std_in_grpo=False`), except that verl refuses groups of one.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        scale: `group` divides by the group's unbiased standard deviation, `none` does not divide.
        eps: Added to the standard deviation, in units of the reward.

    Returns:
        Advantages, shape [B], 0 or more.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, the scale is unknown, or eps is negative.
    """
    _check_scale(scale, PASSK_SCALES)
    _check_eps(eps)
    groups = gather_groups(rewards, group_ids)
    rewards_B = groups.rewards_B.masked_fill(~groups.valid_B, -torch.inf)
    best_B = groups.valid_B & ~differ(rewards_B, groups.largest(rewards_B)[groups.index_B])
    second_P = groups.largest(rewards_B.masked_fill(best_B, -torch.inf))
    unique_P = groups.sum(best_B.to(torch.float64)) == 1
    lead_B = groups.rewards_B - second_P[groups.index_B]
    if scale == "group":
        lead_B = lead_B / (groups.std()[groups.index_B] + eps)
    return groups.finish(lead_B.masked_fill(~(best_B & unique_P[groups.index_B]), 0))


def _check_eps(eps: float) -> None:
    check_options({"eps": (eps, eps >= 0, "0 or larger")})


def _check_scale(scale: str, scales: Sequence[str] = REWARD_SCALES) -> None:
    if scale not in scales:
        raise ValueError(f"scale is {scale!r}; it must be one of {', '.join(scales)}.")
