"""GROUP PPO's token groups: boundaries, advantages, threshold and statistics.

Algorithm 2 (Group), as quoted in the GROUP PPO reference implementation on verl (2025; no paper that states it has
been found), ends a group at its t-th token if t >= r_grpo / r_ppo. r_grpo is the squared norm of the gradient estimate
in which all tokens of the group share the advantage of the last one, r_ppo the same for an advantage per
token. With k the number of tokens since the group began,

    end_t = (r_ppo > eps * mean(delta^2 q)  and  k * r_ppo * (1 + 1e-5) >= threshold * r_grpo)
            or k = max_size  or  t is the last valid token  or  a boundary is forced at t.

With a score norm q per token, cross terms are dropped (the score is a martingale difference, so they vanish in
expectation): r_ppo = sum delta^2 q and r_grpo = delta_t^2 * sum q. With a score vector phi per token, the formula is
exact: r_ppo = |sum delta phi|^2 and r_grpo = delta_t^2 * |sum phi|^2.

A second rule, of segmental advantage estimation (SAE, arXiv:2601.07320), ends groups at improbable tokens; see
`improbable_token_groups`.

Legend: B rollouts, T length of the longest row, S size of a sketch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pl_grouprl.functional.advantages.temporal import lambda_rows, td_errors
from pl_grouprl.functional.masked import bool_mask, compact, reverse_scan
from pl_grouprl.utilities.options import check_choices, check_options

__all__ = [
    "ADVANTAGE_MODES",
    "ENDED_BY_LAST",
    "ENDED_BY_SIZE",
    "ENDED_BY_VARIANCE",
    "AdvantageMode",
    "ThresholdController",
    "TokenGroups",
    "find_token_groups",
    "improbable_token_groups",
    "log_ratio_scores",
    "signal_sums",
    "token_group_advantages",
    "token_group_counts",
    "token_group_metrics",
]

ENDED_BY_VARIANCE = 1
"""Cause of an endpoint: the variance rule, or an improbable token. Takes precedence over the other two."""
ENDED_BY_SIZE = 2
"""Cause of an endpoint: the group has `max_size` tokens. Takes precedence over `ENDED_BY_LAST`."""
ENDED_BY_LAST = 3
"""Cause of an endpoint: the last valid token of a row, or of a turn (a forced end)."""

_TOLERANCE = 1e-5  # at k = 1 and threshold 1 both sides are equal except for rounding
_BLOCK = 1 << 16  # elements per block of rows, to stay in the cache
_DEVICE_BLOCK = 1 << 24  # the same on a GPU, where few large kernels are faster
_NEGATIVE = 1e-2  # computed in bfloat16, 1 - 2 p + sum p^2 may be this far below 0


class TokenGroups(NamedTuple):
    """The token groups of each row, in the positions of the mask.

    Attributes:
        starts: True at the first token of each group, bool, shape [B, T].
        ends: True at the last token of each group (its endpoint), bool, shape [B, T].
        group_index: Group of each token, counted from 0 in each row, -1 outside the mask; int64, shape [B, T].
        causes: `ENDED_BY_...` at endpoints, 0 elsewhere; int8, shape [B, T]. None if not recorded.
    """

    starts: Tensor
    ends: Tensor
    group_index: Tensor
    causes: Tensor | None = None


@torch.no_grad()
def find_token_groups(
    td_errors: Tensor,
    score_norms: Tensor,
    mask: Tensor,
    *,
    threshold: float = 1.0,
    max_size: int = 16,
    epsilon: float = 1e-6,
    forced_ends: Tensor | None = None,
    mean_signal: float | Tensor | None = None,
) -> TokenGroups:
    """Split each row into token groups; see the top of this file for the rule and its source.

    Only the valid tokens of a row matter: neither the number of masked positions nor their values (even NaN) do.
    Computed in at least float32. NaN or infinity at a valid token never ends its group, which continues up to
    `max_size`, and does not affect other groups.

    Args:
        td_errors: delta_t = r_t + gamma * V_{t+1} - V_t, shape [B, T], any unit; not whitened (the ratio is invariant
            to scale, but not to a shift). Other signals may be passed, but looking ahead, as GAE does, makes
            boundaries depend on later actions, and biases the gradient for thresholds above 1.
        score_norms: Squared norm q >= 0 of each token's score, shape [B, T] (`TokenScores.score_norm_N`); or the score
            itself or a sketch of it, shape [B, T, S] (`HeadSketch`, `log_ratio_scores`), for the exact formula. Norms
            slightly below 0 (down to -1e-2), a result of rounding, are accepted.
        mask: True for response tokens, shape [B, T].
        threshold: tau > 0. 1 is Algorithm 2, and makes each token with nonzero delta and q an endpoint (a token with a
            delta of 0 adds its q to the group that it begins, which may extend past the next token); with a constant
            delta a group has ceil(tau) tokens. Values below 1 act as 1.
        max_size: Maximum number of tokens per group, at least 1; may exceed T.
        epsilon: The variance rule only ends groups with r_ppo above this fraction of the mean of delta^2 q; finite.
        forced_ends: True where a group must end, such as the last token of a turn, bool, shape [B, T]. Only valid
            tokens count.
        mean_signal: Mean of delta^2 q over the tokens of all ranks (see `signal_sums`); defaults to this call's.

    Returns:
        The groups. A row without valid tokens has none.

    Raises:
        ValueError: If shapes differ, an option is out of range, a norm of a valid token is negative, or the mask has
            other values than 0 and 1.
    """
    mask_BT = _check_shapes(mask, td_errors=td_errors, score_norms=score_norms)
    check_options(
        {
            "threshold": (threshold, threshold > 0, "larger than 0 (up to 1, every token ends a group)"),
            "max_size": (max_size, max_size >= 1 and max_size % 1 == 0, "a whole number of tokens, 1 or more"),
            "epsilon": (epsilon, epsilon >= 0, "0 or larger"),
        }
    )
    _check_forced(forced_ends, mask_BT)
    if score_norms.dim() == 2 and (mask_BT & (score_norms < -_NEGATIVE)).any():
        raise ValueError("score_norms has negative entries; pass squared norms, such as score_norms.clamp(min=0).")
    if mean_signal is None:
        total, count = signal_sums(td_errors, score_norms, mask_BT).tolist()
        mean_signal = total / max(count, 1)
    else:
        check_options({"mean_signal": (float(mean_signal), bool(mean_signal >= 0), "0 or larger, or None")})

    starts_BT, ends_BT = torch.zeros_like(mask_BT), torch.zeros_like(mask_BT)
    causes_BT = torch.zeros_like(mask_BT, dtype=torch.int8)
    index_BT = torch.full_like(mask_BT, -1, dtype=torch.int64)
    if not mask_BT.numel():
        return TokenGroups(starts_BT, ends_BT, index_BT, causes_BT)
    # A power of two near the largest error: dividing by it is exact, and squares neither vanish nor overflow. It and
    # its inverse are normal numbers of the compute dtype.
    largest = float(td_errors.masked_fill(~(mask_BT & td_errors.isfinite()), 0).abs().max())
    limit = 1022 if td_errors.dtype == torch.float64 else 126
    scale = math.ldexp(1.0, max(min(math.frexp(largest)[1], limit), -limit)) if largest > 0 else 1.0
    rule = _Rule(max(threshold, 1.0), int(max_size), epsilon * float(mean_signal) / scale / scale)
    block = _BLOCK if score_norms.device.type == "cpu" else _DEVICE_BLOCK
    height = max(block // max(score_norms[0].numel(), 1), 1)
    for first in range(0, len(score_norms), height):
        rows = slice(first, first + height)
        forced = None if forced_ends is None else forced_ends[rows]
        found = _cut_rows(td_errors[rows], score_norms[rows], mask_BT[rows], forced, scale, rule)
        for whole, part in zip((starts_BT, ends_BT, index_BT, causes_BT), found, strict=True):
            whole[rows] = part
    return TokenGroups(starts_BT, ends_BT, index_BT, causes_BT)


@torch.no_grad()
def improbable_token_groups(
    logprobs: Tensor,
    mask: Tensor,
    *,
    probability: float = 0.2,
    max_size: int | None = None,
    forced_ends: Tensor | None = None,
) -> TokenGroups:
    """End a group at each token that the policy found improbable (SAE, arXiv:2601.07320).

    With `token_group_advantages` in the mode `variable_lambda`, this is segmental advantage estimation: GAE with a
    lambda of 1 inside segments. The improbable token is its group's last, so the boundary depends on the past and the
    present only. As the first of the next group, its own action would choose its baseline, and end the group before it,
    which biases the gradient. (Which of them the paper means could not be checked.)

    Args:
        logprobs: Log-probability of each token when it was sampled, in nats, shape [B, T].
        mask: True for response tokens, shape [B, T]; only these matter, as in `find_token_groups`.
        probability: A token with less probability than this ends its group, in (0, 1]; 0.2 in the paper.
        max_size: Maximum number of tokens per group, at least 1; no maximum if None.
        forced_ends: True where a group must end, bool, shape [B, T].

    Returns:
        The groups; improbable tokens have the cause `ENDED_BY_VARIANCE`.

    Raises:
        ValueError: If shapes differ, an option is out of range, or the mask has other values than 0 and 1.
    """
    mask_BT = _check_shapes(mask, logprobs=logprobs)
    check_options(
        {
            "probability": (probability, 0 < probability <= 1, "larger than 0, at most 1"),
            "max_size": (max_size, max_size is None or max_size >= 1, "1 or more, or None"),
        }
    )
    _check_forced(forced_ends, mask_BT)
    rows = compact(mask_BT)
    improbable_BT = rows.close(logprobs < math.log(probability))
    last_BT = rows.mask_BT & ~torch.nn.functional.pad(rows.mask_BT[:, 1:], (0, 1))
    if forced_ends is not None:
        last_BT |= rows.close(forced_ends)
    # A run between two ends is cut every max_size tokens.
    places_BT = torch.arange(mask_BT.shape[1], device=mask.device).expand_as(mask_BT)
    follows_BT = torch.nn.functional.pad((improbable_BT | last_BT)[:, :-1], (1, 0), value=True)
    run_BT = torch.where(follows_BT, places_BT, 0).cummax(dim=1).values
    full_BT = rows.mask_BT & ((places_BT - run_BT + 1) % (max_size or mask_BT.shape[1] + 1) == 0)
    causes_BT = torch.where(full_BT, ENDED_BY_SIZE, last_BT.to(torch.int8) * ENDED_BY_LAST)
    causes_BT = torch.where(improbable_BT, ENDED_BY_VARIANCE, causes_BT).to(torch.int8)
    starts_BT = rows.mask_BT & torch.nn.functional.pad(causes_BT[:, :-1] > 0, (1, 0), value=True)
    starts_BT, causes_BT = rows.reopen(starts_BT), rows.reopen(causes_BT)
    index_BT = (starts_BT.cumsum(dim=1) - 1).masked_fill(~mask_BT, -1)
    return TokenGroups(starts_BT, causes_BT > 0, index_BT, causes_BT)


@torch.no_grad()
def signal_sums(td_errors: Tensor, score_norms: Tensor, mask: Tensor) -> Tensor:
    """Sum of delta^2 q and number of tokens; their ratio after summing over ranks is `mean_signal`.

    Args:
        td_errors: As for `find_token_groups`, shape [B, T].
        score_norms: As for `find_token_groups`, shape [B, T] or [B, T, S] (then q is the squared norm).
        mask: True for response tokens, shape [B, T].

    Returns:
        [sum, count] in float64. Tokens whose signal is NaN or infinite count in neither.

    Raises:
        ValueError: If shapes differ, or the mask has other values than 0 and 1.
    """
    mask_BT = _check_shapes(mask, td_errors=td_errors, score_norms=score_norms)
    norms_BT = score_norms
    if score_norms.dim() == 3:
        dtype = torch.promote_types(score_norms.dtype, torch.float32)
        norms_BT = torch.linalg.vector_norm(score_norms, dim=-1, dtype=dtype).double().square()
    signal_BT = td_errors.double().square() * norms_BT
    counted_BT = mask_BT & signal_BT.isfinite()
    return torch.stack([signal_BT.masked_fill(~counted_BT, 0).sum(), counted_BT.sum().double()])


def _check_shapes(mask: Tensor, **tensors: Tensor) -> Tensor:
    """Check that all share the axes B and T; return the mask as bool."""
    for name, tensor in tensors.items():
        axes, shape = "[B, T]", tensor.shape
        if name == "score_norms" and tensor.dim() == 3:
            axes, shape = "[B, T, S]", shape[:2]
        if mask.dim() != 2 or shape != mask.shape:
            given = f"{name} has shape {tuple(tensor.shape)} and mask {tuple(mask.shape)}"
            raise ValueError(f"{given}; pass {axes} and [B, T].")
    return bool_mask(mask)


def _check_forced(forced_ends: Tensor | None, mask_BT: Tensor) -> None:
    if forced_ends is not None and (forced_ends.shape != mask_BT.shape or forced_ends.dtype != torch.bool):
        given = f"shape {tuple(forced_ends.shape)} and dtype {forced_ends.dtype}"
        raise ValueError(f"forced_ends has {given}; pass bool, shape {tuple(mask_BT.shape)}.")


def log_ratio_scores(policy_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Use log pi_new - log pi_old as the score, as the reference implementation does; only for comparison with it.

    Args:
        policy_logprobs: Log-probability of each token under the current policy, shape [B, T], in nats.
        old_logprobs: Under the policy before the update, shape [B, T].
        mask: True for response tokens, shape [B, T].

    Returns:
        Score vectors of size 1, shape [B, T, 1], for `find_token_groups`.

    Raises:
        ValueError: If shapes differ, or the two are equal at every token, as in the first pass over new rollouts.
    """
    mask_BT = _check_shapes(mask, policy_logprobs=policy_logprobs, old_logprobs=old_logprobs)
    ratio_BT = (policy_logprobs.detach() - old_logprobs.detach()).masked_fill(~mask_BT, 0)
    if mask_BT.any() and not ratio_BT.any():
        raise ValueError("old_logprobs equals policy_logprobs at every token; use score_norm='logit' or 'sketch'.")
    return ratio_BT[:, :, None]


class _Rule(NamedTuple):
    threshold: float
    max_size: int
    floor: float


def _cut_rows(
    errors_BT: Tensor, norms: Tensor, mask_BT: Tensor, forced_BT: Tensor | None, scale: float, rule: _Rule
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Close the gaps, split, and reopen the gaps; returns starts, ends, index, causes."""
    dtype = torch.promote_types(torch.promote_types(errors_BT.dtype, norms.dtype), torch.float32)
    errors_BT, norms = errors_BT.to(dtype) / scale, norms.to(dtype)
    finite_BT = norms.isfinite() if norms.dim() == 2 else norms.isfinite().all(dim=2)
    errors_BT = errors_BT.masked_fill(~finite_BT | errors_BT.isinf(), torch.nan)  # NaN compares as false
    rows = None if _is_left_aligned(mask_BT) else compact(mask_BT)
    if rows is not None:
        errors_BT = rows.close(errors_BT)
        vectors = norms.dim() == 3
        norms = norms.gather(1, rows.index_BT[:, :, None].expand_as(norms)) if vectors else rows.close(norms)
        forced_BT = None if forced_BT is None else rows.close(forced_BT)
        mask_BT = rows.mask_BT
    last_BT = mask_BT.clone()
    last_BT[:, :-1] &= ~mask_BT[:, 1:]
    if forced_BT is not None:
        last_BT |= forced_BT & mask_BT
    size_BT, cause_BT = _first_ends(errors_BT, norms, mask_BT, last_BT, rule)
    starts_BT, causes_BT = _follow(size_BT, cause_BT, mask_BT)
    index_BT = (starts_BT.cumsum(dim=1) - 1).masked_fill_(~mask_BT, -1)
    if rows is None:
        return starts_BT, causes_BT > 0, index_BT, causes_BT
    starts_BT, causes_BT = rows.reopen(starts_BT), rows.reopen(causes_BT)
    return starts_BT, causes_BT > 0, rows.reopen(index_BT, fill=-1), causes_BT


def _is_left_aligned(mask_BT: Tensor) -> bool:
    """Whether the valid tokens of each row are its first ones."""
    return not (mask_BT[:, 1:] & ~mask_BT[:, :-1]).any()


def _first_ends(
    errors_BT: Tensor, norms: Tensor, mask_BT: Tensor, last_BT: Tensor, rule: _Rule
) -> tuple[Tensor, Tensor]:
    """For each t, the size of a group that starts at t, and why it ends.

    Loops over the group size k, for all starts in parallel, until each has an end. Sums grow by one token per
    iteration, in the order of a loop over tokens; differences of prefix sums would cancel.
    """
    length = errors_BT.shape[1]
    size_BT = torch.ones_like(mask_BT, dtype=torch.int64)
    cause_BT = (~mask_BT).to(torch.int8)  # nothing to find after the end
    end_BT = last_BT.to(torch.int8) * ENDED_BY_LAST
    square_BT, vectors = errors_BT.square(), norms.dim() == 3
    signal = errors_BT[:, :, None] * norms if vectors else square_BT * norms
    ppo_sum, grpo_sum = torch.zeros_like(signal), torch.zeros_like(signal)
    for k in range(1, min(rule.max_size, length) + 1):
        starts = slice(length - k + 1)
        ppo, grpo = ppo_sum[:, starts].add_(signal[:, k - 1 :]), grpo_sum[:, starts].add_(norms[:, k - 1 :])
        if vectors:
            ppo, grpo = (torch.linalg.vector_norm(total, dim=-1).square_() for total in (ppo, grpo))
        fires = (ppo * k).mul_(1 + _TOLERANCE) >= (square_BT[:, k - 1 :] * grpo).mul_(rule.threshold)
        fires &= ppo > rule.floor
        otherwise = end_BT[:, k - 1 :] if k < rule.max_size else end_BT.new_tensor(ENDED_BY_SIZE)
        now = torch.where(fires, ENDED_BY_VARIANCE, otherwise).to(torch.int8)
        found = cause_BT[:, : length - k + 1]
        found.copy_(torch.where(found == 0, now, found))
        open_BT = cause_BT == 0
        size_BT += open_BT
        if not open_BT.any():
            break
    return size_BT, cause_BT


def _follow(size_BT: Tensor, cause_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """Follow the groups from the first token of each row, in log2(T) steps (pointer doubling).

    Returns:
        Starts (bool), and the cause at each group's endpoint (int8, 0 elsewhere), both [B, T].
    """
    num_rows, length = mask_BT.shape
    columns_T = torch.arange(length, device=mask_BT.device)
    # Jumps past the end of a row go to one extra position, which points to itself.
    jump_BT = torch.cat([(columns_T + size_BT).clamp_(max=length), size_BT.new_full((num_rows, 1), length)], dim=1)
    reached_BT = torch.zeros_like(jump_BT, dtype=torch.bool)
    reached_BT[:, 0] = mask_BT[:, 0]
    for _ in range(math.ceil(math.log2(length)) if length > 1 else 0):
        reached_BT.scatter_(1, torch.where(reached_BT, jump_BT, length), True)
        jump_BT = jump_BT.gather(1, jump_BT)
    starts_BT = reached_BT[:, :length] & mask_BT
    causes_BT = torch.zeros_like(reached_BT, dtype=torch.int8)
    causes_BT.scatter_(1, torch.where(starts_BT, columns_T + size_BT - 1, length), cause_BT)
    return starts_BT, causes_BT[:, :length]


# Advantages and returns per token group: GAE of the semi-MDP whose steps are the groups.

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
        critic_lam: The same for the returns; defaults to `lam`.
        bootstrap_value: Value after the last valid token, shape [B]; defaults to 0.
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
    check_choices(mode=(mode, ADVANTAGE_MODES))
    errors_BT = td_errors(rewards, values, mask, gamma=gamma, bootstrap_value=bootstrap_value)
    mask_BT = bool_mask(mask)
    if not torch.equal(groups.group_index >= 0, mask_BT):  # False for different shapes
        raise ValueError("groups were found with another mask; pass the mask that was passed to find_token_groups.")
    scanned_BT = _scan(errors_BT, groups.ends, mask_BT, gamma, lambda_rows("lam", lam, errors_BT))
    target_BT = scanned_BT
    if critic_lam is not None:
        target_BT = _scan(errors_BT, groups.ends, mask_BT, gamma, lambda_rows("critic_lam", critic_lam, errors_BT))
    returns_BT = target_BT + values.to(errors_BT.dtype).masked_fill(~mask_BT, 0)
    if mode == "variable_lambda":
        return scanned_BT, returns_BT
    positions_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    start_BT = torch.where(groups.starts, positions_T, 0).cummax(dim=1).values  # of each token's group
    advantages_BT = scanned_BT.gather(1, start_BT)
    return advantages_BT.masked_fill_(~(mask_BT if mode == "broadcast" else groups.ends), 0), returns_BT


def _scan(errors_BT: Tensor, ends_BT: Tensor, mask_BT: Tensor, gamma: float, lam_BT: Tensor) -> Tensor:
    decay_BT = torch.where(ends_BT, lam_BT * gamma, gamma)
    if _is_left_aligned(mask_BT):
        return reverse_scan(errors_BT, decay_BT)
    rows = compact(mask_BT)
    return rows.reopen(reverse_scan(rows.close(errors_BT), rows.close(decay_BT)))


# Compression by token groups, from counts that add up over micro-batches and ranks.

CAUSES = {"ended_by_variance": ENDED_BY_VARIANCE, "ended_by_size": ENDED_BY_SIZE, "ended_by_last": ENDED_BY_LAST}


def token_group_counts(groups: TokenGroups, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Count tokens, endpoints, and endpoints by cause; counts of several batches may be added.

    Args:
        groups: Result of `find_token_groups`.
        mask: True for the tokens to count, shape [B, T]; defaults to all tokens in a group.

    Returns:
        `tokens`, `positions`, `ended_by_variance`, `ended_by_size` and `ended_by_last` (including forced ends), int64
        scalars; the last three only if the groups have causes.

    Raises:
        ValueError: If the mask has another shape, or other values than 0 and 1.
    """
    valid_BT = groups.group_index >= 0
    if mask is not None:
        if mask.shape != valid_BT.shape:
            raise ValueError(f"mask has shape {tuple(mask.shape)} and groups {tuple(valid_BT.shape)}; pass [B, T].")
        valid_BT = valid_BT & bool_mask(mask)
    ends_BT = groups.ends & valid_BT
    counts = {"tokens": valid_BT.sum(), "positions": ends_BT.sum()}
    if groups.causes is not None:
        counts |= {name: ((groups.causes == cause) & ends_BT).sum() for name, cause in CAUSES.items()}
    return counts


def token_group_metrics(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert summed counts to the logged metrics.

    Args:
        counts: As from `token_group_counts`.

    Returns:
        Scalars in float32: `total_tokens`, `advantage_positions` (endpoints), `compression_ratio` = 1 - positions /
        tokens, `speedup_factor` = tokens / positions (the reduction in advantage positions, not of wall-clock time),
        `avg_group_size`, which is the same in tokens, and the fraction of endpoints by cause. Ratios are NaN if there
        are no tokens.
    """
    tokens, positions = counts["tokens"].double(), counts["positions"].double()
    metrics = {
        "total_tokens": tokens,
        "advantage_positions": positions,
        "compression_ratio": torch.where(tokens > 0, 1 - positions / tokens, torch.nan),
        "speedup_factor": tokens / positions,
        "avg_group_size": tokens / positions,
        **{name: counts[name] / positions for name in CAUSES if name in counts},
    }
    return {name: value.float() for name, value in metrics.items()}


# The threshold of the variance rule: fixed, or adapted after each step towards a target compression.


class ThresholdController:
    """Adapts the threshold to save a given fraction of the advantage positions.

    With c = 1 - groups / tokens of the whole step, over all ranks,

        log tau <- clip(log tau + threshold_lr * (target_compression - c),
                        log max(min_threshold, 1), log max_threshold).

    A group of k equally informative tokens has compression 1 - 1/k, so no threshold gives a compression between 0 and
    1/2: the target must be 0 or in [1/2, 1 - 1/max_size].

    Args:
        group_variance_threshold: Initial tau; if adaptive, within the clips (below 1 it acts as 1). Defaults to 1 if
            fixed, and if adaptive, to the clipped 1 / (1 - target_compression), which reaches the target if delta is
            constant.
        adaptive_threshold: Whether to adapt it; otherwise `update` does nothing.
        threshold_lr: Change of log tau per step for a compression that is off by 1. At tau = 1 nothing is compressed;
            from there, a rate of 0.01 and a target of 0.75 would take at least log(4) / (0.01 * 0.75) = 185 steps to
            tau = 4, which is why tau does not start there.
        min_threshold: Lower clip; below 1 it acts as 1, since a smaller tau changes nothing.
        max_threshold: Upper clip.
        target_compression: Target fraction of tokens that are not endpoints. Ignored if tau is fixed.
        max_size: Maximum number of tokens per group, the `group_max_size` of `GroupPPO`; it limits the compression.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        group_variance_threshold: float | None = None,
        *,
        adaptive_threshold: bool = True,
        threshold_lr: float = 0.01,
        min_threshold: float = 0.1,
        max_threshold: float = 10.0,
        target_compression: float = 0.75,
        max_size: int = 16,
    ) -> None:
        initial, largest = group_variance_threshold, 1 - 1 / max_size if max_size else 0.0
        is_reachable = target_compression == 0 or 0.5 <= target_compression <= largest + 1e-9
        reachable_range = f"0, or between 0.5 and {largest:.4g} = 1 - 1 / group_max_size if adaptive_threshold is true"
        check_options(
            {
                "group_variance_threshold": (initial, initial is None or initial > 0, "larger than 0, or None"),
                "group_max_size (max_size)": (max_size, max_size >= 1 and max_size % 1 == 0, "1 or more tokens"),
                "threshold_lr": (threshold_lr, threshold_lr >= 0, "0 or larger"),
                "min_threshold": (min_threshold, min_threshold > 0, "larger than 0 (below 1 it acts as 1)"),
                "max_threshold": (
                    max_threshold,
                    max_threshold >= max(min_threshold, 1.0),
                    f"1, min_threshold ({min_threshold}) or more",
                ),
                "target_compression": (target_compression, is_reachable or not adaptive_threshold, reachable_range),
            }
        )
        self.adaptive_threshold = adaptive_threshold
        self.threshold_lr = threshold_lr
        self.target_compression = target_compression
        self._low, self._high = max(min_threshold, 1.0), max_threshold
        if not adaptive_threshold:
            self._threshold = 1.0 if initial is None else initial
            return
        if initial is not None and not self._low <= max(initial, 1.0) <= self._high:
            clips = f"min_threshold ({min_threshold}) and max_threshold ({max_threshold})"
            raise ValueError(f"group_variance_threshold is {initial}, outside {clips}.")
        self._threshold = self._clip(1 / (1 - target_compression) if initial is None else initial)

    @property
    def threshold(self) -> float:
        """The current tau; constant within a step."""
        return self._threshold

    def update(self, compression: float) -> None:
        """Adapt the threshold after a step.

        Args:
            compression: 1 - groups / tokens of the step, over all ranks. NaN (no tokens) changes nothing.
        """
        if not self.adaptive_threshold or math.isnan(compression):
            return
        error = self.target_compression - compression
        self._threshold = self._clip(self._threshold * math.exp(self.threshold_lr * error))

    def _clip(self, threshold: float) -> float:
        return min(max(threshold, self._low), self._high)

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint."""
        return {"threshold": self._threshold}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state. A fixed threshold always comes from the options."""
        if self.adaptive_threshold:
            self._threshold = self._clip(float(state["threshold"]))
