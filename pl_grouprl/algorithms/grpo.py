"""GRPO and its variants: critic-free policy gradients whose baseline is the group of a prompt's rollouts.

Legend: B rollouts, E episodes (all rows of an episode count once), N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from pl_grouprl.algorithms.module import RLModule
from pl_grouprl.functional.advantages import (
    REWARD_AGGREGATIONS,
    make_advantage_estimator,
    multi_reward_advantages,
    process_supervision_advantages,
)
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.functional.losses import LOSS_PRESETS
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.training.buffer import RolloutBuffer, any_function_differs, outcomes_or_steps_differ, rewards_differ
from pl_grouprl.training.checks import checked_tensor, is_custom
from pl_grouprl.training.rewarder import gather_rewards, has_token_rewards, subtract_kl_penalties, token_advantages
from pl_grouprl.types import Prompt, RolloutGroup
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.options import check_choices, drop_none, join_options

LossType = Literal["grpo", "dr_grpo", "dapo", "bnpo", "cispo", "gspo", "sapo", "luspo", "vespo"]


class GRPO(RLModule):
    """Group relative policy optimization (arXiv:2402.03300), and variants that differ only in advantage and loss.

    To change the algorithm, override `compute_advantages` or `compute_loss`.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        loss_type: TRL's name for a combination of `policy_loss`, `loss_agg_mode` and `scale_rewards`; each can be
            overridden separately.
        policy_loss: A name in `pl_grouprl.functional.policy_loss`, such as `ppo`, `gspo` or `cispo`, or a mapping with
            its `name` and options, such as `{name: ppo, delta: 3}`; defaults to the loss of `loss_type`.
        loss_agg_mode: How token losses are aggregated, such as `token-mean`; defaults to `loss_type`'s.
        scale_rewards: What centered rewards are divided by: the standard deviation of the `group`, of the `batch` (all
            ranks), or `none`. Only for the estimators `grpo` and `grpo_passk`.
        advantage_estimator: A name in `pl_grouprl.functional.advantages`. The baseline is the group's mean for
            `grpo`, the mean of the other rollouts for `rloo`, a length-weighted mean for `opo` and a greedy rollout for
            `remax`. `grpo_passk` credits only the group's best rollout. `reinforce_plus_plus` whitens over the batch;
            `reinforce_plus_plus_baseline` does so after subtracting the group's mean. `gpg` divides by the share of
            nonzero rewards. `optimal_token_baseline` and `tir_optimal_token_baseline` weight the group's mean by score
            norms, for each position. `tree` and `vine` credit the segments of branched rollouts.
        advantage_options: Further options of the estimator, by the names of its arguments, such as `gamma`.
        multi_objective_aggregation: Whether several rewards are summed before they are normalized in the group
            (`sum_then_normalize`) or after (`normalize_then_sum`).
        **kwargs: Options of `RLModule`.

    Raises:
        ValueError: If an option is out of range, unknown, or incompatible with another.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: None | list[Weighted | RewardFunction] | RewardFunction = None,  # noqa: RUF036 (the callable last)
        *,
        loss_type: LossType = "dapo",
        policy_loss: str | dict[str, Any] | None = None,
        loss_agg_mode: str | None = None,
        scale_rewards: Literal["group", "batch", "none"] | None = None,
        advantage_estimator: str = "grpo",
        advantage_options: dict[str, Any] | None = None,
        multi_objective_aggregation: Literal["sum_then_normalize", "normalize_then_sum"] = "sum_then_normalize",
        **kwargs: Any,
    ) -> None:
        check_choices(
            loss_type=(loss_type, LOSS_PRESETS),
            multi_objective_aggregation=(multi_objective_aggregation, REWARD_AGGREGATIONS),
        )
        preset = LOSS_PRESETS[loss_type]
        super().__init__(
            policy,
            rewards,
            policy_loss=preset.loss if policy_loss is None else policy_loss,
            loss_agg_mode=loss_agg_mode or preset.aggregation,
            **kwargs,
        )
        options = join_options(drop_none(scale=scale_rewards), advantage_options, "advantage_options")
        if advantage_estimator == "grpo":
            options.setdefault("scale", preset.scale)  # loss_type decides unless an option does
        self.advantage_estimator = make_advantage_estimator(advantage_estimator, **options)
        self.multi_objective_aggregation = multi_objective_aggregation
        estimator, name = self.advantage_estimator, advantage_estimator
        self._overrides_advantages = type(self).compute_advantages is not GRPO.compute_advantages
        if estimator.per_token and self._overrides_advantages:
            raise ValueError(
                f"{type(self).__name__}.compute_advantages would never be called: the advantages of tokens come from "
                f"advantage_estimator={name!r}. Use another estimator, or override compute_targets."
            )
        if self.max_rollouts < 2 and estimator.compares_rollouts:
            raise ValueError(
                f"num_generations is {self.num_generations}; {name} compares the rollouts of a prompt with each other, "
                "so pass at least 2."
            )
        if multi_objective_aggregation == "normalize_then_sum" and (estimator.per_token or self.kl_penalty.in_reward):
            cause = f"advantage_estimator={name!r}" if estimator.per_token else "kl.place='reward'"
            raise ValueError(f"{cause} takes one reward; use multi_objective_aggregation='sum_then_normalize'.")

    def setup(self, stage: str) -> None:
        """Decide which groups may move to another rank, and which `dynamic_sampling` keeps."""
        super().setup(stage)
        estimator, collector = self.advantage_estimator, self.collector
        collector.can_move = not estimator.needs_greedy
        if self.multi_objective_aggregation == "normalize_then_sum":
            collector.is_informative = any_function_differs
        elif estimator.per_token or self._overrides_advantages:
            collector.is_informative = rewards_differ
        else:
            collector.is_informative = outcomes_or_steps_differ

    @property
    def needs_old_scores(self) -> bool:
        """As in `RLModule`, and if the estimator needs the norm of each token's score."""
        return super().needs_old_scores or self.advantage_estimator.needs_score_norms

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether the estimator skips rollouts whose advantages are all 0."""
        return self.advantage_estimator.skips_rollouts

    def old_score_options(self) -> dict[str, Any]:
        """Request the score norm if the estimator needs it."""
        return super().old_score_options() | drop_none(score_norm=self.advantage_estimator.needs_score_norms or None)

    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Put the advantages of rollouts or tokens, relative to their group and the batch, into the buffer."""
        groups = subtract_kl_penalties(buffer) if self.kl_penalty.in_reward else buffer.groups
        if self.advantage_estimator.per_token:
            norms = None if scores is None else scores.score_norm_N
            buffer.put("advantages", token_advantages(self.advantage_estimator, buffer, groups, self.device, norms))
            return
        num_rollouts, num_tokens = len(buffer.rollout_lengths), int(buffer.rollout_lengths.sum())
        given = private_copy(groups) if is_custom(self.compute_advantages) else groups
        advantages = checked_tensor(
            self.compute_advantages(given), f"{type(self).__name__}.compute_advantages", (num_rollouts,), (num_tokens,)
        )
        # With as many rollouts as tokens, the shape cannot tell.
        one_per_token = len(advantages) == num_tokens and (num_tokens != num_rollouts or has_token_rewards(groups))
        put = buffer.put if one_per_token else buffer.put_per_rollout
        put("advantages", advantages.float())

    def compute_advantages(self, groups: Sequence[RolloutGroup]) -> Tensor:
        """Compute the advantages of this rank's rollouts, with statistics over all ranks.

        The rows of an episode (`RolloutGroup.episodes`) count as one rollout and get the same advantage.
        Rewards of whole rollouts are compared within the group. If there are rewards per token (process supervision),
        the rewards of all steps of the group are normalized, and each token gets the sum over steps that end at or
        after it.

        Args:
            groups: For overrides, copies; changing them does not affect training.

        Returns:
            One advantage per rollout, shape [B], or one per response token of all rollouts, shape [N]. If B equals N,
            they are per token if a rollout has `token_rewards`, else per rollout.
        """
        estimator, by_function = self.advantage_estimator, self.multi_objective_aggregation == "normalize_then_sum"
        greedy = None
        if estimator.needs_greedy:  # one greedy rollout of each prompt, rewarded
            prompts = [Prompt(g.prompt_ids, g.prompt, g.columns, g.data_source, g.media) for g in groups]
            with self.timer.part("rollout"):
                greedy = self.generate(prompts, replace(self.sampling, temperature=0.0), 1, seed=("greedy",))
            with self.timer.part("reward"):
                self.rewarder.start(greedy).wait()
        functions = self.rewarder.functions if by_function else ()
        rewards = gather_rewards(groups, self, functions=[function.name for function in functions], greedy=greedy)
        cause = None
        if not estimator.takes_steps:
            cause = f"advantage_estimator={estimator.name!r}; use 'grpo' or 'reinforce_plus_plus'"
        elif by_function:
            cause = "multi_objective_aggregation='normalize_then_sum'; use 'sum_then_normalize'"
        elif self.kl_penalty.in_reward:
            cause = "kl.place='reward'; use 'loss'"
        if rewards.step_rewards_N is not None and cause is not None:
            raise ValueError(f"a reward function returned a reward per token, which does not work with {cause}.")
        extras: dict[str, Any] = {"lengths": rewards.sampled_E, "greedy_rewards": rewards.greedy}
        if by_function:
            extras |= {"estimator": estimator, "aggregation": self.multi_objective_aggregation}
            weights = [function.weight for function in functions]
            advantages_E = multi_reward_advantages(rewards.outcomes, weights, rewards.group_ids_E, **extras)
        else:
            advantages_E = estimator(rewards.outcomes, rewards.group_ids_E, **extras)
        if rewards.step_rewards_N is None or not has_token_rewards(groups):
            return rewards.of_own_rollouts(advantages_E)
        process_N = process_supervision_advantages(
            rewards.step_rewards_N, rewards.lengths_E, rewards.group_ids_E, estimator=estimator
        )
        return (process_N + advantages_E.repeat_interleave(rewards.lengths_E))[rewards.own_N]
