"""Splits a response into GROUP PPO's token groups.

Legend: B rollouts, T length of the longest row, S size of a sketch.

Algorithm 2 (Group), as quoted in the GROUP PPO reference implementation on verl (2025; no paper that states it has
been found), ends a group at its t-th token if t >= r_grpo / r_ppo. r_grpo is the squared norm of the gradient estimate
in which all tokens of the group share the advantage of the last one, r_ppo that of the estimate with an advantage per
token. With k the number of tokens since the group began,

    end_t = (r_ppo > eps * mean(delta^2 q)  and  k * r_ppo * (1 + 1e-5) >= threshold * r_grpo)
            or k = max_size  or  t is the last valid token  or  a boundary is forced at t.

With a score norm q per token, cross terms are dropped (the score is a martingale difference, so they vanish in
expectation): r_ppo = sum delta^2 q and r_grpo = delta_t^2 * sum q. With a score vector phi per token, the formula is
exact: r_ppo = |sum delta phi|^2 and r_grpo = delta_t^2 * |sum phi|^2.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import bool_mask
from pl_grouprl.functional.rows import Compacted, compact
from pl_grouprl.functional.token_groups.checks import check_arguments, check_shapes

ENDED_BY_VARIANCE = 1
"""Cause of an endpoint: the variance rule. Takes precedence over the other two."""
ENDED_BY_SIZE = 2
"""Cause of an endpoint: the group has `max_size` tokens. Takes precedence over `ENDED_BY_LAST`."""
ENDED_BY_LAST = 3
"""Cause of an endpoint: the last valid token of a row, or of a turn (a forced end)."""

_TOLERANCE = 1e-5  # at k = 1 and threshold 1 both sides are equal except for rounding
_BLOCK = 1 << 16  # elements per block of rows, to stay in the cache
_DEVICE_BLOCK = 1 << 24  # the same on a GPU, where few large kernels are faster


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
            to scale, but not to a shift). Other signals may be passed, but one that looks ahead, such as GAE, makes
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
        mean_signal: Mean of delta^2 q over the tokens of all ranks (see `signal_sums`); None: the mean of this call.

    Returns:
        The groups. A row without valid tokens has none.

    Raises:
        ValueError: If shapes differ, an option is out of range, a norm of a valid token is negative, or the mask has
            other values than 0 and 1.
    """
    mask_BT = check_arguments(td_errors, score_norms, mask, forced_ends, threshold, max_size, epsilon)
    if mean_signal is None:
        total, count = signal_sums(td_errors, score_norms, mask_BT).tolist()
        mean_signal = total / max(count, 1)
    elif not 0 <= mean_signal < math.inf:
        raise ValueError(
            f"mean_signal is {float(mean_signal)}; pass a mean of squares, finite and 0 or larger, or None."
        )
    starts_BT, ends_BT = torch.zeros_like(mask_BT), torch.zeros_like(mask_BT)
    causes_BT = torch.zeros_like(mask_BT, dtype=torch.int8)
    index_BT = torch.full_like(mask_BT, -1, dtype=torch.int64)
    if mask_BT.numel():
        scale = _power_of_two(td_errors, mask_BT)
        rule = _Rule(max(threshold, 1.0), int(max_size), epsilon * float(mean_signal) / scale / scale)
        for rows in _blocks(score_norms):
            forced = None if forced_ends is None else forced_ends[rows]
            found = _cut_rows(td_errors[rows], score_norms[rows], mask_BT[rows], forced, scale, rule)
            for whole, part in zip((starts_BT, ends_BT, index_BT, causes_BT), found, strict=True):
                whole[rows] = part
    return TokenGroups(starts_BT, ends_BT, index_BT, causes_BT)


@torch.no_grad()
def signal_sums(td_errors: Tensor, score_norms: Tensor, mask: Tensor) -> Tensor:
    """Sum of delta^2 q and number of tokens; their ratio after summing over ranks is `mean_signal`.

    Args:
        td_errors: As for `find_token_groups`, shape [B, T].
        score_norms: As for `find_token_groups`, shape [B, T] or [B, T, S] (then q is the squared norm).
        mask: True for response tokens, shape [B, T].

    Returns:
        [sum, count] in float64. Tokens whose signal is NaN or infinite are left out of both.

    Raises:
        ValueError: If shapes differ, or the mask has other values than 0 and 1.
    """
    check_shapes(td_errors, score_norms, mask)
    mask_BT = bool_mask(mask)
    norms_BT = score_norms
    if score_norms.dim() == 3:
        dtype = torch.promote_types(score_norms.dtype, torch.float32)
        norms_BT = torch.linalg.vector_norm(score_norms, dim=-1, dtype=dtype).double().square()
    signal_BT = td_errors.double().square() * norms_BT
    counted_BT = mask_BT & signal_BT.isfinite()
    return torch.stack([signal_BT.masked_fill(~counted_BT, 0).sum(), counted_BT.sum().double()])


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
    shape = policy_logprobs.shape
    for name, tensor in (("old_logprobs", old_logprobs), ("mask", mask)):
        if tensor.shape != shape or len(shape) != 2:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} and policy_logprobs {tuple(shape)}; pass all as [B, T]."
            )
    ratio_BT = (policy_logprobs.detach() - old_logprobs.detach()).masked_fill(~bool_mask(mask), 0)
    if mask.any() and not ratio_BT.any():
        raise ValueError(
            "score_norm='log_ratio', but policy_logprobs and old_logprobs are equal at every token, as in the first "
            "pass over new rollouts: no group would ever end by its variance. Use score_norm='logit' or 'sketch'."
        )
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
    gaps = bool((mask_BT[:, 1:] & ~mask_BT[:, :-1]).any())
    rows = compact(mask_BT) if gaps else None
    if rows is not None:
        errors_BT = rows.close(errors_BT)
        norms = _close(norms, rows)
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


def _close(norms: Tensor, rows: Compacted) -> Tensor:
    if norms.dim() == 2:
        return rows.close(norms)
    return norms.gather(1, rows.index_BT[:, :, None].expand_as(norms))


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
    square_BT = errors_BT.square()
    windows = _vector_windows(errors_BT, square_BT, norms) if norms.dim() == 3 else _norm_windows(square_BT, norms)
    for k, (ppo, grpo) in enumerate(itertools.islice(windows, min(rule.max_size, length)), start=1):
        fires = (ppo * k).mul_(1 + _TOLERANCE) >= grpo.mul_(rule.threshold)
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


def _norm_windows(square_BT: Tensor, norms_BT: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield r_ppo and r_grpo of windows of 1, 2, ... tokens starting at each t, from a norm per token."""
    signal_BT = square_BT * norms_BT
    ppo_BT, sum_BT = torch.zeros_like(signal_BT), torch.zeros_like(signal_BT)
    for offset in range(signal_BT.shape[1]):
        starts = slice(signal_BT.shape[1] - offset)
        ppo_BT[:, starts] += signal_BT[:, offset:]
        sum_BT[:, starts] += norms_BT[:, offset:]
        yield ppo_BT[:, starts], square_BT[:, offset:] * sum_BT[:, starts]


def _vector_windows(errors_BT: Tensor, square_BT: Tensor, scores_BTS: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same from a vector per token."""
    weighted_BTS = errors_BT[:, :, None] * scores_BTS
    ppo_BTS, grpo_BTS = torch.zeros_like(weighted_BTS), torch.zeros_like(weighted_BTS)
    for offset in range(errors_BT.shape[1]):
        starts = slice(errors_BT.shape[1] - offset)
        ppo_BTS[:, starts] += weighted_BTS[:, offset:]
        grpo_BTS[:, starts] += scores_BTS[:, offset:]
        yield _squared_norm(ppo_BTS[:, starts]), square_BT[:, offset:] * _squared_norm(grpo_BTS[:, starts])


def _squared_norm(vectors: Tensor) -> Tensor:
    return torch.linalg.vector_norm(vectors, dim=-1).square_()


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


def _power_of_two(errors_BT: Tensor, mask_BT: Tensor) -> float:
    """A power of two near the largest error: dividing by it is exact, and squares neither vanish nor overflow.

    It and its inverse are normal numbers of the compute dtype.
    """
    largest = float(errors_BT.masked_fill(~(mask_BT & errors_BT.isfinite()), 0).abs().max())
    limit = 1022 if errors_BT.dtype == torch.float64 else 126
    return math.ldexp(1.0, max(min(math.frexp(largest)[1], limit), -limit)) if largest > 0 else 1.0


def _blocks(norms: Tensor) -> Iterator[slice]:
    elements = _BLOCK if norms.device.type == "cpu" else _DEVICE_BLOCK
    rows = max(elements // max(norms[0].numel(), 1), 1)
    return (slice(first, first + rows) for first in range(0, len(norms), rows))
