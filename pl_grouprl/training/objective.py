"""The policy's loss and its KL penalty, as sums that add up over micro-batches and ranks.

    loss of a token = importance weight * policy loss + KL coefficient * KL - entropy coefficient * entropy

`loss_agg_mode` aggregates the tokens, and the routers' loss is added. The policy loss is chosen by name from
`pl_grouprl.functional.policy_loss`. Sums stay on their device until the end of the step: no micro-batch synchronizes.

Legend: B rollouts, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pl_grouprl.functional.entropy import EntropyController, EntropyOptions
from pl_grouprl.functional.importance import (
    ImportanceSampling,
    importance_weights,
    off_policy_sequence_mask,
    rejection_mask,
)
from pl_grouprl.functional.kl import MAX_ERROR, KLController, bias_corrected_kl, check_kl_kind, kl_estimate
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_AGG_MODES, aggregate, loss_denominator
from pl_grouprl.functional.masked import masked_sum
from pl_grouprl.functional.policy_loss import make_policy_loss
from pl_grouprl.models.score import RouterLogits, record_router_logits, router_balancing_loss
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.micro_batches import MicroBatch
from pl_grouprl.training.mismatch import mismatch_sums
from pl_grouprl.utilities.distributed import sum_over_ranks
from pl_grouprl.utilities.options import check_options


class LossSums(NamedTuple):
    """A loss before division; those of all ranks and micro-batches add up to the loss of the step.

    Attributes:
        losses: By optimized part, the sum of its loss over the micro-batch, with gradient, and this micro-batch's
            share of the step's denominator. A part whose denominators are all 0 in a step is not updated.
        metrics: Detached sums and counts, by the name their ratio is logged under.
        extremes: Detached values, by names ending in `/min` or `/max`; the extreme over ranks is logged.
    """

    losses: dict[str, tuple[Tensor, Tensor]]
    metrics: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor] = {}  # noqa: RUF012 (a NamedTuple's default is never mutated)


class LossAccumulator:
    """Adds up the loss sums of a step's micro-batches on this rank."""

    def __init__(self) -> None:
        self._losses: dict[str, list[Tensor]] = {}
        self._metrics: dict[str, list[Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, loss_sums: LossSums, weight: float = 1.0) -> None:
        """Add the sums of a micro-batch.

        Args:
            loss_sums: What `compute_loss` returned.
            weight: This rank's share of a micro-batch that several ranks compute together.
        """
        for sums, pairs in ((self._losses, loss_sums.losses), (self._metrics, loss_sums.metrics)):
            for name, pair in pairs.items():
                added = [part.detach().float() * weight for part in pair]
                sums[name] = [a + b for a, b in zip(sums[name], added, strict=True)] if name in sums else added
        for name, value in loss_sums.extremes.items():
            before = self._extremes.get(name, value.detach())
            pick = torch.minimum if name.endswith("/min") else torch.maximum
            self._extremes[name] = pick(before, value.detach())

    def add_denominators(self, counts: Mapping[str, Tensor]) -> None:
        """Add the denominators of rollouts that are in no micro-batch, because their loss is 0."""
        for name, (_, count) in self._losses.items():
            count += counts[name].to(count.device)

    def denominators(self) -> dict[str, float]:
        """This rank's share of each part's denominator; synchronizes."""
        return {name: float(count) for name, (_, count) in self._losses.items()}

    def reduced(
        self, add_up: Callable[[list[Tensor]], list[float]], largest: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Metrics of the step over all ranks, with the loss among them.

        Args:
            add_up: Sums scalars over ranks.
            largest: Takes the elementwise maximum over ranks.
        """
        pairs = [*self._losses.values(), *self._metrics.values()]
        sums = add_up([part for pair in pairs for part in pair])
        ratios = [total / (count or 1.0) for total, count in zip(sums[::2], sums[1::2], strict=True)]
        metrics = {"loss": sum(ratios[: len(self._losses)])}
        metrics |= dict(zip(self._metrics, ratios[len(self._losses) :], strict=True))
        if self._extremes:
            values = [value.float() for value in self._extremes.values()]
            local = torch.stack([value.to(values[0].device) for value in values]).cpu()
            signs = torch.tensor([-1.0 if name.endswith("/min") else 1.0 for name in self._extremes])
            found = (signs * largest(signs * local)).tolist()
            # Infinite if no rank trained anything.
            metrics |= {name: v for name, v in zip(self._extremes, found, strict=True) if not math.isinf(v)}
        return metrics


@dataclass(frozen=True)
class KLOptions:
    """How the KL penalty, whose coefficient is `beta`, is estimated, where it goes, and how the coefficient adapts.

    Attributes:
        type: `k1`, `abs`, `k2` or `k3`, with or without `+`; see `pl_grouprl.functional.kl`.
        place: Where the penalty goes: into the `loss`, or into the `reward` of each token.
        target: KL per rollout, in nats, that an adaptive coefficient aims at; fixed if None.
        horizon: Rollouts over which the adaptive coefficient moves; defaults to 10,000.
        ref_model_sync_steps: Optimizer steps after which the reference moves towards the policy, each time; it stays
            the initial policy if None. On one device, with DDP and with FSDP2, and not with an adapter.
        ref_model_mixup_alpha: How far it moves: 1 is the whole way; see `models.policy.mix_into_reference`.
        use_bias_correction: Weight a penalty in the loss by the importance ratio, see `bias_corrected_kl`.

    Raises:
        ValueError: If an option is out of range, or there is a horizon without a target.
    """

    type: str = "k3"
    place: Literal["loss", "reward"] = "loss"
    target: float | None = None
    horizon: int | None = None
    use_bias_correction: bool = False
    ref_model_sync_steps: int | None = None
    ref_model_mixup_alpha: float = 0.6

    def __post_init__(self) -> None:
        check_kl_kind(self.type, "kl.type")
        place, target, horizon = self.place, self.target, self.horizon
        steps, alpha = self.ref_model_sync_steps, self.ref_model_mixup_alpha
        check_options(
            {
                "kl.place": (place, place in ("loss", "reward"), "'loss' or 'reward'"),
                "kl.target": (target, target is None or target > 0, "larger than 0, or None"),
                "kl.horizon": (horizon, horizon is None or horizon > 0, "larger than 0, or None"),
                "kl.ref_model_sync_steps": (steps, steps is None or steps >= 1, "at least 1, or None"),
                "kl.ref_model_mixup_alpha": (alpha, 0 < alpha <= 1, "in (0, 1]"),
            }
        )
        if horizon is not None and target is None:
            raise ValueError(f"kl.horizon is {horizon} and kl.target is None; a fixed beta ignores it. Set kl.target.")
        if steps is None and alpha != 0.6:
            raise ValueError(
                f"kl.ref_model_mixup_alpha is {alpha} and the reference is never moved; set kl.ref_model_sync_steps."
            )
        if self.use_bias_correction and (place == "reward" or self.type.endswith("+")):
            raise ValueError(
                f"kl.use_bias_correction is true, kl.place {place!r} and kl.type {self.type!r}; it is for a penalty in "
                "the loss, of a type without '+'."
            )


_KL = KLOptions()
_NO_CORRECTION = ImportanceSampling()


class KLPenalty:
    """Penalizes the KL divergence from the reference policy.

    Args:
        beta: Coefficient; the initial one if it adapts. 0 is no penalty.
        options: The penalty's other options.

    Attributes:
        options: As passed.
        controller: Provides the current coefficient, `coef`.

    Raises:
        ValueError: If an option is out of range, or another option disables it.
    """

    def __init__(self, beta: float = 0.0, options: KLOptions = _KL) -> None:
        check_options({"beta": (beta, 0 <= beta < math.inf, "0 (off) or a larger finite number")})
        if options.place == "reward" and beta == 0:
            raise ValueError("kl.place is 'reward' and beta is 0, so there is no penalty; set beta, or omit kl.place.")
        if options.target is not None and beta == 0:
            raise ValueError(
                f"kl.target is {options.target} and beta is 0; an adaptive beta that starts at 0 stays 0. Set an "
                "initial beta."
            )
        if beta == 0 and (options.use_bias_correction or options.ref_model_sync_steps is not None):
            name = "use_bias_correction" if options.use_bias_correction else "ref_model_sync_steps"
            raise ValueError(f"kl.{name} is set and beta is 0, so there is no penalty; set beta.")
        self.options = options
        self.controller = KLController(beta, target=options.target, horizon=options.horizon)
        self.is_used = beta > 0

    @property
    def coef(self) -> float:
        """The current coefficient."""
        return self.controller.coef

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the penalty is computed before the updates, from old log-probabilities."""
        return self.is_used and (self.options.place == "reward" or self.controller.target is not None)

    @property
    def in_loss(self) -> bool:
        """Whether the penalty is in the loss."""
        return self.is_used and self.options.place == "loss"

    @property
    def in_reward(self) -> bool:
        """Whether the penalty is in the rewards."""
        return self.is_used and self.options.place == "reward"

    def check_horizon(self, batch_size: int | None, num_generations: int) -> None:
        """Raise if one batch of rollouts could make the coefficient negative, because the horizon is too short."""
        if self.controller.target is not None and batch_size is not None:
            least = MAX_ERROR * batch_size * num_generations
            if self.controller.horizon <= least:
                raise ValueError(
                    f"kl.horizon is {self.controller.horizon} with {batch_size} prompts of {num_generations} rollouts "
                    f"in a batch; beta could turn negative, so pass one above {least:g}."
                )

    def of_rewards(self, buffer: RolloutBuffer, device: torch.device) -> Tensor:
        """Compute the penalty to subtract from each token's reward, and adapt the coefficient.

        A penalty in the rewards uses the coefficient before this adaptation; one in the loss uses the adapted one.

        Args:
            buffer: With `old_logprobs` and `ref_logprobs` if `needs_old_logprobs`; metrics are added to it.
            device: Device for communication.

        Returns:
            Penalties, shape [N], on the CPU.
        """
        mask_N = buffer.joined("loss_mask")
        penalty_N = torch.zeros(len(mask_N))
        if not self.is_used:
            return penalty_N
        if self.needs_old_logprobs:
            logprobs = buffer.joined("old_logprobs"), buffer.joined("ref_logprobs")
            kl_N = kl_estimate(*logprobs, self.options.type).masked_fill(~mask_N, 0)
            counts = [mask_N.sum(), buffer.trained_episodes().sum()]
            total, tokens, episodes = sum_over_ranks([kl_N.sum(), *counts], device)
            if self.options.place == "reward":
                penalty_N = self.coef * kl_N
                buffer.metrics |= {"kl": total / max(tokens, 1.0), "kl_coef": self.coef}
            if episodes:
                self.controller.update(total / episodes, int(episodes))
        buffer.metrics.setdefault("kl_coef", self.coef)
        return penalty_N


class PolicyObjective:
    """Computes the policy's loss on a micro-batch.

    Args:
        policy_loss: Name of the loss.
        options: Its options.
        loss_agg_mode: How token losses are aggregated, by verl's names.
        kl: The KL penalty.
        max_new_tokens: Divisor of `seq-mean-token-sum-norm`.
        entropy_coef: Weight of the entropy bonus, or all its options.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts.
        importance_sampling: The correction for the sampler's log-probabilities.

    Raises:
        ValueError: If an option is out of range or unknown.
    """

    def __init__(
        self,
        policy_loss: str,
        options: dict[str, Any],
        *,
        loss_agg_mode: str,
        kl: KLPenalty,
        max_new_tokens: int,
        entropy_coef: float | EntropyOptions = 0.0,
        router_aux_loss_coef: float = 0.0,
        importance_sampling: ImportanceSampling = _NO_CORRECTION,
    ) -> None:
        valid = 0 <= router_aux_loss_coef < math.inf
        check_options({"router_aux_loss_coef": (router_aux_loss_coef, valid, "0 (off) or a larger finite number")})
        modes = f"one of {', '.join(LOSS_AGG_MODES)}"
        check_options({"loss_agg_mode": (loss_agg_mode, loss_agg_mode in LOSS_AGG_MODES, modes)})
        self.policy_loss = make_policy_loss(policy_loss, **options)
        if self.policy_loss.uses_importance_weights and importance_sampling.mode.startswith("sequence"):
            raise ValueError(
                f"importance_sampling.mode is {importance_sampling.mode!r}, but policy_loss={policy_loss!r} multiplies "
                "the weights of tokens; use 'token_truncate' or 'token_mask'."
            )
        self.loss_agg_mode = loss_agg_mode
        self.kl = kl
        self.entropy = EntropyController(EntropyOptions.of(entropy_coef))
        self.router_aux_loss_coef = router_aux_loss_coef
        self.importance_sampling = importance_sampling
        self._norm = float(max_new_tokens) if loss_agg_mode == "seq-mean-token-sum-norm" else None

    @property
    def compares_tokens_of_rollouts(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its rollout."""
        correction = self.importance_sampling
        sequence_ratios = correction.mode.startswith("sequence") or correction.off_policy_mask_threshold is not None
        return self.loss_agg_mode != "token-mean" or self.policy_loss.uses_rollouts or sequence_ratios

    @property
    def is_zero_without_advantages(self) -> bool:
        """Whether nothing trains a rollout whose advantages are all 0."""
        others = self.kl.in_loss or self.entropy.is_used or self.router_aux_loss_coef > 0
        return self.policy_loss.is_zero_without_advantages and not others

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance sampling is on."""
        return self.importance_sampling.mode != "none"

    @property
    def needs_sampler_logprobs(self) -> bool:
        """Whether the sampler's log-probabilities correct, mask or reject."""
        correction = self.importance_sampling
        masks = correction.off_policy_mask_threshold is not None
        return self.corrects_sampling or masks or correction.rollout_rs is not None

    @property
    def selects_tokens(self) -> bool:
        """Whether the policy's scores before the update choose the tokens to train."""
        return self.entropy.options.top_quantile < 1 or self.importance_sampling.rollout_rs is not None

    @property
    def score_options(self) -> dict[str, Any]:
        """Keyword arguments of `models.score` for what the loss needs besides log-probabilities."""
        return {"entropy": True, "entropy_grad": self.entropy.applied > 0}

    def recorded_routers(self, policy: Any) -> AbstractContextManager[RouterLogits | None]:
        """Record the policy's router logits if they have a loss."""
        return record_router_logits(policy) if self.router_aux_loss_coef > 0 else nullcontext()

    def reject(self, buffer: RolloutBuffer, device: torch.device) -> None:
        """Take tokens out of the loss mask at which sampler and trainer differ too much, if asked (`rollout_rs`).

        Args:
            buffer: With `old_logprobs`; the fraction of rejected tokens is added to its metrics.
            device: Device for communication.

        Raises:
            ValueError: If the engine reports no log-probabilities.
        """
        correction = self.importance_sampling
        if correction.rollout_rs is None:
            return
        if "rollout_logprobs" not in buffer.values:
            raise ValueError(
                f"importance_sampling.rollout_rs is {correction.rollout_rs!r}, but the engine reports no "
                "log-probabilities; use another engine, or None."
            )
        assert correction.rollout_rs_threshold is not None
        mask_N, lengths_E = buffer.joined("loss_mask"), buffer.episode_lengths
        kept_N = rejection_mask(
            buffer.joined("old_logprobs"),
            buffer.joined("rollout_logprobs"),
            kind=correction.rollout_rs,
            threshold=correction.rollout_rs_threshold,
            mask_N=mask_N,
            rollout_index_N=torch.arange(len(lengths_E)).repeat_interleave(lengths_E),
            num_rollouts=len(lengths_E),
        )
        buffer.put("loss_mask", kept_N)
        rejected, tokens = sum_over_ranks([(mask_N & ~kept_N).sum(), mask_N.sum()], device)
        buffer.metrics["sampling/rejected"] = rejected / max(tokens, 1.0)

    def denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """Trained tokens or rollouts, depending on `loss_agg_mode`."""
        return {"policy": loss_denominator(tokens["loss_mask"], mode=self.loss_agg_mode, **rollouts)}

    def loss(
        self, batch: MicroBatch, scores: TokenScores, policy: Any = None, routers: RouterLogits | None = None
    ) -> LossSums:
        """Compute the loss sums.

        Args:
            batch: With `advantages` and, if there are any, `old_logprobs`, `ref_logprobs`, `rollout_logprobs` and
                `high_entropy`.
            scores: Scores of the policy, with gradient, shape [N].
            policy: The model; only needed for the routers' loss.
            routers: Router logits of the same forward.

        Raises:
            ValueError: If the sampler's log-probabilities are to be corrected but missing, or the routers' loss cannot
                be computed because a group is in slices.
        """
        mask_N, rollouts = batch.mask_N, batch.rollouts
        logprobs_N, advantages_N = scores.logprobs_N, batch.tokens["advantages"]
        # With one update per batch of rollouts, no old log-probabilities are stored, which saves a forward: they are
        # equal to the policy's, the ratio is 1, and nothing is clipped.
        old_logprobs_N = batch.tokens.get("old_logprobs", logprobs_N.detach())
        weights = None
        if "rollout_logprobs" in batch.tokens:
            correction = self.importance_sampling
            weights = importance_weights(
                old_logprobs_N,
                batch.tokens["rollout_logprobs"],
                mask_N=mask_N,
                kind=correction.mode,
                low=correction.low,
                high=correction.high,
                **rollouts,
            )
        elif self.corrects_sampling:
            raise ValueError(
                f"importance_sampling.mode is {self.importance_sampling.mode!r}, but the engine reports no "
                "log-probabilities; use another engine, or 'none'."
            )
        weights_N = None if weights is None else weights.weights_N  # 1 if importance_sampling is off
        inputs = logprobs_N, old_logprobs_N, advantages_N
        loss = self.policy_loss(*inputs, mask_N=mask_N, importance_weights_N=weights_N, **rollouts)
        loss_N = loss.per_token_N
        metrics = {name: (total, loss.metric_count) for name, total in loss.metrics.items()}
        extremes: Mapping[str, Tensor] = {}
        if weights is not None:  # the ratios are logged even if nothing is corrected
            loss_N = loss_N if self.policy_loss.uses_importance_weights else loss_N * weights.weights_N
            metrics |= weights.metrics
            extremes = weights.extremes
        if (threshold := self.importance_sampling.off_policy_mask_threshold) is not None:
            if batch.tokens.keys().isdisjoint(("rollout_logprobs", "old_logprobs")):
                raise ValueError(
                    f"importance_sampling.off_policy_mask_threshold is {threshold}, but the engine reports no "
                    "log-probabilities, and with one update per batch of rollouts nothing is off-policy; omit it."
                )
            kept_N = off_policy_sequence_mask(
                logprobs_N,
                batch.tokens.get("rollout_logprobs", old_logprobs_N),
                advantages_N,
                threshold=threshold,
                mask_N=mask_N,
                **rollouts,
            )
            loss_N = loss_N.masked_fill(~kept_N, 0)
            metrics["sampling/off_policy_masked"] = ((mask_N & ~kept_N).sum(), mask_N.sum())
        if scores.entropy_N is None:
            raise ValueError("the loss needs the entropy of each token; score with **self.objective.score_options.")
        if "turn" in batch.tokens:  # marked by the collector
            sampler_logprobs_N = batch.tokens["rollout_logprobs"]
            metrics |= mismatch_sums(old_logprobs_N, sampler_logprobs_N, scores.entropy_N.detach(), batch)
        metrics["entropy"] = (masked_sum(scores.entropy_N.detach(), mask_N), mask_N.sum())
        chosen_N = batch.tokens.get("high_entropy", mask_N)
        if "high_entropy" in batch.tokens:
            loss_N = loss_N.masked_fill(~chosen_N, 0)
        if self.kl.in_loss:
            ref_logprobs_N, kind = batch.tokens["ref_logprobs"], self.kl.options.type
            if self.kl.options.use_bias_correction:
                kl_N = bias_corrected_kl(logprobs_N, old_logprobs_N, ref_logprobs_N, kind)
            else:
                kl_N = kl_estimate(logprobs_N, ref_logprobs_N, kind)
            loss_N = loss_N + self.kl.coef * kl_N
            metrics["kl"] = (masked_sum(kl_N.detach(), mask_N), mask_N.sum())
        if self.entropy.applied > 0:
            loss_N = loss_N - self.entropy.applied * scores.entropy_N.masked_fill(~chosen_N, 0)
        # A sum alone: `Optimization.divide` divides it by the denominator of the whole optimizer step.
        numerator = aggregate(loss_N, mask_N, mode=self.loss_agg_mode, denominator=1.0, norm=self._norm, **rollouts)
        denominator = loss_denominator(mask_N, mode=self.loss_agg_mode, **rollouts)
        if self.router_aux_loss_coef > 0:
            if batch.scoring.prefix is not None:
                raise ValueError(
                    f"router_aux_loss_coef is {self.router_aux_loss_coef}, and a group is larger than "
                    "max_tokens_per_micro_batch: the routers' loss is not known for a group in slices. Raise the "
                    "budget above the largest group."
                )
            # A mean over this call's tokens, weighted like the other losses.
            balance = router_balancing_loss(policy, batch.scoring, routers or []) * denominator
            numerator = numerator + self.router_aux_loss_coef * balance
            metrics["policy/router_aux_loss"] = (balance.detach(), denominator)
        return LossSums({"policy": (numerator, denominator)}, metrics, dict(extremes))
