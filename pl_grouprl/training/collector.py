"""Turns a prompt batch into the groups this rank trains: sampled, rewarded, replaced if they are uninformative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pl_grouprl.attention import find_decoder
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.packing import Sharing
from pl_grouprl.rewards import PendingRewards
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import declares
from pl_grouprl.training.ahead import RolloutsAhead, Staleness, log_left_out, staleness_metrics
from pl_grouprl.training.buffer import (
    RolloutBuffer,
    distribute_groups,
    exchange_rewards,
    rewards_differ,
    without_rewards,
)
from pl_grouprl.training.checkpoint import PerRankState
from pl_grouprl.training.metrics import StepTimer, count_tokens, rollout_metrics, summarize
from pl_grouprl.training.rewarder import Rewarder
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, sum_over_ranks
from pl_grouprl.utilities.options import check_options, drop_none


@dataclass
class CollectedRollouts:
    """Groups of a prompt batch; their rewards may still be pending.

    Attributes:
        groups: Groups that this rank trains.
        generated: Groups that this rank sampled, including replaced ones.
        pending: Rewards of `generated` that are still being computed.
        mini_batches: The mini-batch of each group; empty on a single rank, where the buffer assigns them.
        metrics: Metrics of dynamic sampling and of the balance between ranks.
        has_rollout_logprobs: Whether every rollout of every rank has log-probabilities from the sampler, over the whole
            vocabulary.
        staleness: Staleness of this rank's rollouts that were sampled ahead; None if none were.
    """

    groups: list[RolloutGroup]
    generated: list[RolloutGroup]
    pending: PendingRewards | None = None
    mini_batches: list[int] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    has_rollout_logprobs: bool = True
    staleness: Staleness | None = None


class Collector:
    """Samples the rollouts of a prompt batch and distributes them to the ranks.

    Args:
        run: The run.
        sampler: Samples ahead; all other sampling goes through `run.generate`.
        rewarder: Rewards the rollouts.
        timer: Measures the parts of a step.
        sampling: How rollouts are sampled.
        num_generations: Rollouts per prompt.
        branching: How rollouts branch; None if they do not.
        num_mini_batches: Mini-batches that the groups are split into.
        sharing: How groups will be packed, which determines their cost.
        seed: Seed of the split into mini-batches.
        mask_truncated_completions: Do not train rollouts that were truncated at `max_new_tokens`.
        dynamic_sampling: Replace groups whose rewards are all equal.
        max_generation_batches: Maximum number of rounds of sampling per batch under `dynamic_sampling`.
        max_staleness: How many batches ahead rollouts are sampled during the updates; 0 samples none ahead.
        episodes: Returns the episode loop for the threads that sample ahead; None for plain completions.
        load_policy: Loads the initial policy; needed to sample ahead from a policy whose weights are sharded.

    Attributes:
        ahead: The rollouts that are sampled ahead; None with `max_staleness` 0.
        can_move: Whether groups may be trained on another rank than the one that sampled them.
        is_informative: Whether `dynamic_sampling` keeps a group.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        rewarder: Rewarder,
        timer: StepTimer,
        *,
        sampling: SamplingConfig,
        num_generations: int = 8,
        branching: Branching | None = None,
        num_mini_batches: int = 1,
        sharing: Sharing = "shared",
        seed: int = 0,
        mask_truncated_completions: bool = False,
        dynamic_sampling: bool = False,
        max_generation_batches: int = 5,
        max_staleness: int = 0,
        episodes: Callable[[], EpisodeLoop | None] = lambda: None,
        load_policy: Callable[[], Any] = lambda: None,
    ) -> None:
        counts = {"num_generations": num_generations, "max_generation_batches": max_generation_batches}
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        if dynamic_sampling and num_generations < 2 and branching is None:
            raise ValueError("dynamic_sampling=True with num_generations=1 would drop every prompt; pass at least 2.")
        check_options({"max_staleness": (max_staleness, max_staleness >= 0, "0 or larger")})
        self._run, self._sampler, self._rewarder, self._timer = run, sampler, rewarder, timer
        self._sampling, self._num_generations, self._num_mini_batches = sampling, num_generations, num_mini_batches
        self._branching = branching
        self._sharing: Sharing = sharing
        self._seed = seed
        self._mask_truncated = mask_truncated_completions
        self._dynamic_sampling, self._max_generation_batches = dynamic_sampling, max_generation_batches
        self.can_move = True
        self.is_informative: Callable[[RolloutGroup], bool] = rewards_differ
        self._data: Any = None
        self._cost: ModelCost | None = None
        self.ahead: RolloutsAhead | None = None
        if max_staleness:
            self.ahead = RolloutsAhead(
                run,
                sampler,
                timer,
                max_staleness=max_staleness,
                sampling=sampling,
                num_generations=num_generations,
                branching=branching,
                episodes=episodes,
                load_policy=load_policy,
            )

    def set_up(self, data: Any) -> None:
        """Prepare for a run.

        Args:
            data: The data module, which `dynamic_sampling` and `max_staleness` ask for further prompts.
        """
        self._data = data
        if self.ahead is not None:
            self.ahead.data = data

    def open(self) -> None:
        """Prepare to sample ahead, at the start of a fit."""
        if self.ahead is not None:
            self.ahead.open()

    def close(self, *, at_once: bool = False) -> None:
        """End the threads that sample ahead; `at_once` after an exception."""
        if self.ahead is not None:
            self.ahead.close(at_once=at_once)

    @property
    def ahead_state(self) -> PerRankState:
        """Saves and loads the rollouts sampled ahead; with `max_staleness` 0, reports those that a checkpoint holds."""
        ahead = self.ahead
        if ahead is None:
            return PerRankState(self._run, lambda: None, partial(log_left_out, reason="max_staleness is 0"))
        return PerRankState(self._run, ahead.state_dict, ahead.load_state_dicts)

    def collect(self, batch: PromptBatch) -> CollectedRollouts:
        """Sample groups, start their rewards, and distribute them to ranks; `finish` waits for the rewards."""
        ahead = self.ahead
        generated = self._sample(batch.prompts, batch.rollout_number) if ahead is None else ahead.take(batch)
        collected = CollectedRollouts(generated, generated, self._rewarder.start(generated))
        if self._dynamic_sampling:
            self._wait(collected)
            self._replace_uniform_groups(batch, collected)
        if ahead is not None:
            collected.staleness = ahead.measure(collected.groups)
        reports = all(rollout.logprobs is not None for group in collected.groups for rollout in group.rollouts)
        reports &= not (self._sampling.is_truncated and declares(self._sampler.engine, "truncates_logprobs"))
        collected.has_rollout_logprobs = all(gather_plain(reports, self._run.device))
        self._distribute(collected, batch.rollout_number)
        return collected

    def make_buffer(self, collected: CollectedRollouts, rollout_number: int) -> RolloutBuffer:
        """Put the groups that this rank trains into a buffer."""
        buffer = RolloutBuffer(
            collected.groups,
            rollout_number,
            self._num_mini_batches,
            self._seed,
            mini_batches=collected.mini_batches,
            mask_truncated=self._mask_truncated,
        )
        if not collected.has_rollout_logprobs:  # ranks must exchange the same metrics in every step
            buffer.values.pop("rollout_logprobs", None)
        return buffer

    def finish(self, collected: CollectedRollouts, buffer: RolloutBuffer) -> None:
        """Wait for the rewards of the buffer's rollouts; put what depends on them, metrics and loss mask, into it."""
        if collected.pending is not None:
            self._wait(collected)
            if num_ranks() > 1:
                with self._timer.part("exchange"):
                    exchange_rewards(collected.generated, collected.groups, self._run.device)
        staleness = None if collected.staleness is None else vars(collected.staleness)
        per_rank = gather_plain((summarize(collected.generated), staleness), self._run.device)
        records = [record for rank_records, _ in per_rank for record in rank_records]
        metrics = rollout_metrics(records) | collected.metrics
        metrics |= staleness_metrics([Staleness(**found) for _, found in per_rank if found is not None])
        metrics |= self._sampler.take_metrics()
        self._rewarder.count_unrewarded(metrics)
        buffer.metrics |= metrics
        buffer.compute_loss_mask()
        buffer.num_tokens = count_tokens(records)

    def _wait(self, collected: CollectedRollouts) -> None:
        assert collected.pending is not None
        with self._timer.part("reward"):
            collected.pending.wait()
        collected.pending = None

    def _distribute(self, collected: CollectedRollouts, rollout_number: int) -> None:
        """Balance work by exchanging groups between ranks."""
        if num_ranks() == 1:
            return
        if self._cost is None:
            policy = self._run.policy
            self._cost = ModelCost.of(find_decoder(policy), policy.get_output_embeddings())
        with self._timer.part("exchange"):
            assignment = distribute_groups(
                collected.groups,
                self._cost,
                self._sharing,
                num_mini_batches=self._num_mini_batches,
                seed=derive_seed("order", self._seed, rollout_number),
                rank=self._run.global_rank,
                device=self._run.device,
                can_move=self.can_move,
            )
        collected.groups, collected.mini_batches = assignment.groups, assignment.mini_batches
        collected.metrics |= assignment.metrics

    def _sample(self, prompts: Sequence[Prompt], rollout_number: int, attempt: int = 0) -> list[RolloutGroup]:
        with self._timer.part("rollout"):
            seed = ("rollout", rollout_number, attempt) if attempt else ("rollout", rollout_number)
            options = drop_none(branching=self._branching)
            groups = self._run.generate(prompts, self._sampling, self._num_generations, seed=seed, **options)
        for group in groups:  # their index in the batch of all ranks; replacements come last
            group.group_id = (attempt << 32) + int(group.group_id)  # type: ignore[call-overload]
        return groups

    def _replace_uniform_groups(self, batch: PromptBatch, collected: CollectedRollouts) -> None:
        """Keep groups whose rewards differ, and sample other prompts for the rest."""
        generated = collected.generated
        kept, attempt = [group for group in generated if self.is_informative(group)], 1
        while attempt < self._max_generation_batches:
            missing = int(sum_over_ranks([torch.tensor(len(batch.prompts) - len(kept))], self._run.device)[0])
            if not missing:
                break
            prompts = self._data.draw_extra(missing, rollout_number=batch.rollout_number, attempt=attempt)
            groups = self._sample(prompts, batch.rollout_number, attempt)
            if self.ahead is not None:
                self.ahead.mark_current(groups)
            more = CollectedRollouts(groups, groups, self._rewarder.start(groups))
            self._wait(more)
            generated.extend(groups)
            kept += [group for group in groups if self.is_informative(group)]
            attempt += 1
        counts = sum_over_ranks([torch.tensor(len(kept)), torch.tensor(len(generated))], self._run.device)
        names = ("dynamic_sampling/kept_groups", "dynamic_sampling/generated_groups")
        collected.metrics |= dict(zip(names, counts, strict=True))
        collected.metrics["dynamic_sampling/generation_batches"] = float(attempt)
        # Every rank needs a group, even if it trains nothing.
        collected.groups = kept or [without_rewards(generated[0])]
