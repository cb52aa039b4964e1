"""Weights that correct for differences between the sampler's and the trainer's probabilities.

With w a token's probability under the trainer before the update over that under the sampler, and W the product of w
over a rollout's trained tokens:

| kind | weight of a token | known as | TRL's `vllm_importance_sampling_mode` |
|---|---|---|---|
| `none` | 1 | | `vllm_importance_sampling_correction=False` |
| `token_truncate` | clip(w, low, high) | TIS (Yao et al., 2025), from Retrace (arXiv:1606.02647) | `token_truncate` |
| `token_mask` | w, or 0 where w is outside [low, high] | IcePop (arXiv:2510.18855) | `token_mask` |
| `sequence_truncate` | clip(W, low, high) | TIS of sequences | `sequence_truncate` |
| `sequence_mask` | W, or 0 where W is outside [low, high] | "When Speed Kills Stability" (2025) | `sequence_mask` |

Both probabilities are at the sampling temperature over the whole vocabulary, so the weights correct for numerics and
older weights, not for tokens that top-k, top-p or min-p never sample; on-policy they are 1.

`off_policy_sequence_mask` instead drops whole rollouts that the policy has moved away from, `rejection_mask` tokens or
rollouts where sampler and trainer differ too much.

`low` and `high` are TRL's `vllm_importance_sampling_clip_min` and `vllm_importance_sampling_clip_max` (once
`vllm_importance_sampling_cap`). Multiply the policy loss of each token by its weight; a KL penalty is not weighted.

Legend: B rollouts, N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pl_grouprl.functional.masked import check_flat, masked_sum, sum_per_rollout
from pl_grouprl.utilities.options import check_finite, check_options

ImportanceKind = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
IMPORTANCE_KINDS: tuple[str, ...] = get_args(ImportanceKind)

REJECTION_KINDS = (
    *("token_k1", "token_k2", "token_k3", "seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3", "seq_max_k2", "seq_max_k3"),
)
"""verl's names; see `rejection_mask`."""

DEFAULT_HIGH = 3.0
"""Upper bound of the ratio, as in TRL."""

MAX_LOG_RATIO = 20.0
"""Limit of a log-ratio before `exp`, in nats, for tokens and sequences (as in verl; TRL has none)."""


@dataclass(frozen=True)
class ImportanceSampling:
    """Which weights correct for differences between sampler and trainer; the table above gives the formulas.

    Attributes:
        mode: A kind of the table.
        low: Lower bound of the ratio of trainer to sampler; no bound if None.
        high: Its upper bound; no bound if None. With `none`, leave the default.
        off_policy_mask_threshold: Maximum mean of log(p of the sampler / p of the policy) over the tokens of a rollout
            with a negative advantage, in nats; see `off_policy_sequence_mask`. No rollout is masked if None.
        rollout_rs: A kind of `REJECTION_KINDS`: tokens that `rejection_mask` rejects are not trained at all. Costs a
            forward before the updates. None rejects nothing.
        rollout_rs_threshold: Its threshold; needed with `rollout_rs`.

    Raises:
        ValueError: If the mode is unknown, `none` has a lower bound or an upper bound other than the default, another
            mode has no bound at all, or the bounds are negative or in the wrong order.
    """

    mode: ImportanceKind = "none"
    low: float | None = None
    high: float | None = DEFAULT_HIGH
    off_policy_mask_threshold: float | None = None
    rollout_rs: str | None = None
    rollout_rs_threshold: float | None = None

    def __post_init__(self) -> None:
        mode, low, high, name = self.mode, self.low, self.high, "importance_sampling"
        check_finite(**{f"{name}.off_policy_mask_threshold": self.off_policy_mask_threshold})
        check_options(
            {
                f"{name}.mode": (mode, mode in IMPORTANCE_KINDS, f"one of {', '.join(IMPORTANCE_KINDS)}"),
                f"{name}.low": (low, low is None or low >= 0, "0 or larger, or None for no bound"),
                f"{name}.high": (high, high is None or high > (low or 0), f"larger than {low or 0}, or None"),
            }
        )
        if self.rollout_rs is not None:
            check_rejection(self.rollout_rs, self.rollout_rs_threshold)
        elif self.rollout_rs_threshold is not None:
            raise ValueError(f"{name}.rollout_rs_threshold is {self.rollout_rs_threshold}; set {name}.rollout_rs, too.")
        if mode == "none" and (low is not None or high not in (None, DEFAULT_HIGH)):
            raise ValueError(f"{name}.low is {low} and {name}.high is {high}, but {name}.mode is 'none'.")
        if mode != "none" and low is None and high is None:
            raise ValueError(f"{name}.low and {name}.high are None, but {name}.mode={mode!r} needs a bound.")


class ImportanceWeights(NamedTuple):
    """Weights of the policy loss, and metrics of the disagreement between sampler and trainer.

    Attributes:
        weights_N: Weight of each token, without gradient, shape [N]; 0 outside the mask.
        mask_N: Trained tokens that a `..._mask` kind did not reject, bool, shape [N]. In TRL, rejected tokens still
            count in the denominator of the loss: aggregate with the input mask to match TRL, or with this one to omit
            them (as in verl's rejection sampling).
        metrics: Pairs (sum, count) by name, to be added over micro-batches and ranks and then divided:
            `sampling/sampling_logp_difference/mean` over trained tokens, and `sampling/importance_sampling_ratio/mean`
            over trained tokens or, for the sequence kinds, rollouts with a trained token. The ratio is taken after the
            bounds, as in TRL; for `none` it is w.
        extremes: Scalars by name, to be reduced by the maximum (`.../max`) or the minimum (`.../min`). Neutral if
            nothing is trained: 0 for a maximum, infinity for the minimum.
    """

    weights_N: Tensor
    mask_N: Tensor
    metrics: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor]


@torch.no_grad()
def importance_weights(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    *,
    kind: ImportanceKind,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
    low: float | None = None,
    high: float | None = DEFAULT_HIGH,
) -> ImportanceWeights:
    """Weight each token by the bounded ratio of trainer to sampler; the module's table gives the formulas.

    Args:
        old_logprobs_N: Log-probabilities under the trainer before the update, shape [N].
        rollout_logprobs_N: Those reported by the sampler, shape [N].
        kind: One of `IMPORTANCE_KINDS`.
        mask_N: True for trained tokens, bool, shape [N]; log-probabilities elsewhere may be NaN.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete for the sequence kinds.
        num_rollouts: B.
        low: Lower bound of the ratio; no bound if None.
        high: Upper bound of the ratio; no bound if None. With `none`, leave the default.

    Returns:
        The weights and the metrics. In TRL, rollouts without a trained token count in the mean ratio of the sequence
        kinds, with a ratio of 1; here they do not.

    Raises:
        ValueError: If shapes differ, the kind is unknown, or the bounds do not fit.
    """
    ImportanceSampling(kind, low, high)  # checks them
    check_flat(
        old_logprobs_N=old_logprobs_N,
        rollout_logprobs_N=rollout_logprobs_N,
        mask_N=mask_N,
        rollout_index_N=rollout_index_N,
    )
    log_ratio_N = (old_logprobs_N - rollout_logprobs_N).masked_fill(~mask_N, 0)
    if kind.startswith("sequence"):
        lengths_B = sum_per_rollout(mask_N.to(torch.int64), rollout_index_N, num_rollouts)
        ratio_B, keep_B = _bounded(sum_per_rollout(log_ratio_N, rollout_index_N, num_rollouts), kind, low, high)
        counted = ratio_B, lengths_B > 0
        weights_N, keep_N = ratio_B[rollout_index_N], keep_B[rollout_index_N]
    else:
        weights_N, keep_N = _bounded(log_ratio_N, kind, low, high)
        counted = weights_N, mask_N
        if kind == "none":
            weights_N = torch.ones_like(weights_N)
    ratios, is_counted = counted
    difference_N = log_ratio_N.abs()
    metrics = {
        "sampling/sampling_logp_difference/mean": (difference_N.sum(), mask_N.sum()),
        "sampling/importance_sampling_ratio/mean": (masked_sum(ratios, is_counted), is_counted.sum()),
    }
    extremes = {
        "sampling/sampling_logp_difference/max": _maximum(difference_N),
        "sampling/importance_sampling_ratio/max": _maximum(ratios.masked_fill(~is_counted, 0)),
        "sampling/importance_sampling_ratio/min": -_maximum(-ratios.masked_fill(~is_counted, math.inf), -math.inf),
    }
    return ImportanceWeights(weights_N.masked_fill(~mask_N, 0), mask_N & keep_N, metrics, extremes)


@torch.no_grad()
def off_policy_sequence_mask(
    policy_logprobs_N: Tensor,
    sampling_logprobs_N: Tensor,
    advantages_N: Tensor,
    *,
    threshold: float,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
) -> Tensor:
    """Keep the tokens of rollouts that are good or near the policy ("DeepSeek-V3.2", arXiv:2512.02556, section 3.1).

    A token is dropped if its advantage is negative and the mean of log(q / p) over its rollout's trained tokens is
    above the threshold, with p its probability under the policy and q its probability at sampling. Zero the policy loss
    of dropped tokens; as in TRL (`off_policy_mask_threshold`), they still count in the denominator and in a KL penalty.

    Args:
        policy_logprobs_N: Log-probabilities under the policy now, shape [N].
        sampling_logprobs_N: Those of the sampler, or the trainer's before the update, shape [N].
        advantages_N: Advantage of each token, shape [N].
        threshold: In nats per token.
        mask_N: True for trained tokens, bool, shape [N]; values elsewhere may be NaN.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete.
        num_rollouts: B.

    Returns:
        True for tokens to keep, bool, shape [N]; always False outside the mask.

    Raises:
        ValueError: If shapes differ.
    """
    check_flat(policy_logprobs_N=policy_logprobs_N, sampling_logprobs_N=sampling_logprobs_N, mask_N=mask_N)
    check_flat(advantages_N=advantages_N, rollout_index_N=rollout_index_N, mask_N=mask_N)
    difference_N = (sampling_logprobs_N - policy_logprobs_N).masked_fill(~mask_N, 0)
    lengths_B = sum_per_rollout(mask_N.to(difference_N.dtype), rollout_index_N, num_rollouts)
    mean_B = sum_per_rollout(difference_N, rollout_index_N, num_rollouts) / lengths_B.clamp(min=1)
    return mask_N & ((advantages_N >= 0) | (mean_B <= threshold)[rollout_index_N])


@torch.no_grad()
def rejection_mask(
    old_logprobs_N: Tensor,
    rollout_logprobs_N: Tensor,
    *,
    kind: str,
    threshold: float,
    mask_N: Tensor,
    rollout_index_N: Tensor,
    num_rollouts: int,
) -> Tensor:
    """Keep the tokens, or all tokens of the rollouts, on which sampler and trainer agree (verl's `rollout_rs`).

    With x = log(p / q) of a token, p its probability under the trainer before the update and q the sampler's, its
    divergence is -x for `k1`, x^2 / 2 for `k2`, e^x - 1 - x for `k3` (J. Schulman, "Approximating KL divergence",
    2020). `token` compares each token's divergence with the threshold; `seq_sum`, `seq_mean` and `seq_max` first reduce
    the divergences of its rollout's trained tokens. `k2` and `k3` are kept up to the threshold; `k1` has a sign, so it
    is kept within plus or minus the logarithm of the threshold, which is a ratio. Rejected tokens should not be
    trained, so they do not count in the denominator of the loss either.

    Args:
        old_logprobs_N: Log-probabilities under the trainer before the update, shape [N].
        rollout_logprobs_N: Those reported by the sampler, shape [N].
        kind: One of `REJECTION_KINDS`.
        threshold: In nats, or a ratio larger than 1 for `k1`.
        mask_N: True for trained tokens, bool, shape [N]; log-probabilities elsewhere may be NaN.
        rollout_index_N: Rollout of each token, int64, shape [N]. Rollouts must be complete for the `seq` kinds.
        num_rollouts: B.

    Returns:
        True for tokens to keep, bool, shape [N]; False outside the mask.

    Raises:
        ValueError: If shapes differ, the kind is unknown, or the threshold is out of range.
    """
    check_rejection(kind, threshold)
    check_flat(old_logprobs_N=old_logprobs_N, rollout_logprobs_N=rollout_logprobs_N, mask_N=mask_N)
    level, _, estimate = kind.rpartition("_")
    x_N = (old_logprobs_N - rollout_logprobs_N).masked_fill(~mask_N, 0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    divergence_N = {"k1": -x_N, "k2": 0.5 * x_N.square(), "k3": x_N.expm1() - x_N}[estimate]
    if level == "seq_max":
        divergence_B = divergence_N.new_zeros(num_rollouts).scatter_reduce(0, rollout_index_N, divergence_N, "amax")
    else:
        divergence_B = sum_per_rollout(divergence_N, rollout_index_N, num_rollouts)
    if level == "seq_mean":
        lengths_B = sum_per_rollout(mask_N.to(x_N.dtype), rollout_index_N, num_rollouts)
        divergence_B = divergence_B / lengths_B.clamp(min=1)
    compared_N = divergence_N if level == "token" else divergence_B[rollout_index_N]
    limit = math.log(threshold) if estimate == "k1" else threshold
    return mask_N & (compared_N.abs() <= limit)


def check_rejection(kind: str, threshold: float | None) -> None:
    """Raise a ValueError for an unknown kind, or a threshold that is missing or out of range."""
    least = 1 if kind.endswith("k1") else 0
    name = "importance_sampling.rollout_rs"
    check_options(
        {
            name: (kind, kind in REJECTION_KINDS, f"one of {', '.join(REJECTION_KINDS)}"),
            f"{name}_threshold": (threshold, threshold is not None and threshold > least, f"larger than {least}"),
        }
    )


def _bounded(log_ratio: Tensor, kind: str, low: float | None, high: float | None) -> tuple[Tensor, Tensor]:
    """Return the bounded ratio, and which entries are kept."""
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    everything = torch.ones_like(ratio, dtype=torch.bool)
    if kind == "none":
        return ratio, everything
    least, most = (0.0 if low is None else low), (math.inf if high is None else high)
    if kind.endswith("truncate"):
        return ratio.clamp(least, most), everything
    keep = (ratio >= least) & (ratio <= most)
    return ratio.masked_fill(~keep, 0), keep


def _maximum(values: Tensor, default: float = 0.0) -> Tensor:
    return torch.cat([values, values.new_full((1,), default)]).max()
