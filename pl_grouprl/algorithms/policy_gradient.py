"""What GRPO and PPO share: the policy's loss, the KL penalty, the correction of the sampler, rewards per token.

Legend: B rollouts, T length of the longest one, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from typing import Any, ClassVar, Literal

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.algorithms.base import RolloutModule
from pl_grouprl.functional.aggregation import LOSS_AGG_MODES, aggregate, loss_denominator
from pl_grouprl.functional.importance import ImportanceWeights, check_importance_options, importance_weights
from pl_grouprl.functional.kl import check_kl_kind, kl_estimate
from pl_grouprl.functional.kl_control import MAX_ERROR, AdaptiveKLController, make_kl_controller
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.masked import masked_sum
from pl_grouprl.functional.policy_loss import make_policy_loss
from pl_grouprl.functional.rows import from_rows, to_rows
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.router import RouterLogits, check_balanced, record_router_logits, router_balancing_loss
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.training.loss_sums import LossSums
from pl_grouprl.training.micro_batch import MicroBatch
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run_state import Stateful
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.options import check_options

ImportanceSampling = Literal["none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]


@checked_arguments
class PolicyGradientModule(RolloutModule):
    """Trains a policy by a clipped policy loss. A subclass estimates the advantages.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        policy_loss: Its name in `pl_grouprl.functional.policy_loss`: `ppo`, `gspo`, `gspo_token`, `cispo`, `sapo`,
            `gmpo`, `gpg`, `clip_cov`, `kl_cov`, `dppo_tv` or `dppo_kl`.
        policy_loss_options: Further options of that loss, by the names of its class.
        loss_agg_mode: How tokens become one loss, by verl's names. The norm of `seq-mean-token-sum-norm` is
            `sampling.max_new_tokens`.
        epsilon: How far the ratio may fall below 1 before it is clipped; None is the loss's own default (`ppo`: 0.2).
        epsilon_high: How far it may rise above 1; None is `epsilon`.
        epsilon_max: Upper bound of the ratio itself, in place of both (what TRL's `epsilon_high` means for `cispo`);
            None is none. Only for `cispo`.
        delta: Upper limit of the ratio where the advantage is negative (dual clip); None is none. Only for `ppo`.
        beta: Coefficient of the KL penalty. 0 needs no reference policy, and none is loaded.
        kl_type: `k1`, `abs`, `k2` or `k3`, with or without `+`; see `pl_grouprl.functional.kl`.
        kl_in: Where the penalty goes: into the `loss`, or into the `reward` of each token.
        kl_target: KL per rollout, in nats, that an adaptive coefficient aims at; None keeps `beta` fixed.
        kl_horizon: Rollouts over which the adaptive coefficient moves; None is 10,000.
        entropy_coef: Weight of the entropy bonus.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts, over all tokens of a pass
            (a mini-batch on one rank, if no budget cuts it), prompts included, each counted once per rollout that holds
            it. MicroBatchSchedule and ranks are averaged by their share of the loss denominator.
        importance_sampling: Correction where sampler and trainer disagree about log-probabilities; see
            `pl_grouprl.functional.importance`.
        importance_sampling_low: Lower bound of the ratio of trainer to sampler; None is none.
        importance_sampling_high: Its upper bound.
        **kwargs: Options of `RolloutModule`, `SamplingModule` and `PolicyModule`.

    Raises:
        ValueError: If an option is out of range, unknown, or has no meaning together with another.
    """

    starts_over: ClassVar[dict[str, str]] = {"kl_controller": "beta"}

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        policy_loss: str = "ppo",
        policy_loss_options: dict[str, Any] | None = None,
        loss_agg_mode: str = "token-mean",
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        epsilon_max: float | None = None,
        delta: float | None = None,
        beta: float = 0.0,
        kl_type: str = "k3",
        kl_in: Literal["loss", "reward"] = "loss",
        kl_target: float | None = None,
        kl_horizon: int | None = None,
        entropy_coef: float = 0.0,
        router_aux_loss_coef: float = 0.0,
        importance_sampling: ImportanceSampling = "none",
        importance_sampling_low: float | None = None,
        importance_sampling_high: float | None = 3.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, **kwargs)
        if self.sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, which gives every rollout of a prompt the same tokens; pass a positive one."
            )
        non_negative = "0 (off) or a larger finite number"
        check_options(
            {
                "beta": (beta, 0 <= beta < math.inf, non_negative),
                "entropy_coef": (entropy_coef, 0 <= entropy_coef < math.inf, non_negative),
                "router_aux_loss_coef": (router_aux_loss_coef, 0 <= router_aux_loss_coef < math.inf, non_negative),
                "loss_agg_mode": (
                    loss_agg_mode,
                    loss_agg_mode in LOSS_AGG_MODES,
                    f"one of {', '.join(LOSS_AGG_MODES)}",
                ),
                "kl_in": (kl_in, kl_in in ("loss", "reward"), "'loss' or 'reward'"),
                "kl_target": (kl_target, kl_target is None or kl_target > 0, "larger than 0, or None"),
                "kl_horizon": (kl_horizon, kl_horizon is None or kl_horizon > 0, "larger than 0, or None"),
            }
        )
        if kl_in == "reward" and beta == 0:
            raise ValueError("kl_in is 'reward' and beta is 0, so there is no penalty; set beta, or leave kl_in out.")
        if kl_target is not None and beta == 0:
            raise ValueError(f"kl_target is {kl_target} and beta is 0, which no factor changes; set a starting beta.")
        clipping = given(epsilon=epsilon, epsilon_high=epsilon_high, epsilon_max=epsilon_max, delta=delta)
        options = set_once(clipping, policy_loss_options, "policy_loss_options")
        self.policy_loss = make_policy_loss(policy_loss, **options)
        self.loss_agg_mode = loss_agg_mode
        check_kl_kind(kl_type, "kl_type")  # an unknown name is an error here, not after a rollout
        if kl_horizon is not None and kl_target is None:
            raise ValueError(f"kl_horizon is {kl_horizon} and kl_target is None; a fixed beta has none. Set kl_target.")
        self.kl_controller = make_kl_controller(beta, target=kl_target, horizon=kl_horizon)
        self.kl_type = kl_type
        self.kl_in = kl_in
        self.entropy_coef = entropy_coef
        self.router_aux_loss_coef = router_aux_loss_coef
        self.importance_sampling: dict[str, Any] = {
            "kind": importance_sampling,
            "low": importance_sampling_low,
            "high": importance_sampling_high,
        }
        bounds = importance_sampling_low, importance_sampling_high
        check_importance_options(importance_sampling, *bounds, prefix="importance_sampling_")
        self.uses_reference = beta > 0
        self._old_scores: TokenScores | None = None  # between prepare_scores and prepare

    @abstractmethod
    def estimate_advantages(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Put `advantages` into the buffer.

        Args:
            buffer: Rollouts with `token_rewards`: the reward at the last trained token of each rollout, less the KL
                penalty of each token where that is part of the reward.
            scores: The policy's scores, where `needs_old_scores` asked for them.
        """

    def load_models(self) -> None:
        """Load the policy, and refuse one whose routers are not what `router_aux_loss_coef` is about."""
        super().load_models()
        if self.router_aux_loss_coef > 0:
            check_balanced(self.policy, f"router_aux_loss_coef={self.router_aux_loss_coef}")

    def setup(self, stage: str) -> None:
        """Refuse a controller that a single batch of rollouts could turn around."""
        super().setup(stage)
        cut = self.max_tokens_per_micro_batch is not None or self.sequence_parallel_size > 1
        if stage == "fit" and cut and getattr(self.policy_loss, "compares_tokens", False):
            rank_zero_warn(
                f"{type(self.policy_loss).__name__} chooses tokens by comparing those of one pass, so that "
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} and "
                f"sequence_parallel_size={self.sequence_parallel_size} change what it chooses."
            )
        batch_size = getattr(getattr(self.trainer, "datamodule", None), "batch_size", None)
        if stage == "fit" and isinstance(self.kl_controller, AdaptiveKLController) and batch_size is not None:
            least = MAX_ERROR * batch_size * self.num_generations
            if self.kl_controller.horizon <= least:
                raise ValueError(
                    f"kl_horizon is {self.kl_controller.horizon} with {batch_size} prompts of {self.num_generations} "
                    f"rollouts in a batch; beta could turn negative, so pass one above {least:g}."
                )

    # What is prepared after a rollout.

    @property
    def beta(self) -> float:
        """The present coefficient of the KL penalty."""
        return self.kl_controller.coef

    @property
    def corrects_sampling(self) -> bool:
        """Whether importance sampling is on."""
        return self.importance_sampling["kind"] != "none"

    @property
    def needs_old_scores(self) -> bool:
        """Whether the policy scores the rollouts before the updates, which costs a forward."""
        several_updates = bool(self.trainer.accumulate_grad_batches % self.updates_per_rollout)
        return several_updates or (self.uses_reference and (self.kl_in == "reward" or self._kl_adapts))

    def old_score_options(self) -> dict[str, Any]:
        """What to compute beside old log-probabilities, in the same pass: keywords of `score`."""
        return {}

    def prepare_scores(self, buffer: RolloutBuffer) -> None:
        """Add old and reference log-probabilities where they are needed."""
        if self.importance_sampling["kind"] != "none" and "rollout_logprobs" not in buffer.tokens:
            raise ValueError(
                f"importance_sampling is {self.importance_sampling['kind']!r}, but {type(self.engine).__name__} "
                "reports no log-probabilities; leave it 'none' or use an engine that does."
            )
        self._old_scores = None
        if self.needs_old_scores:
            with self._timed("old_logprobs"):
                self._old_scores = self.score_rollouts(self.policy, buffer, **self.old_score_options())
            buffer.put("old_logprobs", self._old_scores.logprobs_N)
        if self.uses_reference:
            with self._timed("ref_logprobs"), self.reference_policy() as reference:
                buffer.put("ref_logprobs", self.score_rollouts(reference, buffer).logprobs_N)

    def prepare(self, buffer: RolloutBuffer) -> None:
        """Add rewards per token and advantages."""
        scores, self._old_scores = self._old_scores, None
        buffer.put("kl_penalty", self._kl_penalty(buffer))
        buffer.put("token_rewards", self._outcomes(buffer) - buffer.joined("kl_penalty"))
        self.estimate_advantages(buffer, scores)

    def _kl_penalty(self, buffer: RolloutBuffer) -> Tensor:
        """What is taken off the reward of each token, shape [N], on the CPU. Moves an adaptive coefficient.

        The coefficient of rewards is that of before the move; a penalty in the loss takes the one after it.
        """
        mask_N = buffer.joined("loss_mask")
        penalty_N = torch.zeros(len(mask_N))
        if not self.uses_reference:
            return penalty_N
        if self.kl_in == "reward" or self._kl_adapts:
            difference = buffer.joined("old_logprobs"), buffer.joined("ref_logprobs")
            kl_N = kl_estimate(*difference, self.kl_type).masked_fill(~mask_N, 0)
            counts = [mask_N.sum(), buffer.trained_rollouts().sum()]
            total, tokens, rollouts = self.sum_over_ranks([kl_N.sum(), *counts])
            if self.kl_in == "reward":
                penalty_N = self.beta * kl_N
                buffer.metrics |= {"kl": total / max(tokens, 1.0), "kl_coef": self.beta}
            if rollouts:
                self.kl_controller.update(total / rollouts, int(rollouts))
        buffer.metrics.setdefault("kl_coef", self.beta)
        return penalty_N

    @property
    def _kl_adapts(self) -> bool:
        return isinstance(self.kl_controller, AdaptiveKLController)

    def _outcomes(self, buffer: RolloutBuffer) -> Tensor:
        """The reward of each rollout at its last trained token, 0 elsewhere, shape [N]."""
        lengths_B = buffer.rollout_lengths
        mask_BT = to_rows(buffer.joined("loss_mask"), lengths_B)
        last_BT = mask_BT & (mask_BT.flip(1).cumsum(1).flip(1) == 1)
        rewards = [r.reward for group in buffer.groups for r in group.rollouts]
        rewards_B = torch.tensor([math.nan if reward is None else reward for reward in rewards], dtype=torch.float32)
        return from_rows(torch.where(last_BT, rewards_B[:, None], 0.0), lengths_B)

    def rollout_options(self) -> dict[str, Any]:
        """Add what decides the prepared quantities and the loss. Weights in the loss may change at any time."""
        return super().rollout_options() | {
            "policy_loss": describe(self.policy_loss),
            "loss_agg_mode": self.loss_agg_mode,
            "beta > 0": self.uses_reference,
            "kl_in": self.kl_in,
        }

    # Updates.

    def compute_loss(self, batch: MicroBatch) -> LossSums:
        """Policy loss, KL penalty and entropy bonus, added per token, and the routers' loss."""
        with self.recorded_routers() as routers:
            scores = self.score(self.policy, batch.scoring, entropy=True, entropy_grad=self.entropy_coef > 0)
        return self.policy_terms(batch, scores, routers)

    def loss_denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """Trained tokens or rollouts, as `loss_agg_mode` says."""
        return {"policy": loss_denominator(tokens["loss_mask"], mode=self.loss_agg_mode, **rollouts)}

    def recorded_routers(self) -> AbstractContextManager[RouterLogits | None]:
        """Record the policy's router logits where they have a loss."""
        return record_router_logits(self.policy) if self.router_aux_loss_coef > 0 else nullcontext()

    def policy_terms(self, batch: MicroBatch, scores: TokenScores, routers: RouterLogits | None = None) -> LossSums:
        """Compute the policy's loss from its scores of a mini-batch, and from what `recorded_routers` recorded."""
        mask_N, rollouts = batch.mask_N, batch.rollouts
        policy_logprobs_N = scores.logprobs_N
        # Without an optimizer step since the rollout they are the same, and no extra forward is needed.
        old_logprobs_N = batch.tokens.get("old_logprobs", policy_logprobs_N.detach())
        loss = self.policy_loss(
            policy_logprobs_N, old_logprobs_N, batch.tokens["advantages"], mask_N=mask_N, **rollouts
        )
        loss_N = loss.per_token_N
        metrics = {name: (total, loss.metric_count) for name, total in loss.metrics.items()}
        extremes: dict[str, Tensor] = {}
        if "rollout_logprobs" in batch.tokens:
            weights = self._correct_sampling(batch, old_logprobs_N)
            loss_N = loss_N * weights.weights_N
            metrics |= weights.metrics
            extremes |= weights.extremes
        assert scores.entropy_N is not None
        metrics["entropy"] = (masked_sum(scores.entropy_N.detach(), mask_N), mask_N.sum())
        if self.uses_reference and self.kl_in == "loss":
            kl_N = kl_estimate(policy_logprobs_N, batch.tokens["ref_logprobs"], self.kl_type)
            loss_N = loss_N + self.beta * kl_N
            metrics["kl"] = (masked_sum(kl_N.detach(), mask_N), mask_N.sum())
        if self.entropy_coef > 0:
            loss_N = loss_N - self.entropy_coef * scores.entropy_N
        norm = float(self.sampling.max_new_tokens) if self.loss_agg_mode == "seq-mean-token-sum-norm" else None
        numerator = aggregate(loss_N, mask_N, mode=self.loss_agg_mode, denominator=1.0, norm=norm, **rollouts)
        denominator = loss_denominator(mask_N, mode=self.loss_agg_mode, **rollouts)
        if self.router_aux_loss_coef > 0:
            if batch.scoring.prefix is not None:
                raise ValueError(
                    f"router_aux_loss_coef is {self.router_aux_loss_coef}, and a group is larger than "
                    f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch}: the routers' loss is not known for "
                    "a group in slices. Raise the budget above the largest group."
                )
            # A mean over this call's tokens: by the denominator it is weighted as the rest of the step is divided.
            balance = router_balancing_loss(self.policy, batch.scoring, routers or []) * denominator
            numerator = numerator + self.router_aux_loss_coef * balance
            metrics["policy/router_aux_loss"] = (balance.detach(), denominator)
        return LossSums({"policy": (numerator, denominator)}, metrics, extremes)

    def _correct_sampling(self, batch: MicroBatch, old_logprobs_N: Tensor) -> ImportanceWeights:
        rollout_logprobs_N = batch.tokens["rollout_logprobs"]
        options = self.importance_sampling
        return importance_weights(old_logprobs_N, rollout_logprobs_N, mask_N=batch.mask_N, **options, **batch.rollouts)

    # Checkpoints.

    def saved_state(self) -> dict[str, Stateful]:
        """Add the KL coefficient."""
        return super().saved_state() | {"kl_controller": self.kl_controller}


def describe(part: Any) -> str:
    """Name a loss or estimator with its options, the same in every process."""
    return repr(part) if is_dataclass(part) else getattr(part, "__qualname__", type(part).__qualname__)


def given(**options: Any) -> dict[str, Any]:
    """Leave out what is None: an option that a loss does not know is then an error only where it was set."""
    return {name: value for name, value in options.items() if value is not None}


def set_once(options: dict[str, Any], more: dict[str, Any] | None, argument: str) -> dict[str, Any]:
    """Join options that have arguments of their own with those of one argument for the rest.

    Raises:
        ValueError: If one is in both.
    """
    for name, value in (more or {}).items():
        if name in options:
            raise ValueError(
                f"{name} is set twice, as {options[name]!r} and in {argument} as {value!r}; leave one of them out."
            )
    return options | (more or {})
