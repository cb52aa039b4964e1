"""Aggregates per-token losses into the loss of a step, with a common denominator for the whole step.

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding), |i| trained tokens of rollout i.

| `loss_agg_mode` | loss | denominator |
|---|---|---|
| `token-mean` | sum of all tokens / denominator | trained tokens of the step |
| `seq-mean-token-sum` | sum over rollouts of their sums / denominator | trained rollouts of the step |
| `seq-mean-token-mean` | sum over rollouts of (their sum / |i|) / denominator | trained rollouts of the step |
| `seq-mean-token-sum-norm` | sum over rollouts of their sums / norm / denominator | trained rollouts of the step |

The denominator counts the whole step, over all micro-batches and ranks, so the parts add up to the same loss however
the step is split. Only rollouts with a trained token count; a rollout without reward, an empty one or a dummy on
another rank changes nothing. This matches verl's `agg_loss` by itself. TRL, and verl's trainers (through
`global_batch_size`), count all rollouts: pass their number as the denominator to match them. In
`seq-mean-token-sum-norm` all three divide by the rollouts and the norm (verl 0.9.1; some earlier versions
divide by the norm alone).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, check_mask, sum_per_rollout

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class LossPreset(NamedTuple):
    """The options implied by one of TRL's `loss_type` names.

    Attributes:
        scale: `scale` of `group_relative_advantages`.
        loss: Name of the policy loss.
        aggregation: `loss_agg_mode`; the norm of `seq-mean-token-sum-norm` is `max_completion_length`.
    """

    scale: str
    loss: str
    aggregation: str


LOSS_PRESETS: dict[str, LossPreset] = {
    "grpo": LossPreset("group", "ppo", "seq-mean-token-mean"),
    "dr_grpo": LossPreset("none", "ppo", "seq-mean-token-sum-norm"),
    "dapo": LossPreset("group", "ppo", "token-mean"),
    "bnpo": LossPreset("group", "ppo", "token-mean"),
    "cispo": LossPreset("group", "cispo", "token-mean"),
    "sapo": LossPreset("group", "sapo", "seq-mean-token-mean"),
    "gspo": LossPreset("group", "gspo", "seq-mean-token-mean"),
}
"""TRL's `loss_type` names. Where they differ from TRL:

- `scale_rewards` is a separate option in TRL, `group` for every loss. Here `dr_grpo` implies `none`, as in its paper.
- `grpo`, `sapo`, `dr_grpo`, `bnpo`: TRL averages the averages of micro-batches and ranks; here the denominator is the
  step's. With equal numbers of rollouts per micro-batch, this is the same for the first three, but not for `bnpo`,
  which is an alias of `dapo` here.
- `gspo` is not a `loss_type` in TRL but `importance_sampling_level="sequence"` with `loss_type="grpo"`.
- `cispo`: TRL's `epsilon_high` is the upper bound of the weight itself, here named `epsilon_max`.
"""


def aggregate(
    values_N: Tensor,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    mode: str,
    *,
    num_rollouts: int,
    denominator: Tensor | float | None = None,
    norm: float | None = None,
) -> Tensor:
    """Reduce one value per token to a scalar; the module's table gives the formulas.

    Args:
        values_N: Loss (or any other quantity) of each token, shape [N].
        mask_N: True for trained tokens, bool, shape [N]; values elsewhere may be NaN.
        rollout_index_N: Rollout of each token, int64 in [0, num_rollouts), shape [N]. Rollouts must be complete.
        mode: One of `LOSS_AGG_MODES`.
        num_rollouts: B, the rollouts of this call.
        denominator: Divides the step's sum (`loss_denominator`, summed over micro-batches and ranks). If gradients are
            averaged over ranks, divide it by the number of ranks. None uses the denominator of this call alone.
        norm: The constant of `seq-mean-token-sum-norm` (Dr. GRPO), in tokens; required there, refused elsewhere.

    Returns:
        A scalar; 0 with a zero gradient if the denominator is 0.

    Raises:
        ValueError: If shapes differ, the mode is unknown, or `norm` does not fit the mode.
    """
    check_flat(values_N=values_N, mask_N=mask_N, rollout_index_N=rollout_index_N)
    check_mask(mask_N)
    _check_mode(mode, norm)
    values_N = values_N.masked_fill(~mask_N, 0)
    if mode == "seq-mean-token-mean":
        lengths_B = sum_per_rollout(mask_N.to(values_N.dtype), rollout_index_N, num_rollouts)
        values_N = values_N / lengths_B.clamp(min=1)[rollout_index_N]
    total = values_N.sum() if norm is None else values_N.sum() / norm
    if denominator is None:
        denominator = loss_denominator(mask_N, rollout_index_N, num_rollouts, mode)
    divisor = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    return total / torch.where(divisor == 0, torch.ones_like(divisor), divisor)


def loss_denominator(mask_N: Tensor, rollout_index_N: Tensor, num_rollouts: int, mode: str) -> Tensor:
    """Count the denominator of `aggregate`. Sum it over the micro-batches and ranks of a step.

    Args:
        mask_N: True for trained tokens, bool, shape [N].
        rollout_index_N: Rollout of each token, int64 in [0, num_rollouts), shape [N]. Rollouts must be complete.
        num_rollouts: B, the rollouts of this call.
        mode: One of `LOSS_AGG_MODES`.

    Returns:
        A float32 scalar: trained tokens for `token-mean`, rollouts with a trained token for the others.

    Raises:
        ValueError: If shapes differ or the mode is unknown.
    """
    check_flat(mask_N=mask_N, rollout_index_N=rollout_index_N)
    check_mask(mask_N)
    if mode not in LOSS_AGG_MODES:
        raise ValueError(_unknown_mode(mode))
    if mode == "token-mean":
        return mask_N.sum().to(torch.float32)
    lengths_B = sum_per_rollout(mask_N.to(torch.int64), rollout_index_N, num_rollouts)
    return (lengths_B > 0).sum().to(torch.float32)


def _check_mode(mode: str, norm: float | None) -> None:
    if mode not in LOSS_AGG_MODES:
        raise ValueError(_unknown_mode(mode))
    needs_norm = mode == "seq-mean-token-sum-norm"
    if needs_norm and (norm is None or norm <= 0):
        raise ValueError(
            f"norm is {norm} for mode {mode!r}; pass a number of tokens, such as the maximum completion length."
        )
    if not needs_norm and norm is not None:
        raise ValueError(f"norm={norm} is not used by mode {mode!r}; leave it None, or use 'seq-mean-token-sum-norm'.")


def _unknown_mode(mode: str) -> str:
    return f"loss_agg_mode is {mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}."
