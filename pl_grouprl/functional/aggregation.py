"""From one loss per token to the loss of a step, with a denominator that the whole step shares.

Legend: B rollouts, N response tokens of all rollouts in one row (flat, no padding), |i| trained tokens of rollout i.

| `loss_agg_mode` | loss | denominator |
|---|---|---|
| `token-mean` | sum of all tokens / denominator | trained tokens of the step |
| `seq-mean-token-sum` | sum over rollouts of their sums / denominator | trained rollouts of the step |
| `seq-mean-token-mean` | sum over rollouts of (their sum / |i|) / denominator | trained rollouts of the step |
| `seq-mean-token-sum-norm` | sum over rollouts of their sums / norm / denominator | trained rollouts of the step |

The denominator counts the step: all micro-batches, all ranks. The parts then add up to the whole, however the step was
cut. Rollouts of the step are those with a trained token, so that a rollout without reward, an empty one or a filler on
another rank changes nothing (as verl's `agg_loss` on its own; TRL, and verl's trainers through `global_batch_size`,
count the others too: pass such a denominator to get their number). In `seq-mean-token-sum-norm` TRL divides by the
rollouts and the norm; verl has versions that do and versions that divide by the norm alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, check_mask, sum_per_rollout

LOSS_AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


class LossPreset(NamedTuple):
    """What one of TRL's `loss_type` names stands for.

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

- `scale_rewards` is a separate option in TRL, `group` whatever the loss. Here `dr_grpo` implies `none`, as its paper
  has it.
- `grpo`, `sapo`, `dr_grpo`, `bnpo`: TRL averages the averages of micro-batches and ranks; here the denominator is the
  step's. With micro-batches of equal numbers of rollouts that is the same for the first three. It is not for `bnpo`,
  which therefore is `dapo` here.
- `gspo` is no `loss_type` of TRL but `importance_sampling_level="sequence"` with `loss_type="grpo"`.
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
        rollout_index_N: Rollout of each token, int64 in [0, num_rollouts), shape [N]. Rollouts must be whole.
        mode: One of `LOSS_AGG_MODES`.
        num_rollouts: B, the rollouts of this call.
        denominator: What the step's sum is divided by (`loss_denominator`, summed over micro-batches and ranks). To
            undo the averaging of gradients over ranks, divide it by their number. None takes that of this call alone.
        norm: The constant of `seq-mean-token-sum-norm` (Dr. GRPO), in tokens; needed there, refused elsewhere.

    Returns:
        A scalar. 0, with a zero gradient, where the denominator is 0.

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
    """Count what `aggregate` divides by. Sum it over the micro-batches and ranks of a step.

    Args:
        mask_N: True for trained tokens, bool, shape [N].
        rollout_index_N: Rollout of each token, int64 in [0, num_rollouts), shape [N]. Rollouts must be whole.
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
