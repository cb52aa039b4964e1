"""Advantages along time, per token or per turn: GAE with a critic, returns and baselines without one.

Every function treats a row as the sequence of its valid tokens: gaps in the mask, such as tool output, are closed
first, so neither their length nor their contents (even NaN) matter. Conventions:

- `mask` is bool, or 0 and 1 of another dtype;
- V_t is the critic's value before token t is sampled; `bootstrap_value` is the value after the last valid token, 0
  where the response ended by itself;
- a NaN reward means that the rollout has none: its errors and advantages are 0, its returns are its values, and it does
  not enter statistics (callers also mask it out of the losses);
- results are in the dtype of the arguments (at least float32), without gradient, and 0 outside the mask.

`generalized_advantages` does not whiten; use `masked_whiten`. verl whitens inside its `gae`, TRL's former PPO did right
after.

Legend: B rollouts, P prompts (groups), T length of the longest row, K largest number of turns, S states.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.base import BranchPaths, gather_groups, register_advantage_estimator
from pl_grouprl.functional.advantages.branching import leaf_weights
from pl_grouprl.functional.advantages.outcomes import group_relative_advantages
from pl_grouprl.functional.masked import Reduce, bool_mask, compact, differ, masked_whiten, reverse_scan
from pl_grouprl.utilities.options import check_options


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
        critic_lam: Lambda of the returns (decoupled GAE, arXiv:2503.01491); defaults to `lam`.
        bootstrap_value: Value after the last valid token, shape [B]; defaults to 0.

    Returns:
        Advantages and returns, both [B, T]. Returns are the critic's target: the advantages under `critic_lam` plus
        the values.

    Raises:
        ValueError: If shapes differ, gamma or a lambda is outside [0, 1], a reward is infinite, or the mask has other
            values than 0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values)
    errors_BT = td_errors(rewards, values, mask_BT, gamma=gamma, bootstrap_value=bootstrap_value)
    decay_BT = lambda_rows("lam", lam, errors_BT) * gamma
    advantages_BT = critic_advantages_BT = _discounted_sum(errors_BT, mask_BT, decay_BT)
    if critic_lam is not None:
        decay_BT = lambda_rows("critic_lam", critic_lam, errors_BT) * gamma
        critic_advantages_BT = _discounted_sum(errors_BT, mask_BT, decay_BT)
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
        bootstrap_value: Value after the last valid token, shape [B]; defaults to 0.

    Returns:
        Shape [B, T], 0 outside the mask.

    Raises:
        ValueError: If shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask has other values than
            0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values)
    check_options({"gamma": (gamma, 0 <= gamma <= 1, "in [0, 1]")})
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, values.dtype), torch.float32)
    rows = compact(mask_BT)
    rewards_BT, values_BT = rows.close(rewards.to(dtype)), rows.close(values.to(dtype))
    next_BT = _shift_left(values_BT)
    if bootstrap_value is not None:
        if bootstrap_value.shape != (len(mask_BT),):
            raise ValueError(f"bootstrap_value has shape {tuple(bootstrap_value.shape)}; pass one per rollout, [B].")
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
    check_options({"gamma": (gamma, 0 <= gamma <= 1, "in [0, 1]")})
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
    check_options({"alpha": (alpha, alpha > 0, "larger than 0, such as 0.05")})
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


def check_rows(mask: Tensor, *, rewards: Tensor, **others: Tensor) -> Tensor:
    """Check rows [B, T] of tokens; return the mask as bool.

    Raises:
        ValueError: If shapes differ, a reward is infinite where the mask is true, or the mask has other values than 0
            and 1.
    """
    for name, tensor in {"rewards": rewards, "mask": mask, **others}.items():
        if tensor.dim() != 2 or tensor.shape != rewards.shape:
            shapes = f"{tuple(tensor.shape)} and rewards {tuple(rewards.shape)}"
            raise ValueError(f"{name} has shape {shapes}; pass one row of tokens per rollout, [B, T].")
    mask_BT = bool_mask(mask)
    infinite = (rewards.isinf() & mask_BT).any(dim=1).nonzero().flatten().tolist()
    if infinite:
        raise ValueError(f"rewards is infinite for rollouts {infinite[:5]}; use NaN to omit a rollout from training.")
    return mask_BT


def lambda_rows(name: str, lam: float | Tensor, like_BT: Tensor) -> Tensor:
    """Check a lambda, one number or one per rollout [B], and expand it to [B, T].

    Raises:
        ValueError: If it has another shape, or is outside [0, 1].
    """
    lam_B = lam if isinstance(lam, Tensor) else torch.tensor(lam, dtype=torch.float64, device=like_BT.device)
    if lam_B.shape not in ((), (len(like_BT),)):
        raise ValueError(f"{name} has shape {tuple(lam_B.shape)}; pass one number, or one per rollout, [B].")
    check_options({name: (lam, bool(((lam_B >= 0) & (lam_B <= 1)).all()), "in [0, 1]")})
    return lam_B.to(like_BT).expand(len(like_BT))[:, None].expand_as(like_BT)


# Turns as the steps of the decision process: what the model writes between two texts that it reads is one action.


@torch.no_grad()
def turn_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    turns: Tensor,
    *,
    gamma: float,
    lam: float | Tensor,
    critic_lam: float | Tensor | None = None,
    bootstrap_value: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Estimate one advantage per turn (Turn-PPO, arXiv:2512.17008): GAE whose steps are the turns.

        A_k = r_k + gamma V_{k+1} - V_k + gamma * lam * A_{k+1}

    r_k is the sum of the turn's rewards, V_k the value before its first token. So gamma and lambda count turns, and the
    value of no state within a turn, or at text that the model only reads, matters. With gamma = 1 and one turn, it is
    the reward minus V_0; with one token per turn, `generalized_advantages`.

    Args:
        rewards: Reward of each token, shape [B, T], any unit.
        values: V_t, the critic's value before token t is sampled, shape [B, T], in units of the reward.
        mask: True for trained tokens, shape [B, T]; rewards of other tokens are ignored.
        turns: Turn of each token, counted from 0 in each row, -1 for tokens that the model did not write; int64, shape
            [B, T]. Turns may have tokens that are not trained.
        gamma: Discount per turn, in [0, 1].
        lam: Decay of later errors per turn, in [0, 1]; or one per rollout, shape [B].
        critic_lam: The same for the returns; defaults to `lam`.
        bootstrap_value: Value after the last turn, shape [B]; defaults to 0.

    Returns:
        Advantages and returns, both [B, T]: A_k and A_k + V_k (under `critic_lam`) at all trained tokens of turn k; and
        the trained tokens that begin a turn, bool, where the return is the critic's target.

    Raises:
        ValueError: If shapes differ, a trained token has no turn, gamma or a lambda is outside [0, 1], a reward is
            infinite, or the mask has other values than 0 and 1.
    """
    mask_BT = check_rows(mask, rewards=rewards, values=values, turns=turns)
    rows = _turn_rows(mask_BT, turns)
    advantages_BK, returns_BK = generalized_advantages(
        rows.sum(rewards, mask_BT),
        rows.first(values),
        rows.mask_BK,
        gamma=gamma,
        lam=lam,
        critic_lam=critic_lam,
        bootstrap_value=bootstrap_value,
    )
    starts_BT = (turns >= 0) & (turns != torch.nn.functional.pad(turns[:, :-1], (1, 0), value=-1)) & mask_BT
    spread = [rows.spread(of_turns_BK).masked_fill(~mask_BT, 0) for of_turns_BK in (advantages_BK, returns_BK)]
    return spread[0], spread[1], starts_BT


class _TurnRows(NamedTuple):
    """Rows of turns: `turns_BT` is that of each token, at least 0, and `first_BK` each turn's first token."""

    turns_BT: Tensor
    first_BK: Tensor
    mask_BK: Tensor

    def sum(self, values_BT: Tensor, mask_BT: Tensor) -> Tensor:
        zeros_BK = torch.zeros_like(self.first_BK, dtype=torch.promote_types(values_BT.dtype, torch.float32))
        return zeros_BK.scatter_add(1, self.turns_BT, values_BT.masked_fill(~mask_BT, 0).to(zeros_BK.dtype))

    def first(self, values_BT: Tensor) -> Tensor:
        return values_BT.gather(1, self.first_BK).masked_fill(~self.mask_BK, 0)

    def spread(self, values_BK: Tensor) -> Tensor:
        return values_BK.gather(1, self.turns_BT)


def _turn_rows(mask_BT: Tensor, turns_BT: Tensor) -> _TurnRows:
    if (mask_BT & (turns_BT < 0)).any():
        raise ValueError("turns is negative at a trained token; pass the turn of each token that the model wrote.")
    width = turns_BT.shape[1]
    num_turns = int(turns_BT.max()) + 1 if turns_BT.numel() else 0
    num_turns = max(num_turns, min(width, 1))  # tokens without a turn are looked up in column 0
    columns_BT = torch.arange(width, device=turns_BT.device).expand_as(turns_BT).masked_fill(turns_BT < 0, width)
    turns_BT = turns_BT.clamp(min=0)
    first_BK = columns_BT.new_full((len(turns_BT), num_turns), width).scatter_reduce(1, turns_BT, columns_BT, "amin")
    # A turn without tokens keeps `width`; it is masked, and clamped to be a valid index.
    return _TurnRows(turns_BT, first_BK.clamp(max=max(width - 1, 0)), first_BK < width)


@register_advantage_estimator("gagpo", per_token=True, takes_token_rewards=True)
@torch.no_grad()
def gagpo_advantages(
    rewards: Tensor,
    group_ids: Tensor | Sequence[int],
    mask: Tensor,
    turns: Tensor,
    states: Tensor,
    branches: BranchPaths,
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    scale: str = "group",
    eps: float = 1e-6,
    reduce: Reduce | None = None,
) -> Tensor:
    """Estimate one advantage per turn without a critic: a state's value is its mean return in the group (GAGPO).

        V(s) = mean of r_k + gamma r_{k+1} + ... over the turns k of the group that begin in the state s
        A_k = r_k + gamma V(s_{k+1}) - V(s_k) + gamma * lam * A_{k+1},  V = 0 after the last turn

    and A_k minus its mean over all turns of the group, divided by their standard deviation (arXiv:2605.13217). With one
    turn per rollout it equals `grpo`. A state that a single turn of the group reaches has the return of that turn as
    its value. The gradient is biased, as a return is part of its own baseline.

    V, the recursion and the normalization over the group follow secondary accounts of the paper. Its text was not at
    hand, so details of the normalization and the defaults may differ. The paper clips the ratio of a turn, a geometric
    mean over its tokens; here the policy loss decides (`gspo` takes that mean over the whole rollout).

    Args:
        rewards: Reward of each token, shape [B, T], any unit; NaN marks a rollout without rewards.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for trained tokens, shape [B, T].
        turns: As for `turn_advantages`.
        states: Where each token's turn began: equal numbers for equal states of the same group, int64, shape [B, T];
            only those at the first token of a turn count. In a run, states are equal if the text that the model read
            right before the turn is: the result of the tools, or the prompt.
        branches: How the rollouts branch. Turns that several rollouts share count once in V (leaf weights).
        gamma: Discount per turn, in [0, 1].
        lam: Decay of later errors per turn, in [0, 1].
        scale: `group` divides by the group's standard deviation, `none` does not.
        eps: Added to the standard deviation, in units of the reward.
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B, T], the same number for all trained tokens of a turn, leaf weights included; 0 outside the mask.
        Exactly 0 in groups whose turns all have the same A_k.

    Raises:
        ValueError: If shapes differ, a trained token has no turn, a reward is infinite, an option is out of range, or
            the branches of a group contradict each other.
    """
    check_options({"scale": (scale, scale in ("group", "none"), "group or none")})
    mask_BT = check_rows(mask, rewards=rewards, turns=turns, states=states)
    rows = _turn_rows(mask_BT, turns)
    rewards_BK = rows.sum(rewards.to(torch.float64), mask_BT)
    trained_BT = mask_BT & ~_rows_without_reward(rewards, mask_BT)
    valid_BK = rows.mask_BK & trained_BT.any(dim=1, keepdim=True)
    weights_B = leaf_weights(group_ids, trained_BT, branches, reduce=reduce)
    group_BK = torch.as_tensor(group_ids, device=turns.device)[:, None].expand_as(valid_BK)

    returns_BK = discounted_returns(rewards_BK, valid_BK, gamma)
    _, state_N = torch.stack([group_BK, rows.first(states)]).flatten(1).unique(dim=1, return_inverse=True)  # N = B * K
    zeros_S = returns_BK.new_zeros(state_N.numel())  # at least as many as there are states
    weights_BK = weights_B[:, None] * valid_BK
    total_S = zeros_S.index_add(0, state_N, (weights_BK * returns_BK).flatten())
    values_S = total_S / zeros_S.index_add(0, state_N, weights_BK.flatten()).clamp(min=1e-300)
    values_BK = values_S[state_N].view(valid_BK.shape)

    advantages_BK, _ = generalized_advantages(rewards_BK, values_BK, valid_BK, gamma=gamma, lam=lam)
    advantages_BK[valid_BK] = group_relative_advantages(
        advantages_BK[valid_BK], group_BK[valid_BK], scale=scale, eps=eps
    )
    advantages_BT = rows.spread(advantages_BK) * weights_B[:, None]
    return advantages_BT.masked_fill(~mask_BT, 0).to(torch.promote_types(rewards.dtype, torch.float32))


# Baselines for each position in the group.


@register_advantage_estimator("optimal_token_baseline", per_token=True, takes_token_rewards=True)
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
    check_options({"eps": (eps, eps > 0, "larger than 0")})
    mask_BT = check_rows(mask, rewards=rewards, score_norms=score_norms)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    if not mask_BT.numel():
        return torch.zeros_like(rewards, dtype=dtype)
    mask_BT = mask_BT & ~_rows_without_reward(rewards, mask_BT)
    returns_BT = discounted_returns(rewards.to(torch.float64), mask_BT, 1.0)
    weights_BT = score_norms.to(torch.float64).masked_fill(~mask_BT, 0).cumsum(dim=1) * mask_BT

    # The baseline: the weighted mean over each group, by position.
    counts_B = mask_BT.sum(dim=1).to(torch.float64)
    groups = gather_groups(counts_B, group_ids)
    index_B = groups.index_B
    zeros_PT = returns_BT.new_zeros(len(groups.count_P), returns_BT.shape[1])
    total_PT = zeros_PT.index_add(0, index_B, returns_BT * weights_BT)
    baseline_BT = (total_PT / (zeros_PT.index_add(0, index_B, weights_BT) + eps))[index_B]
    if handle_zero_tail:  # 0 for a group's one longest rollout, once the second longest has ended
        is_longest_B = counts_B == groups.largest(counts_B)[index_B]
        is_alone_B = is_longest_B & (groups.sum(is_longest_B.to(torch.float64))[index_B] == 1)
        second_B = groups.largest(counts_B.masked_fill(is_longest_B, 0))[index_B]
        end_B = torch.where(is_alone_B, second_B, counts_B.max() + 1)
        is_tail_BT = torch.arange(mask_BT.shape[1], device=mask.device) >= end_B[:, None]
        baseline_BT = baseline_BT.masked_fill(is_tail_BT, 0)

    # Exactly 0 unless the group has two trained rollouts or more, and different rewards-to-go.
    highest_P = groups.largest(returns_BT.masked_fill(~mask_BT, -torch.inf).amax(dim=1))
    lowest_P = -groups.largest((-returns_BT).masked_fill(~mask_BT, -torch.inf).amax(dim=1))
    differs_P = differ(lowest_P, highest_P) & (groups.sum(mask_BT.any(dim=1).to(torch.float64)) > 1)
    return ((returns_BT - baseline_BT) * (mask_BT & differs_P[index_B][:, None])).to(dtype)


@register_advantage_estimator("tir_optimal_token_baseline", per_token=True, takes_token_rewards=True)
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
    rows = compact(check_rows(mask, rewards=rewards, score_norms=score_norms))
    rewards_BT, norms_BT = rows.close(rewards), rows.close(score_norms)
    advantages_BT = optimal_token_baseline_advantages(
        rewards_BT, group_ids, rows.mask_BT, norms_BT, handle_zero_tail=handle_zero_tail, eps=eps
    )
    return rows.reopen(advantages_BT)


# REINFORCE++: whitened over the whole batch.


@register_advantage_estimator("reinforce_plus_plus", per_token=True, takes_token_rewards=True)
@torch.no_grad()
def reinforce_plus_plus_advantages(
    rewards: Tensor, mask: Tensor, *, gamma: float = 1.0, reduce: Reduce | None = None
) -> Tensor:
    """Whiten the discounted reward-to-go of all tokens of the batch (REINFORCE++, arXiv:2501.03262).

    Equal to verl's `reinforce_plus_plus`, except that its older releases restart the sum at a gap in the mask.

    Args:
        rewards: Reward of each token, shape [B, T], any unit; the reward of a rollout is at its last token.
        mask: True for response tokens, shape [B, T].
        gamma: Discount per token, in [0, 1].
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B, T], 0 outside the mask. Exactly 0 where all tokens of the batch have the same reward-to-go.

    Raises:
        ValueError: If the shapes differ, gamma is outside [0, 1], a reward is infinite, or the mask has other
            values than 0 and 1.
    """
    returns_BT = discounted_returns(rewards, mask, gamma)
    mask_BT = bool_mask(mask)
    return masked_whiten(returns_BT, mask_BT & ~_rows_without_reward(rewards, mask_BT), reduce=reduce)


@register_advantage_estimator("reinforce_plus_plus_baseline", per_token=True)
@torch.no_grad()
def reinforce_plus_plus_baseline_advantages(
    rewards: Tensor, group_ids: Tensor | Sequence[int], mask: Tensor, *, reduce: Reduce | None = None
) -> Tensor:
    """Subtract the group's mean from each reward, and whiten over all tokens of the batch (arXiv:2501.03262).

    Equal to verl's `reinforce_plus_plus_baseline` except for groups without spread and groups of one: here they enter
    the statistics as 0 and get exactly 0. verl whitens that 0, and uses the reward itself for groups of one.

    Args:
        rewards: Scalar reward of each rollout, shape [B], any unit; NaN marks a rollout without a reward.
        group_ids: Prompt of each rollout, shape [B], any integers, in any order; a group must not be split over ranks.
        mask: True for response tokens, shape [B, T].
        reduce: Sums over ranks; defaults to this rank alone.

    Returns:
        Shape [B, T], the same number for all tokens of a rollout, 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, a reward is infinite, or the mask has other values than 0 and 1.
    """
    groups = gather_groups(rewards, group_ids)
    mask_BT = bool_mask(mask)
    centered_BT = groups.centered()[:, None].expand(mask_BT.shape)
    whitened_BT = masked_whiten(centered_BT, mask_BT & groups.valid_B[:, None], reduce=reduce)
    return whitened_BT.masked_fill(~groups.trained()[:, None], 0).to(groups.dtype)


# On-policy distillation: rewards from a teacher.


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
        teacher_logprobs: The teacher's log-probabilities of the same tokens, shape [B, T].
        mask: True for trained tokens, shape [B, T]. Tokens between them, such as tool output, are skipped.
        gamma: Discount per token, in [0, 1].

    Returns:
        Advantages in nats, not normalized, shape [B, T]; 0 outside the mask.

    Raises:
        ValueError: If the shapes differ, gamma is outside [0, 1], the teacher gives a token probability 0, or the mask
            has other values than 0 and 1.
    """
    if old_logprobs.shape != teacher_logprobs.shape:
        shapes = f"{tuple(teacher_logprobs.shape)} and old_logprobs {tuple(old_logprobs.shape)}"
        raise ValueError(f"teacher_logprobs has shape {shapes}; pass one value per token, [B, T].")
    return discounted_returns(teacher_logprobs - old_logprobs, mask, gamma)
