"""GRPO and its relatives: critic-free policy gradients whose baseline is the group of rollouts of a prompt.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pl_grouprl.algorithms.base import MiniBatch, RolloutModule
from pl_grouprl.algorithms.policy_module import LossTerms
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.functional.advantages import make_advantage_estimator
from pl_grouprl.functional.aggregation import LOSS_AGG_MODES, LOSS_PRESETS, aggregate, loss_denominator
from pl_grouprl.functional.kl import kl_estimate
from pl_grouprl.functional.masked import masked_sum
from pl_grouprl.functional.policy_loss import make_policy_loss
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.types import RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo"]


class GRPO(RolloutModule):
    """Group relative policy optimization (arXiv:2402.03300), with the variants that differ in advantage and loss only.

    Research code overrides `compute_advantages` or `compute_loss`.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        loss_type: TRL's name for a choice of the three options below it; each of them can be set on its own.
        policy_loss: `ppo`, `gspo` or `cispo`.
        loss_agg_mode: How tokens become one loss, by verl's names. The norm of `seq-mean-token-sum-norm` is
            `sampling.max_new_tokens`.
        scale_rewards: What centred rewards are divided by: the standard deviation of the `group`, of the `batch` (all
            ranks), or `none`. Only for the estimator `grpo`.
        advantage_estimator: `grpo` (against the group's mean) or `rloo` (against the mean of the others).
        epsilon: How far the ratio may fall below 1 before it is clipped.
        epsilon_high: How far it may rise above 1; None is `epsilon`.
        epsilon_max: Upper bound of the ratio itself, in place of both (what TRL's `epsilon_high` means for `cispo`);
            None is none. Only for `cispo`.
        delta: Upper limit of the ratio where the advantage is negative (dual clip); None is none. Only for `ppo`.
        beta: Weight of the KL penalty in the loss. 0 needs no reference policy, and none is loaded.
        kl_type: `k1`, `k2` or `k3`, with or without `+`; see `pl_grouprl.functional.kl`.
        entropy_coef: Weight of the entropy bonus.
        **kwargs: Options of `RolloutModule` and `PolicyModule`.

    Raises:
        ValueError: If an option is out of range, unknown, or has no meaning together with another.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        loss_type: LossType = "dapo",
        policy_loss: Literal["ppo", "gspo", "cispo"] | None = None,
        loss_agg_mode: str | None = None,
        scale_rewards: Literal["group", "batch", "none"] | None = None,
        advantage_estimator: Literal["grpo", "rloo"] = "grpo",
        epsilon: float = 0.2,
        epsilon_high: float | None = None,
        epsilon_max: float | None = None,
        delta: float | None = None,
        beta: float = 0.0,
        kl_type: str = "k3",
        entropy_coef: float = 0.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, **kwargs)
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations is {self.num_generations}; {advantage_estimator} compares the rollouts of a prompt "
                "with each other, so pass at least 2."
            )
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, which gives every rollout of a prompt the same tokens; pass a positive one."
            )
        for name, value in (("beta", beta), ("entropy_coef", entropy_coef)):
            if value < 0:
                raise ValueError(f"{name} is {value}; it must be 0 (off) or larger.")
        if loss_type not in LOSS_PRESETS:
            raise ValueError(f"loss_type is {loss_type!r}; it must be one of {', '.join(LOSS_PRESETS)}.")
        preset = LOSS_PRESETS[loss_type]
        clipping = _given(epsilon_high=epsilon_high, epsilon_max=epsilon_max, delta=delta)
        self.policy_loss = make_policy_loss(policy_loss or preset.loss, epsilon=epsilon, **clipping)
        if advantage_estimator == "grpo":
            self.advantage_estimator = make_advantage_estimator("grpo", scale=scale_rewards or preset.scale)
        else:
            self.advantage_estimator = make_advantage_estimator(advantage_estimator, **_given(scale=scale_rewards))
        self.loss_agg_mode = loss_agg_mode or preset.aggregation
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            raise ValueError(f"loss_agg_mode is {loss_agg_mode!r}; it must be one of {', '.join(LOSS_AGG_MODES)}.")
        kl_estimate(torch.zeros(1), torch.zeros(1), kl_type)  # an unknown name is an error here, not after a rollout
        self.beta = beta
        self.kl_type = kl_type
        self.entropy_coef = entropy_coef
        self.uses_reference = beta > 0

    def compute_advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Compute the advantage of each rollout of this rank, shape [B]; the statistics are those of all ranks."""
        own = [[math.nan if r.reward is None else r.reward for r in group.rollouts] for group in groups]
        per_rank = gather_plain(own, self.device)
        rewards = [reward for rank in per_rank for group in rank for reward in group]
        sizes = torch.tensor([len(group) for rank in per_rank for group in rank])
        group_ids_B = torch.arange(len(sizes)).repeat_interleave(sizes)
        advantages_B = self.advantage_estimator(torch.tensor(rewards, dtype=torch.float32), group_ids_B)
        return advantages_B.split([sum(map(len, rank)) for rank in per_rank])[self.global_rank]

    def prepare(self, buffer: RolloutBuffer) -> None:
        """Add advantages, reference log-probabilities, and old ones where an optimizer step comes in between."""
        buffer.put_per_rollout("advantages", self.compute_advantages(buffer.groups))
        if self.trainer.accumulate_grad_batches % self.updates_per_rollout:
            with self._timed("old_logprobs"):
                buffer.put("old_logprobs", self.score_rollouts(self.policy, buffer))
        if self.reference is not None:
            with self._timed("ref_logprobs"):
                buffer.put("ref_logprobs", self.score_rollouts(self.reference, buffer))

    def rollout_options(self) -> dict[str, Any]:
        """Add what decides the prepared quantities and the loss. Weights in the loss may change at any time."""
        return super().rollout_options() | {
            "advantage_estimator": _describe(self.advantage_estimator),
            "policy_loss": _describe(self.policy_loss),
            "loss_agg_mode": self.loss_agg_mode,
            "beta > 0": self.beta > 0,
        }

    def compute_loss(self, batch: MiniBatch) -> LossTerms:
        """Clipped policy loss, KL penalty and entropy bonus, added per token."""
        mask_N, rollout_index_N, num_rollouts = batch.mask_N, batch.scoring.rollout_index_N, batch.scoring.num_rollouts
        scores = self.score(self.policy, batch.scoring, entropy=True, entropy_grad=self.entropy_coef > 0)
        policy_logprobs_N = scores.logprobs_N
        # Without an optimizer step since the rollout they are the same, and no extra forward is needed.
        old_logprobs_N = batch.tokens.get("old_logprobs", policy_logprobs_N.detach())
        loss = self.policy_loss(
            policy_logprobs_N,
            old_logprobs_N,
            batch.tokens["advantages"],
            mask_N=mask_N,
            rollout_index_N=rollout_index_N,
            num_rollouts=num_rollouts,
        )
        loss_N = loss.per_token_N
        metrics = {name: (total, loss.metric_count) for name, total in loss.metrics.items()}
        assert scores.entropy_N is not None
        if "rollout_logprobs" in batch.tokens:
            difference_N = (old_logprobs_N - batch.tokens["rollout_logprobs"]).abs()
            metrics["sampling/sampling_logp_difference/mean"] = (masked_sum(difference_N, mask_N), mask_N.sum())
        metrics["entropy"] = (masked_sum(scores.entropy_N.detach(), mask_N), mask_N.sum())
        if self.beta > 0:
            kl_N = kl_estimate(policy_logprobs_N, batch.tokens["ref_logprobs"], self.kl_type)
            loss_N = loss_N + self.beta * kl_N
            metrics["kl"] = (masked_sum(kl_N.detach(), mask_N), mask_N.sum())
        if self.entropy_coef > 0:
            loss_N = loss_N - self.entropy_coef * scores.entropy_N
        norm = float(self.sampling.max_new_tokens) if self.loss_agg_mode == "seq-mean-token-sum-norm" else None
        numerator = aggregate(
            loss_N,
            mask_N,
            rollout_index_N,
            self.loss_agg_mode,
            num_rollouts=num_rollouts,
            denominator=1.0,
            norm=norm,
        )
        return LossTerms(
            numerator, loss_denominator(mask_N, rollout_index_N, num_rollouts, self.loss_agg_mode), metrics
        )


def _describe(part: Any) -> str:
    """Name a loss or estimator with its options, the same in every process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)


def _given(**options: Any) -> dict[str, Any]:
    """Leave out what is None: an option that a loss does not know is then an error only where it was set."""
    return {name: value for name, value in options.items() if value is not None}
