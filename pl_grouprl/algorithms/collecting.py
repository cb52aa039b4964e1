"""From a batch of prompts to the groups that this rank trains: sampled, rewarded, replaced where they teach nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.algorithms.distribution import deal, exchange_rewards
from pl_grouprl.algorithms.metrics import RewardCall, count_tokens, merge_reward_metrics, rollout_metrics, summarize
from pl_grouprl.algorithms.rollout_ahead import RolloutAhead, check_rollout_ahead
from pl_grouprl.algorithms.sampling_module import SamplingModule
from pl_grouprl.algorithms.saved_state import Attributes, Stateful
from pl_grouprl.algorithms.selection import has_spread, leave_out_truncated, leave_untrained
from pl_grouprl.algorithms.step_clock import StepClock
from pl_grouprl.attention import find_decoder
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import PendingRewards, RewardFunction, Weighted, prepare_rewards
from pl_grouprl.rollout import RolloutEngine
from pl_grouprl.rollout.engine import SyncedRolloutEngine
from pl_grouprl.types import Prompt, RolloutGroup
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks
from pl_grouprl.utilities.options import check_options


@dataclass
class Collected:
    """Groups of a prompt batch, rewarded or about to be.

    Attributes:
        groups: Those that this rank trains.
        mini_batches: The number of the mini-batch of each; empty on a single rank, whose buffer deals them itself.
        generated: Those that this rank has sampled, replaced ones among them.
        pending: Rewards of `generated` that are not waited for yet.
        calls: What the reward functions said of those that are there.
        metrics: Of the selection and the balance.
        num_tokens: Tokens of all sequences of all ranks, each with its prompt; known with the rewards.
        sampler_reports: Whether every rollout of every rank has log-probabilities of the sampler.
    """

    groups: list[RolloutGroup]
    generated: list[RolloutGroup]
    pending: PendingRewards | None = None
    calls: list[RewardCall] = field(default_factory=list)
    mini_batches: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    num_tokens: int = 0
    sampler_reports: bool = True


@checked_arguments
class CollectingModule(SamplingModule):
    """Collects the rollouts of a prompt batch for training, and deals them to the ranks.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        num_generations: Rollouts per prompt.
        num_mini_batches: Into how many mini-batches the groups are cut.
        mask_truncated_completions: Do not train rollouts that were cut at `max_new_tokens`. Their rewards count in the
            statistics of their group all the same.
        dynamic_sampling: Train only groups whose rewards differ (DAPO, arXiv:2503.14476, section 3.2): prompts that
            give nothing to learn are replaced by others of the training data.
        max_generation_batches: How often prompts are sampled for one batch of rollouts under `dynamic_sampling`, the
            first time included. If groups are still missing then, the batch is smaller.
        rollout_ahead: 1 samples the next rollout beside the updates of the present one, from a copy of the policy as it
            was before them; `rollout/policy_lag` counts the optimizer steps since. 0 samples it afterwards.
        max_unrewarded_batches: Abort after this many consecutive batches of rollouts in which no rollout on any rank
            has a reward. Each of them logs a warning and trains nothing.
        **kwargs: Options of `SamplingModule` and `PolicyModule`.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        num_generations: int = 8,
        num_mini_batches: int = 1,
        mask_truncated_completions: bool = False,
        dynamic_sampling: bool = False,
        max_generation_batches: int = 5,
        rollout_ahead: int = 0,
        max_unrewarded_batches: int = 10,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, **kwargs)
        counts = {
            "num_generations": num_generations,
            "max_generation_batches": max_generation_batches,
            "max_unrewarded_batches": max_unrewarded_batches,
        }
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        if dynamic_sampling and num_generations < 2:
            raise ValueError("dynamic_sampling=True with num_generations=1 would drop every prompt; pass at least 2.")
        if rollout_ahead not in (0, 1):
            raise ValueError(f"rollout_ahead is {rollout_ahead}; it must be 0 or 1.")
        self.num_generations = num_generations
        self.num_mini_batches = num_mini_batches
        self.mask_truncated_completions = mask_truncated_completions
        self.dynamic_sampling = dynamic_sampling
        self.max_generation_batches = max_generation_batches
        self.rollout_ahead = rollout_ahead
        self.max_unrewarded_batches = max_unrewarded_batches
        self.unrewarded_batches = 0
        self._ahead = RolloutAhead()
        self._policy_lag = 0
        self._clock = StepClock()
        self._cost: ModelCost | None = None

    @property
    def moves_groups(self) -> bool:
        """Whether groups may be trained on another rank than the one that sampled them."""
        return True

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss corrects for rollouts of an older policy."""
        return False

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded."""
        super().setup(stage)
        datamodule = getattr(self.trainer, "datamodule", None)
        if stage == "fit" and self.dynamic_sampling and not hasattr(datamodule, "draw_extra"):
            raise ValueError(
                "dynamic_sampling=True needs more prompts than a batch holds; pass a PromptDataModule as datamodule."
            )
        if stage == "fit" and self.rollout_ahead:
            check_rollout_ahead(self, self.engine, self.support, self.corrects_sampling)

    def on_fit_start(self) -> None:
        """Make the copy of the policy that samples ahead, where that is asked for."""
        if self.rollout_ahead:
            self._contexts.close()  # of a fit that an exception has ended
            self._ahead.attach(self.policy, self.engine, self.tokenizer, self._sample_ahead)  # type: ignore[arg-type]
        super().on_fit_start()

    def teardown(self, stage: str) -> None:
        """Wait for a rollout that nobody will need."""
        self._ahead.close()
        super().teardown(stage)

    def collect_groups(self, batch: PromptBatch) -> Collected:
        """Sample groups and begin to reward them, and deal them to the ranks; `reward_groups` ends what has begun."""
        generated = self._sample(batch.prompts, batch.rollout_number)
        collected = Collected(generated, generated, self.start_rewards(generated))
        if self.dynamic_sampling:
            self._finish_rewards(collected)
            self._replace_uniform_groups(batch, collected)
        if self.mask_truncated_completions:
            leave_out_truncated(collected.groups)
        reports = all(rollout.logprobs is not None for group in collected.groups for rollout in group.rollouts)
        per_rank = gather_plain(reports, self.device)
        collected.sampler_reports = all(per_rank)
        self._deal(collected, batch.rollout_number)
        return collected

    def reward_groups(self, collected: Collected) -> dict[str, float]:
        """Wait for the rewards, write them into the rollouts of this rank, and sum up those of all ranks.

        Returns:
            Metrics of rewards, completions, selection and balance.
        """
        if collected.pending is not None:
            self._finish_rewards(collected)
            if num_ranks() > 1:
                with self._timed("exchange"):
                    exchange_rewards(collected.generated, collected.groups, self.device)
        per_rank = gather_plain((summarize(collected.generated), collected.calls), self.device)
        records = [record for own, _ in per_rank for record in own]
        metrics = merge_reward_metrics([call for _, own in per_rank for call in own])
        metrics |= rollout_metrics(records) | collected.metrics
        if self.rollout_ahead:
            metrics["rollout/policy_lag"] = float(self._policy_lag)
        if isinstance(self.engine, SyncedRolloutEngine):
            metrics |= self._weight_sync.take_metrics()
        collected.num_tokens = count_tokens(records)
        self._count_unrewarded(metrics)
        return metrics

    def _count_unrewarded(self, metrics: dict[str, float]) -> None:
        """Warn if no rollout on any rank has a reward, and end the run after too many such batches in a row."""
        if not math.isnan(metrics["reward"]):
            self.unrewarded_batches = 0
            return
        self.unrewarded_batches += 1
        rank_zero_warn(
            "no rollout of a batch has a reward, so nothing is learned from it; check that a reward function applies "
            "and gives finite numbers (rewards/{name}/none and rewards/{name}/invalid count where not)."
        )
        if self.unrewarded_batches >= self.max_unrewarded_batches:
            counts = [
                f"{name} gave None for {metrics.get(f'rewards/{name}/none', 0):g} and no finite number for "
                f"{metrics.get(f'rewards/{name}/invalid', 0):g}"
                for name in (reward.name for reward in prepare_rewards(self.rewards))
            ]
            raise RuntimeError(
                f"no rollout had a reward in {self.unrewarded_batches} batches in a row (max_unrewarded_batches="
                f"{self.max_unrewarded_batches}), so nothing is learned. Of the rollouts of the last one "
                f"{'; '.join(counts)}. Fix the reward functions, or check the columns that they read."
            )

    def saved_state(self) -> dict[str, Stateful]:
        """Add the count of batches without a reward."""
        return super().saved_state() | {"unrewarded": Attributes(self, "unrewarded_batches")}

    def _finish_rewards(self, collected: Collected) -> None:
        assert collected.pending is not None
        with self._timed("reward"):
            metrics = collected.pending.wait()
        collected.pending = None
        collected.calls.append((sum(len(group.rollouts) for group in collected.generated), metrics))

    def _deal(self, collected: Collected, rollout_number: int) -> None:
        """Exchange groups among ranks for equal work."""
        if num_ranks() == 1:
            return
        if self._cost is None:
            self._cost = ModelCost.of(find_decoder(self.policy), self.policy.get_output_embeddings())
        with self._timed("exchange"):
            share = deal(
                collected.groups,
                self._cost,
                self.sharing,
                num_mini_batches=self.num_mini_batches,
                seed=derive_seed("order", self.seed, rollout_number),
                rank=self.global_rank,
                device=self.device,
                moves=self.moves_groups,
            )
        collected.groups, collected.mini_batches = share.groups, share.mini_batches
        collected.metrics |= share.metrics

    def _sample(self, prompts: Sequence[Prompt], rollout_number: int, attempt: int = 0) -> list[RolloutGroup]:
        """Sample rollouts of prompts."""
        with self._timed("rollout"):
            if attempt:
                seed = ("rollout", rollout_number, attempt)
                groups = self.generate(prompts, self.sampling, self.num_generations, seed=seed)
            else:
                groups = self._next_groups(prompts, rollout_number)
        for group in groups:  # places in the whole batch of all ranks, those of replacements behind
            group.group_id = (attempt << 32) + int(group.group_id)  # type: ignore[call-overload]
        return groups

    def _next_groups(self, prompts: Sequence[Prompt], rollout_number: int) -> list[RolloutGroup]:
        """Take what was sampled ahead, or sample now; then begin with the rollout after it, where that is asked for."""
        if not self.rollout_ahead:
            return self.generate(prompts, self.sampling, self.num_generations, seed=("rollout", rollout_number))
        older = self.global_step - self._ahead.policy_step
        groups = self._ahead.take(
            rollout_number, lambda rollouts: self.group([prompt.open() for prompt in prompts], rollouts)
        )
        self._policy_lag = 0 if groups is None else older
        if groups is None:
            groups = self.generate(prompts, self.sampling, self.num_generations, seed=("rollout", rollout_number))
        following = self.trainer.datamodule.peek(rollout_number + 1)  # type: ignore[attr-defined]
        self._ahead.start(following, rollout_number + 1, self.global_step)
        return groups

    def _sample_ahead(
        self, prompts: Sequence[Prompt], rollout_number: int, engine: RolloutEngine
    ) -> list[RolloutGroup]:
        seed = ("rollout", rollout_number)
        return self.sample_with(engine, prompts, self.sampling, self.num_generations, seed=seed) if prompts else []

    def _replace_uniform_groups(self, batch: PromptBatch, collected: Collected) -> None:
        """Keep groups whose rewards differ, and sample other prompts for the rest."""
        generated = collected.generated
        kept, attempt = [group for group in generated if has_spread(group)], 1
        while attempt < self.max_generation_batches:
            missing = len(batch.prompts) - len(kept)
            if not self.sum_over_ranks([torch.tensor(missing)])[0]:
                break
            prompts = self.trainer.datamodule.draw_extra(  # type: ignore[attr-defined]
                missing, rollout_number=batch.rollout_number, attempt=attempt
            )
            groups = self._sample(prompts, batch.rollout_number, attempt)
            more = Collected(groups, groups, self.start_rewards(groups))
            self._finish_rewards(more)
            generated += groups
            collected.calls += more.calls
            kept += [group for group in groups if has_spread(group)]
            attempt += 1
        counts = self.sum_over_ranks([torch.tensor(len(kept)), torch.tensor(len(generated))])
        names = ("dynamic_sampling/kept_groups", "dynamic_sampling/generated_groups")
        collected.metrics |= dict(zip(names, counts, strict=True))
        collected.metrics["dynamic_sampling/generation_batches"] = float(attempt)
        collected.groups = kept or [leave_untrained(generated[0])]

    def _timed(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Charge what runs inside to a part of the step's time."""
        return self._clock.part(name)
