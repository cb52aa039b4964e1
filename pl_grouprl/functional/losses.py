"""How per-token losses become the loss of a step, and the losses beside the policy's: of the critic, and of routers.

`aggregate` has a common denominator for the whole step:

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

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding), |i| trained tokens of rollout i,
T tokens of one decoder call, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, sum_per_rollout
from pl_grouprl.utilities.options import check_choices, check_options

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
    "luspo": LossPreset("group", "gspo", "seq-mean-token-sum"),
    "vespo": LossPreset("group", "vespo", "token-mean"),
}
"""TRL's `loss_type` names. Where they differ from TRL:

- `scale_rewards` is a separate option in TRL, `group` for every loss. Here `dr_grpo` implies `none`, as in its paper.
- `grpo`, `sapo`, `luspo`, `dr_grpo`, `bnpo`: TRL averages the averages of micro-batches and ranks; here the
  denominator is the step's. With equal numbers of rollouts per micro-batch, this is the same for the first four, but
  not for `bnpo`, which is an alias of `dapo` here.
- `gspo` is not a `loss_type` in TRL but `importance_sampling_level="sequence"` with `loss_type="grpo"`.
- `cispo`: TRL's `epsilon_high` is the upper bound of the weight itself, here named `epsilon_max`.
- `luspo` (Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261) multiplies GSPO's loss of each sequence by
  its length, which is the sum over its tokens. In TRL it also needs `importance_sampling_level="sequence"`.
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
            averaged over ranks, divide it by the number of ranks. Defaults to the denominator of this call alone.
        norm: The constant of `seq-mean-token-sum-norm` (Dr. GRPO), in tokens; required there, an error elsewhere.

    Returns:
        A scalar; 0 with a zero gradient if the denominator is 0.

    Raises:
        ValueError: If shapes differ, the mode is unknown, or `norm` does not fit the mode.
    """
    check_flat(values_N=values_N, mask_N=mask_N, rollout_index_N=rollout_index_N)
    check_choices(loss_agg_mode=(mode, LOSS_AGG_MODES))
    if (norm is not None) != (mode == "seq-mean-token-sum-norm") or (norm is not None and norm <= 0):
        raise ValueError(f"norm is {norm} for mode {mode!r}; 'seq-mean-token-sum-norm' needs one above 0, others none.")
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
    check_choices(loss_agg_mode=(mode, LOSS_AGG_MODES))
    if mode == "token-mean":
        return mask_N.sum().to(torch.float32)
    lengths_B = sum_per_rollout(mask_N.to(torch.int64), rollout_index_N, num_rollouts)
    return (lengths_B > 0).sum().to(torch.float32)


# The critic's loss, and the explained variance of the returns.

_ROUNDING = 8
"""Returns count as constant if they vary by fewer ulps than this."""


class ValueLoss(NamedTuple):
    """A value loss before aggregation.

    Attributes:
        per_token_N: Loss of each token, shape [N], to be minimized; 0 outside the mask. Pass it to `aggregate`.
        metrics: Detached sum `value/clip_ratio`, the number of tokens whose clipped value has the larger error. Add it
            over micro-batches and ranks, and divide by the sum of `metric_count`.
        metric_count: Tokens in the mask.
    """

    per_token_N: Tensor
    metrics: dict[str, Tensor]
    metric_count: Tensor


def clipped_value_loss(
    values_N: Tensor, old_values_N: Tensor, returns_N: Tensor, *, mask_N: Tensor, cliprange: float | None = None
) -> ValueLoss:
    """PPO's value loss: the larger of the squared errors of each value and of its clipped version.

    L = 0.5 max((V - R)^2, (clip(V, old - cliprange, old + cliprange) - R)^2), as in OpenAI's baselines (ppo2) and
    verl (`cliprange_value`). Without `cliprange`, 0.5 (V - R)^2.

    Args:
        values_N: Values of the critic, with gradient, shape [N].
        old_values_N: The same before the update, shape [N].
        returns_N: Targets of the values, shape [N].
        mask_N: True for tokens to train, bool, shape [N]; inputs elsewhere may be NaN.
        cliprange: How far a value may move from the old one, in units of the return; no limit if None.

    Returns:
        The loss of each token.

    Raises:
        ValueError: If shapes differ or the range is not positive.
    """
    check_options({"cliprange": (cliprange, cliprange is None or cliprange > 0, "larger than 0, or None for no limit")})
    check_flat(values_N=values_N, old_values_N=old_values_N, returns_N=returns_N, mask_N=mask_N)
    values_N, old_values_N, returns_N = (x.masked_fill(~mask_N, 0) for x in (values_N, old_values_N, returns_N))
    error_N = (values_N - returns_N).square()
    if cliprange is None:
        return ValueLoss(0.5 * error_N, {"value/clip_ratio": torch.zeros_like(mask_N.sum())}, mask_N.sum())
    clipped_N = torch.clamp(values_N, old_values_N - cliprange, old_values_N + cliprange)
    clipped_error_N = (clipped_N - returns_N).square()
    is_clipped_N = ~(clipped_error_N <= error_N)  # also for NaN, as in torch.maximum, whose gradient ties would split
    loss_N = 0.5 * torch.where(is_clipped_N, clipped_error_N, error_N)
    return ValueLoss(loss_N, {"value/clip_ratio": is_clipped_N.sum()}, mask_N.sum())


@torch.no_grad()
def explained_variance(
    values_N: Tensor, returns_N: Tensor, *, mask_N: Tensor, reduce: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Fraction of the returns' variance that the values explain, 1 - Var(R - V) / Var(R).

    1 is a perfect critic (up to a constant), 0 is as good as a constant, below 0 is worse. Computed in float64, in two
    passes. verl adds 1e-5 to Var(R); here it is exact.

    Args:
        values_N: Values of the critic, shape [N].
        returns_N: Returns, shape [N].
        mask_N: True for tokens that count, bool, shape [N]; inputs elsewhere may be NaN.
        reduce: Sums a 1-D float64 tensor over ranks; called twice. Defaults to this rank alone.

    Returns:
        A float64 scalar; NaN if the returns are equal up to rounding, or there are none.

    Raises:
        ValueError: If the shapes differ.
    """
    check_flat(values_N=values_N, returns_N=returns_N, mask_N=mask_N)
    add = reduce or (lambda sums: sums)
    returns, values = returns_N[mask_N].double(), values_N[mask_N].double()
    errors = returns - values
    size = returns.square().sum() + values.square().sum()
    count, return_sum, error_sum, size = add(torch.stack([mask_N.sum().double(), returns.sum(), errors.sum(), size]))
    mean = return_sum / count
    spreads = torch.stack([(errors - error_sum / count).square().sum(), (returns - mean).square().sum()])
    error_spread, return_spread = add(spreads)
    is_constant = return_spread <= (_ROUNDING * torch.finfo(returns_N.dtype).eps) ** 2 * size
    return torch.where(is_constant, torch.nan, 1 - error_spread / return_spread)


# The routers of a mixture of experts.


def load_balancing_loss(router_logits: Sequence[Tensor], top_k: int, weights_T: Tensor | None = None) -> Tensor:
    """Penalize unequal use of experts (Switch Transformer, arXiv:2101.03961, eq. 4-6, for top-k routing).

    E * sum_e f_e P_e, where f_e is the fraction of tokens that choose expert e among their k and P_e the mean
    probability of e, both weighted means over the tokens of all layers together, as in transformers'
    `load_balancing_loss_func`. It is k if all experts are used equally. Gradients flow only through P.

    A token of weight w counts as w tokens. Pass the number of sequences that contain each token, so that a prefix that
    is encoded once counts as all of its copies, and 0 at padding.

    Args:
        router_logits: Router logits of each layer, before the softmax, shape [T, E] each.
        top_k: Experts of each token, 1 to E.
        weights_T: Weight of each token, 0 or more, shape [T]; defaults to 1 for each.

    Returns:
        A scalar, in float32 (float64 for float64 logits); 0 if all weights are 0.
    """
    tokens, experts = router_logits[0].shape
    dtype = torch.promote_types(router_logits[0].dtype, torch.float32)
    device = router_logits[0].device
    weights_T = torch.ones(tokens, device=device) if weights_T is None else weights_T
    weights_T = weights_T.detach().to(device, dtype)
    chosen_E = torch.zeros(experts, dtype=dtype, device=device)
    probability_E = torch.zeros_like(chosen_E)
    for logits_TE in router_logits:
        probabilities_TE = logits_TE.to(device, dtype).softmax(dim=-1)
        experts_TK = probabilities_TE.detach().topk(top_k, dim=-1).indices
        chosen_E = chosen_E.index_add(0, experts_TK.flatten(), weights_T.repeat_interleave(top_k))
        probability_E = probability_E + weights_T @ probabilities_TE
    total = (weights_T.sum() * len(router_logits)).clamp(min=torch.finfo(dtype).tiny)
    return experts * ((chosen_E / total) * (probability_E / total)).sum()
