"""The policy's loss, as sums.

    loss of a token = importance weight * policy loss + KL coefficient * KL - entropy coefficient * entropy

`loss_agg_mode` aggregates the tokens, and the routers' loss is added. The policy loss is chosen by name from
`pl_grouprl.functional.policy_loss`; the default, `ppo`, is in `clipped.py` there.

Legend: N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from pl_grouprl.functional.aggregation import LOSS_AGG_MODES, aggregate, loss_denominator
from pl_grouprl.functional.importance import (
    DEFAULT_HIGH,
    ImportanceWeights,
    check_importance_options,
    importance_weights,
)
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.masked import masked_sum
from pl_grouprl.functional.policy_loss import make_policy_loss
from pl_grouprl.models.router import RouterLogits, record_router_logits, router_balancing_loss
from pl_grouprl.training.kl_penalty import KLPenalty
from pl_grouprl.training.loss_sums import LossSums
from pl_grouprl.training.micro_batch import MicroBatch
from pl_grouprl.utilities.options import check_options


class PolicyObjective:
    """Computes the policy's loss on a micro-batch.

    Args:
        policy_loss: Name of the loss.
        options: Its options.
        loss_agg_mode: How token losses are aggregated, by verl's names.
        kl: The KL penalty.
        max_new_tokens: Divisor of `seq-mean-token-sum-norm`.
        entropy_coef: Weight of the entropy bonus.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts.
        importance_sampling: `kind`, `low` and `high` of the correction for the sampler's log-probabilities; see
            `pl_grouprl.functional.importance`.

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
        entropy_coef: float = 0.0,
        router_aux_loss_coef: float = 0.0,
        importance_sampling: dict[str, Any] | None = None,
    ) -> None:
        coefficients = {"entropy_coef": entropy_coef, "router_aux_loss_coef": router_aux_loss_coef}
        non_negative = "0 (off) or a larger finite number"
        check_options({name: (value, 0 <= value < math.inf, non_negative) for name, value in coefficients.items()})
        modes = f"one of {', '.join(LOSS_AGG_MODES)}"
        check_options({"loss_agg_mode": (loss_agg_mode, loss_agg_mode in LOSS_AGG_MODES, modes)})
        self.policy_loss = make_policy_loss(policy_loss, **options)
        self.loss_agg_mode = loss_agg_mode
        self.kl = kl
        self.entropy_coef = entropy_coef
        self.router_aux_loss_coef = router_aux_loss_coef
        self.importance_sampling = importance_sampling or {"kind": "none", "low": None, "high": DEFAULT_HIGH}
        kind, low, high = (self.importance_sampling[name] for name in ("kind", "low", "high"))
        check_importance_options(kind, low, high, prefix="importance_sampling_")
        self._norm = float(max_new_tokens) if loss_agg_mode == "seq-mean-token-sum-norm" else None

    @property
    def compares_tokens_of_rollouts(self) -> bool:
        """Whether the loss of a token depends on the other tokens of its rollout."""
        sequence_ratios = self.importance_sampling["kind"].startswith("sequence")
        return self.loss_agg_mode != "token-mean" or self.policy_loss.uses_rollouts or sequence_ratios

    @property
    def is_zero_without_advantages(self) -> bool:
        """Whether nothing trains a rollout whose advantages are all 0."""
        others = self.kl.in_loss or self.entropy_coef > 0 or self.router_aux_loss_coef > 0
        return self.policy_loss.is_zero_without_advantages and not others

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance sampling is on."""
        return bool(self.importance_sampling["kind"] != "none")

    def check_sampled(self, tokens: Mapping[str, Any], engine: str) -> None:
        """Refuse a correction for the sampler's log-probabilities if there are none.

        Args:
            tokens: Per-token quantities by name.
            engine: Class of the engine, for the error.

        Raises:
            ValueError: If `rollout_logprobs` is missing but needed.
        """
        if self.corrects_sampling and "rollout_logprobs" not in tokens:
            raise ValueError(
                f"importance_sampling is {self.importance_sampling['kind']!r}, but {engine} reports no "
                "log-probabilities; leave it 'none' or use an engine that does."
            )

    @property
    def score_options(self) -> dict[str, Any]:
        """Keyword arguments of `models.score` for what the loss needs besides log-probabilities."""
        return {"entropy": True, "entropy_grad": self.entropy_coef > 0}

    def recorded_routers(self, policy: Any) -> AbstractContextManager[RouterLogits | None]:
        """Record the policy's router logits if they have a loss."""
        return record_router_logits(policy) if self.router_aux_loss_coef > 0 else nullcontext()

    def denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """Trained tokens or rollouts, depending on `loss_agg_mode`."""
        return {"policy": loss_denominator(tokens["loss_mask"], mode=self.loss_agg_mode, **rollouts)}

    def loss(
        self, batch: MicroBatch, scores: TokenScores, policy: Any = None, routers: RouterLogits | None = None
    ) -> LossSums:
        """Compute the loss sums.

        Args:
            batch: With `advantages` and, if there are any, `old_logprobs`, `ref_logprobs` and `rollout_logprobs`.
            scores: Scores of the policy, with gradient, shape [N].
            policy: The model; only needed for the routers' loss.
            routers: Router logits of the same forward.
        """
        mask_N, rollouts = batch.mask_N, batch.rollouts
        logprobs_N, advantages_N = scores.logprobs_N, batch.tokens["advantages"]
        # With one update per batch of rollouts, no old log-probabilities are stored, which saves a forward: they are
        # equal to the policy's, the ratio is 1, and nothing is clipped.
        old_logprobs_N = batch.tokens.get("old_logprobs", logprobs_N.detach())
        loss = self.policy_loss(logprobs_N, old_logprobs_N, advantages_N, mask_N=mask_N, **rollouts)
        loss_N = loss.per_token_N
        metrics = {name: (total, loss.metric_count) for name, total in loss.metrics.items()}
        extremes: dict[str, Tensor] = {}
        if "rollout_logprobs" in batch.tokens:
            weights = self._importance_weights(batch, old_logprobs_N)
            loss_N = loss_N * weights.weights_N  # 1 unless importance_sampling is set; the ratios are logged anyway
            metrics |= weights.metrics
            extremes |= weights.extremes
        assert scores.entropy_N is not None
        metrics["entropy"] = (masked_sum(scores.entropy_N.detach(), mask_N), mask_N.sum())
        if self.kl.in_loss:
            kl_N = kl_estimate(logprobs_N, batch.tokens["ref_logprobs"], self.kl.kind)
            loss_N = loss_N + self.kl.coef * kl_N
            metrics["kl"] = (masked_sum(kl_N.detach(), mask_N), mask_N.sum())
        if self.entropy_coef > 0:
            loss_N = loss_N - self.entropy_coef * scores.entropy_N
        # Only a sum: `Optimization.divide` divides it by the denominator of the whole optimizer step.
        numerator = aggregate(loss_N, mask_N, mode=self.loss_agg_mode, denominator=1.0, norm=self._norm, **rollouts)
        denominator = loss_denominator(mask_N, mode=self.loss_agg_mode, **rollouts)
        if self.router_aux_loss_coef > 0:
            balance = self._router_loss(batch, policy, routers) * denominator
            numerator = numerator + self.router_aux_loss_coef * balance
            metrics["policy/router_aux_loss"] = (balance.detach(), denominator)
        return LossSums({"policy": (numerator, denominator)}, metrics, extremes)

    def _importance_weights(self, batch: MicroBatch, old_logprobs_N: Tensor) -> ImportanceWeights:
        rollout_logprobs_N, options = batch.tokens["rollout_logprobs"], self.importance_sampling
        return importance_weights(old_logprobs_N, rollout_logprobs_N, mask_N=batch.mask_N, **options, **batch.rollouts)

    def _router_loss(self, batch: MicroBatch, policy: Any, routers: RouterLogits | None) -> Tensor:
        """Mean over this call's tokens; the caller multiplies by the denominator, to weight it like other losses."""
        if batch.scoring.prefix is not None:
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}, and a group is larger than "
                "max_tokens_per_micro_batch: the routers' loss is not known for a group in slices. Raise the budget "
                "above the largest group."
            )
        return router_balancing_loss(policy, batch.scoring, routers or [])
