"""GRPO and its relatives: critic-free policy gradients whose baseline is the group of rollouts of a prompt.

Legend: B rollouts, F reward functions, T length of the longest rollout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from pl_grouprl.algorithms.module import RLModule
from pl_grouprl.functional.advantages import (
    REWARD_AGGREGATIONS,
    make_advantage_estimator,
    multi_reward_advantages,
)
from pl_grouprl.functional.aggregation import LOSS_PRESETS
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.registry import describe
from pl_grouprl.functional.rows import from_rows, to_rows
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.training.override_results import checked_tensor
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.types import Prompt, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.distributed import gather_plain, reduce_over_ranks
from pl_grouprl.utilities.options import drop_none, join_options

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "sapo"]


@checked_arguments
class GRPO(RLModule):
    """Group relative policy optimization (arXiv:2402.03300), with the variants that differ in advantage and loss only.

    Research code overrides `compute_advantages` or `compute_loss`.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        loss_type: TRL's name for a choice of `policy_loss`, `loss_agg_mode` and `scale_rewards`; each of them can be
            set on its own.
        policy_loss: Name of the policy's loss; see `RLModule`.
        loss_agg_mode: How tokens become one loss; see `RLModule`.
        scale_rewards: What centred rewards are divided by: the standard deviation of the `group`, of the `batch` (all
            ranks), or `none`. Only for the estimators `grpo` and `grpo_passk`.
        advantage_estimator: A name in `pl_grouprl.functional.advantages`. `grpo` compares with the group's mean,
            `rloo` with the mean of the others, `opo` with a mean weighted by length, `remax` with a greedy rollout,
            `grpo_passk` credits the best of the group alone, and `reinforce_plus_plus` whitens over the batch, with the
            group's mean taken off before where it ends in `_baseline`.
        advantage_options: Further options of the estimator, by the names of its arguments, such as `gamma`.
        multi_objective_aggregation: Whether several rewards are added up before they are compared with the group
            (`sum_then_normalize`) or after (`normalize_then_sum`).
        **kwargs: Options of `RLModule`.

    Raises:
        ValueError: If an option is out of range, unknown, or has no meaning together with another.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        loss_type: LossType = "dapo",
        policy_loss: str | None = None,
        loss_agg_mode: str | None = None,
        scale_rewards: Literal["group", "batch", "none"] | None = None,
        advantage_estimator: str = "grpo",
        advantage_options: dict[str, Any] | None = None,
        multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
        **kwargs: Any,
    ) -> None:
        if loss_type not in LOSS_PRESETS:
            raise ValueError(f"loss_type is {loss_type!r}; it must be one of {', '.join(LOSS_PRESETS)}.")
        preset = LOSS_PRESETS[loss_type]
        super().__init__(
            policy,
            rewards,
            policy_loss=policy_loss or preset.loss,
            loss_agg_mode=loss_agg_mode or preset.aggregation,
            **kwargs,
        )
        options = join_options(drop_none(scale=scale_rewards), advantage_options, "advantage_options")
        if advantage_estimator == "grpo":
            options.setdefault("scale", preset.scale)
        self.advantage_estimator = make_advantage_estimator(advantage_estimator, **options)
        self.multi_objective_aggregation = multi_objective_aggregation
        self._check_estimator(advantage_estimator)

    def _check_estimator(self, name: str) -> None:
        if self.num_generations < 2 and self.advantage_estimator.compares_rollouts:
            raise ValueError(
                f"num_generations is {self.num_generations}; {name} compares the rollouts of a prompt with each other, "
                "so pass at least 2."
            )
        if self.multi_objective_aggregation not in REWARD_AGGREGATIONS:
            raise ValueError(
                f"multi_objective_aggregation is {self.multi_objective_aggregation!r}; it must be one of "
                f"{', '.join(REWARD_AGGREGATIONS)}."
            )
        if self.multi_objective_aggregation == "normalize_then_sum":
            if self.advantage_estimator.per_token:
                raise ValueError(f"advantage_estimator={name!r} takes one reward; use 'sum_then_normalize'.")
            if self.kl_penalty.in_reward:
                raise ValueError("kl_in='reward' belongs to one reward; use 'sum_then_normalize' or kl_in='loss'.")

    def setup(self, stage: str) -> None:
        """Keep groups with the rank that sampled them if a greedy rollout needs their columns."""
        super().setup(stage)
        self.collector.can_move = not self.advantage_estimator.needs_greedy

    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Compare rollouts, or tokens, with their group and the batch."""
        if self.advantage_estimator.per_token:
            buffer.put("advantages", self._per_token_advantages(buffer))
            return
        advantages = self.compute_advantages(private_copy(self._penalized(buffer)))
        where, shape = f"{type(self).__name__}.compute_advantages", (len(buffer.rollout_lengths),)
        advantages_B = checked_tensor(advantages, where, shape, "one number per rollout")
        buffer.put_per_rollout("advantages", advantages_B.float())

    def compute_advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Compute the advantage of each rollout of this rank, shape [B], with statistics over all ranks.

        The groups are copies; changing them does not affect training.
        """
        weights = [reward.weight for reward in self.rewarder.functions]
        own = {
            "rewards": [self._reward_columns(group) for group in groups],
            "lengths": [[len(rollout.token_ids) for rollout in group.rollouts] for group in groups],
        }
        if self.advantage_estimator.needs_greedy:
            own["greedy"] = [
                greedy * len(group.rollouts) for greedy, group in zip(self._greedy(groups), groups, strict=True)
            ]
        per_rank = gather_plain(own, self.device)
        sizes = torch.tensor([len(group) for rank in per_rank for group in rank["rewards"]])
        joined = {name: [row for rank in per_rank for group in rank[name] for row in group] for name in own}
        advantages_B = multi_reward_advantages(
            torch.tensor(joined["rewards"], dtype=torch.float32).view(int(sizes.sum()), -1),
            weights if self.multi_objective_aggregation == "normalize_then_sum" else [1.0],
            torch.arange(len(sizes)).repeat_interleave(sizes),
            estimator=self.advantage_estimator,
            aggregation=self.multi_objective_aggregation,
            lengths=torch.tensor(joined["lengths"]),
            greedy_rewards=torch.tensor(joined["greedy"], dtype=torch.float32) if "greedy" in joined else None,
        )
        return advantages_B.split([sum(map(len, rank["rewards"])) for rank in per_rank])[self.global_rank]

    def _reward_columns(self, group: RolloutGroup) -> list[list[float]]:
        """The combined reward of each rollout, or that of each function where they are normalized first."""
        if self.multi_objective_aggregation == "sum_then_normalize":
            return [[_number(rollout.reward)] for rollout in group.rollouts]
        names = [reward.name for reward in self.rewarder.functions]
        return [
            [_number(rollout.rewards.get(name)) if rollout.reward is not None else math.nan for name in names]
            for rollout in group.rollouts
        ]

    def _greedy(self, groups: Sequence[RolloutGroup]) -> list[list[list[float]]]:
        """Reward columns of one greedy rollout of each prompt."""
        prompts = [Prompt(g.prompt_ids, g.prompt, g.columns, g.data_source, g.media) for g in groups]
        with self.timer.part("rollout"):
            greedy = self.generate(prompts, replace(self.sampling, temperature=0.0), 1, seed=("greedy",))
        with self.timer.part("reward"):
            self.rewarder.start(greedy).wait()
        return [self._reward_columns(group) for group in greedy]

    def _per_token_advantages(self, buffer: RolloutBuffer) -> Tensor:
        lengths_B = buffer.rollout_lengths
        mask_BT = to_rows(buffer.joined("loss_mask"), lengths_B)
        sizes = torch.tensor([len(group.rollouts) for group in buffer.groups])
        ids_B = torch.arange(len(sizes)).repeat_interleave(sizes)
        if self.advantage_estimator.token_rewards:
            rewards = to_rows(buffer.joined("token_rewards"), lengths_B)
        else:  # the rewards of tokens do not tell a rollout without a trained token from one with a reward of 0
            numbers = [_number(r.reward) for group in self._penalized(buffer) for r in group.rollouts]
            rewards = torch.tensor(numbers, dtype=torch.float32)
        advantages_BT = self.advantage_estimator(rewards, ids_B, mask=mask_BT, reduce=self._reduce)
        return from_rows(advantages_BT, lengths_B)

    def _reduce(self, sums: Tensor) -> Tensor:
        return reduce_over_ranks(sums, self.device)

    def _penalized(self, buffer: RolloutBuffer) -> list[RolloutGroup]:
        """The groups, with rewards less the KL penalty where that is part of the reward."""
        return _with_penalties(buffer) if self.kl_penalty.in_reward else buffer.groups

    def rollout_options(self) -> dict[str, Any]:
        """Add what decides the advantages."""
        return super().rollout_options() | {
            "advantage_estimator": describe(self.advantage_estimator),
            "multi_objective_aggregation": self.multi_objective_aggregation,
        }


def _with_penalties(buffer: RolloutBuffer) -> list[RolloutGroup]:
    """The groups with each reward less the KL penalty of its tokens."""
    groups = []
    for group, penalties in zip(buffer.groups, buffer.tokens["kl_penalty"], strict=True):
        sums = [float(part.sum()) for part in penalties.split([len(r.token_ids) for r in group.rollouts])]
        rollouts = [
            rollout if rollout.reward is None else replace(rollout, reward=rollout.reward - penalty)
            for rollout, penalty in zip(group.rollouts, sums, strict=True)
        ]
        groups.append(replace(group, rollouts=rollouts))
    return groups


def _number(reward: float | None) -> float:
    return math.nan if reward is None else reward
