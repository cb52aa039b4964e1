"""Advantages per rollout, from the rewards of its group.

`base` has the conventions on NaN, equal rewards and dtypes, and `gather_groups`.

Legend: B rollouts, P prompts (groups), F reward functions, N response tokens of all rollouts, concatenated, S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.base import check_rewards, gather_groups, register_advantage_estimator
from pl_grouprl.functional.masked import differ
from pl_grouprl.utilities.options import check_choices, check_options

REWARD_SCALES = ("group", "batch", "none")


@register_advantage_estimator("grpo", takes_steps=True)
@torch.no_grad()
def group_relative_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], *, scale: str = "group", eps: float = 1e-6
) -> Tensor:
    """Center rewards on their group's mean and divide by a standard deviation (GRPO, arXiv:2402.03300, section 4.1.2).

    Equal to verl's `grpo` and, with `eps=1e-4`, to TRL's `scale_rewards` of the same name.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        scale: `group` divides by the group's standard deviation, `batch` by all rewards', `none` does not
            divide (Dr. GRPO, arXiv:2503.20783). Standard deviations are unbiased (n - 1).
        eps: Added to the standard deviation, in units of the reward.

    Returns:
        Advantages, shape [B]. Exactly zero where all rewards of a group are equal, and without a reward.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, the scale is unknown, or eps is negative.
    """
    check_options(
        {
            "scale": (scale, scale in REWARD_SCALES, f"one of {', '.join(REWARD_SCALES)}"),
            "eps": (eps, eps >= 0, "0 or larger"),
        }
    )
    groups = gather_groups(rewards, group_ids)
    centered_B = groups.centered()
    if scale == "group":
        centered_B = centered_B / (groups.std()[groups.index_B] + eps)
    elif scale == "batch":
        valid = groups.rewards_B[groups.valid_B]
        std = valid.std() if len(valid) > 1 else valid.new_zeros(())
        centered_B = centered_B / (std + eps)
    return groups.finish(centered_B)


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
    return groups.finish(groups.centered() * factor_P[groups.index_B])


@register_advantage_estimator("gpg")
@torch.no_grad()
def gpg_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int], *, f_norm: float = 1.0) -> Tensor:
    """Center each reward on its group's mean, and divide by the share of nonzero rewards in all groups.

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
    return groups.finish(groups.centered() * alpha / f_norm)


@register_advantage_estimator("grpo_passk")
@torch.no_grad()
def grpo_passk_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], *, scale: str = "group", eps: float = 1e-6
) -> Tensor:
    """Give the best rollout of a group its lead over the second best, and the others 0 (arXiv:2503.19595).

    This gives the gradient of the group's largest reward, with the largest of the other rewards as each rollout's
    baseline. If two rollouts share the best reward, the whole group gets 0. Equal to verl's `grpo_passk`
    (`scale="none"` is its `norm_adv_by_std_in_grpo=False`), except that verl rejects groups of one.

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
    check_options(
        {"scale": (scale, scale in ("group", "none"), "group or none"), "eps": (eps, eps >= 0, "0 or larger")}
    )
    groups = gather_groups(rewards, group_ids)
    rewards_B = groups.rewards_B.masked_fill(~groups.valid_B, -torch.inf)
    best_B = groups.valid_B & ~differ(rewards_B, groups.largest(rewards_B)[groups.index_B])
    second_P = groups.largest(rewards_B.masked_fill(best_B, -torch.inf))
    unique_P = groups.sum(best_B.to(torch.float64)) == 1
    lead_B = groups.rewards_B - second_P[groups.index_B]
    if scale == "group":
        lead_B = lead_B / (groups.std()[groups.index_B] + eps)
    return groups.finish(lead_B.masked_fill(~(best_B & unique_P[groups.index_B]), 0))


# Baselines that need more than the rewards: lengths, or a greedy rollout.


@register_advantage_estimator("opo")
@torch.no_grad()
def opo_advantages(rewards: Tensor, group_ids: Tensor | Sequence[int], lengths: Tensor) -> Tensor:
    """Subtract the group's length-weighted mean from each reward (OPO, arXiv:2505.23585).

    The baseline of least variance if the squared score of a rollout grows with its length. Equal to verl's `opo`.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order.
        lengths: Tokens of each rollout that the model generated, shape [B], 0 or more.

    Returns:
        Advantages, shape [B], in units of the reward. Exactly zero where all rewards of a group are equal.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    groups = gather_groups(rewards, group_ids)
    if lengths.shape != rewards.shape:
        raise ValueError(f"lengths has shape {tuple(lengths.shape)} for {len(rewards)} rewards; pass one per rollout.")
    lengths_B = lengths.to(rewards.device, torch.float64).masked_fill(~groups.valid_B, 0)
    # Lengths are integers, so the clamp only affects groups without tokens, which train nothing.
    baseline_P = groups.sum(lengths_B * groups.rewards_B) / groups.sum(lengths_B).clamp(min=1)
    return groups.finish(groups.rewards_B - baseline_P[groups.index_B])


@register_advantage_estimator("remax")
@torch.no_grad()
def remax_advantages(rewards: Tensor, greedy_rewards: Tensor) -> Tensor:
    """Subtract the reward of the prompt's greedy rollout from each reward (ReMax, arXiv:2310.10505).

    Equal to verl's `remax` for one reward at the end of a rollout. Uses no group statistics: one rollout per prompt is
    enough, and a group of equal rewards gets 0 only if the greedy rollout has the same reward.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        greedy_rewards: Reward of the greedy rollout of each rollout's prompt, shape [B]; NaN marks a prompt without a
            baseline.

    Returns:
        Advantages, shape [B], in units of the reward; 0 where either reward is missing.

    Raises:
        ValueError: If the shapes differ or a reward is infinite.
    """
    check_rewards(rewards)
    check_rewards(greedy_rewards, "greedy_rewards")
    if len(greedy_rewards) != len(rewards):
        raise ValueError(f"greedy_rewards has {len(greedy_rewards)} entries for {len(rewards)} rewards.")
    rewards_B, greedy_B = rewards.to(torch.float64), greedy_rewards.to(rewards.device, torch.float64)
    advantages_B = (rewards_B - greedy_B).masked_fill(~differ(greedy_B, rewards_B), 0)
    return advantages_B.to(torch.promote_types(rewards.dtype, torch.float32))


# Several rewards per rollout, summed before or after normalization within the group.

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
    weights_F = _weights_of(rewards, weights)
    total_B = (rewards.to(torch.float64) * weights_F).nansum(dim=1)
    total_B = total_B.masked_fill(rewards.isnan().all(dim=1), torch.nan)
    return total_B.to(torch.promote_types(rewards.dtype, torch.float32))


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
    check_choices(aggregation=(aggregation, REWARD_AGGREGATIONS))
    weights_F = _weights_of(rewards, weights)
    if greedy_rewards is not None and greedy_rewards.shape != rewards.shape:
        shapes = f"{tuple(greedy_rewards.shape)} and rewards {tuple(rewards.shape)}"
        raise ValueError(f"greedy_rewards has shape {shapes}; pass both as [B, F].")
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
    # Standardized over the batch, as one group, except that groups of zeros stay 0.
    groups = gather_groups(total_B, group_ids)
    total_B = total_B.masked_fill(rewards.isnan().all(dim=1), torch.nan)
    standardized_B = group_relative_advantages(total_B, torch.zeros_like(groups.index_B), eps=eps)
    nonzero_B = differ(0, groups.largest(groups.rewards_B.abs()))[groups.index_B]
    return standardized_B.masked_fill(~nonzero_B, 0).to(torch.promote_types(rewards.dtype, torch.float32))


def _weights_of(rewards: Tensor, weights: Tensor | Sequence[float]) -> Tensor:
    """Check the shapes of rewards [B, F] and weights [F]; return the weights in float64."""
    weights_F = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    if rewards.dim() != 2 or weights_F.shape != rewards.shape[1:]:
        shapes = f"{tuple(weights_F.shape)} and rewards {tuple(rewards.shape)}"
        raise ValueError(f"weights has shape {shapes}; pass [F] and [B, F], one column per reward function.")
    if rewards.isinf().any():  # two of opposite sign would add up to NaN, a rollout without a reward
        raise ValueError("rewards is infinite; return a finite reward, or NaN where a function does not apply.")
    check_options({"weights": (weights_F.tolist(), True, "finite; use 0 to omit a reward")})
    return weights_F


# Rewards per step of a rollout (process supervision).


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
        ValueError: If a reward is infinite.
    """
    ids_B = torch.as_tensor(group_ids, device=token_rewards.device)
    index_N = torch.arange(len(ids_B), device=ids_B.device).repeat_interleave(lengths)
    ends_N = ~token_rewards.isnan()
    normalized_S = estimator(token_rewards[ends_N], ids_B[index_N[ends_N]])
    normalized_N = torch.zeros_like(token_rewards, dtype=torch.float64)
    normalized_N[ends_N] = normalized_S.to(torch.float64)
    rows = [rollout.flip(0).cumsum(0).flip(0) for rollout in normalized_N.split(lengths.tolist())]
    dtype = torch.promote_types(token_rewards.dtype, torch.float32)
    return torch.cat(rows).to(dtype) if rows else normalized_N.to(dtype)
