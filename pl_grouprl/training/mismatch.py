"""How far sampler and trainer differ: metrics by place in the completion, and a warning that names the likely cause.

With p a token's probability under the trainer before the update, q the sampler's, H the entropy of the trainer's
distribution, x = log(p / q) and u = log p + H:

| cause | what it leaves in the tokens |
|---|---|
| top-k, top-p or min-p, after which the sampler reports | q = p / (kept mass), so x is hardly ever positive |
| another temperature | x is a line in u: log q - log p = (T / T' - 1) u, up to the second order in T / T' - 1 |
| stale weights | tokens of older versions differ, those of the current version do not |
| routing of experts | a few tokens differ much, most hardly at all; or many by more than rounding explains |
| precision | noise around 0, without any of these |

All of these are told from sums over tokens, which add up over micro-batches and ranks.

Legend: N response tokens of all rollouts, concatenated (flat, no padding).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.attention import find_decoder
from pl_grouprl.functional.importance import MAX_LOG_RATIO
from pl_grouprl.models.router_replay import open_replay
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.run import Run
from pl_grouprl.types import NOT_SAMPLED, SamplingConfig
from pl_grouprl.utilities import internals

KL_BOUND = 1e-3
"""Nats per token from which on the cause is looked for; rounding of float32 gives about 1e-12."""

STALE_KL_BOUND = 1e-2
"""The same for stale weights, which are asked for and corrected: log-ratios of about 0.14."""

FIRST_TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 16384)
"""First token of each bin of positions, counted from the end of the prompt; the last bin has no end."""

TURNS = 8
"""Turns with a bin of their own; the last one has all later turns, too."""

_FEWEST_TOKENS = 64
"""Fewer tokens than these show no pattern."""

_SUM = "mismatch/"
"""Prefix of the means that `Mismatch.finish` replaces by metrics."""

_BINS = {"token": FIRST_TOKENS, "turn": range(1, TURNS + 1)}
"""Labels of the bins of each kind."""

Pairs = dict[str, tuple[Tensor, Tensor]]
"""Numerator and denominator of each metric; with a denominator of 0, the numerator counts (`LossAccumulator`)."""


def mark_tokens(buffer: RolloutBuffer, version: int | None) -> None:
    """Put the turn of each token, from 1, into a buffer, and the age of the weights that sampled it, in versions.

    Args:
        buffer: The rollouts.
        version: The current version in the numbers of `Rollout.weight_versions`; None if all weights are current.
    """
    turns_N, start = torch.ones(int(buffer.rollout_lengths.sum()), dtype=torch.int32), 0
    for episode in buffer.episodes:
        for turn, (first, end) in enumerate(episode.turns, start=1):
            turns_N[start + first : start + end] = turn
        start += episode.num_tokens
    buffer.put("turn", turns_N)
    if version is not None:
        sampled = [
            v for rollout in buffer.rollouts for v in rollout.weight_versions or [version] * len(rollout.token_ids)
        ]
        sampled_N = torch.tensor(sampled, dtype=torch.int32)
        buffer.put("staleness", (version - sampled_N).masked_fill(sampled_N == NOT_SAMPLED, 0))


@torch.no_grad()
def mismatch_sums(old_logprobs_N: Tensor, rollout_logprobs_N: Tensor, entropy_N: Tensor, batch: MicroBatch) -> Pairs:
    """Sums and counts over a micro-batch's trained tokens, for `Mismatch.finish`.

    Args:
        old_logprobs_N: Log-probabilities under the trainer before the update, shape [N].
        rollout_logprobs_N: Those reported by the sampler, shape [N].
        entropy_N: Entropy of the trainer's distribution at each token, in nats, shape [N].
        batch: With `turn` and, if the sampler's weights may be older, `staleness`.
    """
    mask_N, index_N = batch.mask_N, batch.scoring.rollout_index_N
    trained_N = mask_N.float()
    lengths_B = index_N.new_zeros(batch.scoring.num_rollouts).index_add_(0, index_N, torch.ones_like(index_N))
    position_N = torch.arange(1, len(index_N) + 1, device=index_N.device) - (lengths_B.cumsum(0) - lengths_B)[index_N]
    x_N = (old_logprobs_N - rollout_logprobs_N).masked_fill(~mask_N, 0).float().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    u_N = (old_logprobs_N + entropy_N).masked_fill(~mask_N, 0).float()
    excess_N = x_N.expm1()
    kl_N = excess_N - x_N  # k3, whose mean over sampled tokens is KL(sampler || trainer)
    terms = {"kl": kl_N, "beyond": (excess_N.abs() > 0.02).float(), "abs": x_N.abs()}
    terms |= {"x": x_N, "u": u_N, "xx": x_N.square(), "uu": u_N.square(), "ux": u_N * x_N}
    if "staleness" in batch.tokens:
        fresh_N = trained_N * (batch.tokens["staleness"] == 0)
        terms |= {"fresh": fresh_N, "kl_fresh": kl_N * fresh_N}
    count = trained_N.sum()
    pairs = {name: (term_N.sum(), count) for name, term_N in terms.items()}
    pairs["tokens"] = count, torch.zeros_like(count)
    bounds = torch.tensor(FIRST_TOKENS[1:], device=position_N.device)
    bins = {
        "token": torch.bucketize(position_N, bounds, right=True),
        "turn": batch.tokens["turn"].long().clamp(1, TURNS) - 1,
    }
    for kind, bin_N in bins.items():
        labels = _BINS[kind]
        totals, counts = (trained_N.new_zeros(len(labels)).index_add_(0, bin_N, term_N) for term_N in (kl_N, trained_N))
        for place, label in enumerate(labels):
            pairs[f"{kind}/{label}"] = totals[place], counts[place]
            pairs[f"{kind}_share/{label}"] = counts[place], count
    return {f"{_SUM}{name}": pair for name, pair in pairs.items()}


Cause = Literal["truncated sampling", "temperature", "stale weights", "routing of experts", "precision", "unknown"]

REMEDIES: dict[Cause, str] = {
    "truncated sampling": "The sampler's log-probabilities are nearly all higher, as after top-k, top-p or min-p: "
    "report those of the whole vocabulary, or sample without these filters.",
    "temperature": "Log-ratios are proportional to log p + entropy, as if the sampler's temperature were "
    "{temperature:.2f} times the trainer's: sample, and report log-probabilities, at sampling.temperature.",
    "stale weights": "Tokens of older weights differ (rollout/staleness/mean), and importance_sampling corrects that "
    "only within its bounds: lower max_staleness or the learning rate.",
    "routing of experts": "A few tokens differ much, or many by more than rounding explains, as if other experts were "
    "chosen: set router_replay of the engine, or mask such tokens with importance_sampling.mode='token_mask'.",
    "precision": "Log-ratios scatter around 0, as rounding makes them: set the engine's dtype, or correct with "
    "importance_sampling.mode='token_truncate'.",
    "unknown": "No known cause looks like that: the sampler may have other weights or run another model.",
}
"""What the warning says of each cause."""


class Diagnosis(NamedTuple):
    """The likely cause, and the sampler's temperature over the trainer's if temperature alone made them differ."""

    cause: Cause
    temperature: float


def diagnose(means: Mapping[str, float], *, mixture: bool) -> Diagnosis:
    """Name the likely cause of a difference, from the means of `mismatch_sums` without their prefix.

    Args:
        means: Over the trained tokens of all ranks.
        mixture: Whether the policy is a mixture of experts.
    """
    x, u, size = means["x"], means["u"], means["abs"]
    variance_x, variance_u = means["xx"] - x * x, means["uu"] - u * u
    covariance = means["ux"] - u * x
    explained = covariance**2 / max(variance_x * variance_u, 1e-30)  # R^2 of a line
    slope = covariance / max(variance_u, 1e-30)
    positive = (size + x) / (2 * max(size, 1e-30))  # the share of |x| where p > q
    fresh = means.get("fresh", 1.0)
    of_fresh = means["kl_fresh"] / fresh if 0 < fresh < 1 else 0.0
    of_stale = (means["kl"] - means.get("kl_fresh", 0.0)) / (1 - fresh) if fresh < 1 else 0.0
    sparse = size * size < 0.2 * means["xx"]  # 0.64 for a normal distribution, 0.5 for a Laplace distribution
    cause: Cause = "unknown"
    if positive < 0.1:
        cause = "truncated sampling"
    elif explained > 0.7:
        cause = "temperature"
    elif of_stale > 4 * of_fresh:
        cause = "stale weights"
    elif mixture and (sparse or size > 0.05):
        cause = "routing of experts"
    elif size < 0.2 and 0.25 < positive < 0.75:
        cause = "precision"
    return Diagnosis(cause, 1 / (1 - slope) if slope < 1 else math.inf)


class Mismatch:
    """Turns the means of an update into metrics, and warns once if sampler and trainer differ too much.

    Args:
        run: The run.
        sampling: How rollouts are sampled. A repetition penalty makes the two differ on purpose.
    """

    def __init__(self, run: Run, sampling: SamplingConfig) -> None:
        self._run, self._expected = run, sampling.repetition_penalty != 1
        self._warned = False

    def finish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Replace the means of `mismatch_sums` among an update's metrics.

        Returns:
            All other metrics, and in nats `sampling/kl`, `sampling/kl_at_token/{first}`, and with several turns
            `sampling/kl_at_turn/{turn}`; the share `sampling/beyond_2_percent` of tokens whose probability differs by
            more than 2%; and `sampling/largest_ratio`, of either over the other.
        """
        found = {name: value for name, value in metrics.items() if not name.startswith(_SUM)}
        means = {name.removeprefix(_SUM): value for name, value in metrics.items() if name.startswith(_SUM)}
        if not means.get("tokens"):
            return found
        found |= {"sampling/kl": means["kl"], "sampling/beyond_2_percent": means["beyond"]}
        largest = min(found.get("sampling/sampling_logp_difference/max", 0.0), MAX_LOG_RATIO)
        found["sampling/largest_ratio"] = math.exp(largest)
        kinds = ("token", "turn") if means["turn_share/1"] < 1 else ("token",)
        for kind in kinds:
            filled = (label for label in _BINS[kind] if means[f"{kind}_share/{label}"])
            found |= {f"sampling/kl_at_{kind}/{label}": means[f"{kind}/{label}"] for label in filled}
        if means["kl"] > KL_BOUND and means["tokens"] >= _FEWEST_TOKENS and not (self._warned or self._expected):
            policy: Any = self._run.policy
            mixture = open_replay(policy) is None and bool(internals.router_recorders(find_decoder(policy)))
            cause, temperature = diagnose(means, mixture=mixture)
            if cause == "stale weights" and means["kl"] <= STALE_KL_BOUND:
                return found
            self._warned = True
            rank_zero_warn(
                f"Sampler and trainer differ: KL {means['kl']:.2g} nats per token, {means['beyond']:.0%} of the tokens "
                f"by more than 2%. Likely cause: {cause}. " + REMEDIES[cause].format(temperature=temperature)
            )
        return found
