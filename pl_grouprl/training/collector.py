"""Turns a prompt batch into the groups this rank trains: sampled, rewarded, replaced if they are uninformative."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from pl_grouprl.attention import find_decoder
from pl_grouprl.data.loaders import PromptBatch
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
from pl_grouprl.training.mismatch import mark_tokens
from pl_grouprl.training.rewarder import Rewarder
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, sum_over_ranks
from pl_grouprl.utilities.options import check_options, drop_none

Generate = Callable[..., list[RolloutGroup]]
"""Samples groups; takes the arguments of `Sampler.generate`."""


@dataclass
class CollectedRollouts:
    """Sampled rollouts whose rewards may still be pending.

    Attributes:
        generated: Groups that this rank sampled, including replaced ones.
        pending: Rewards of `generated` that are still being computed.
        buffer: Groups that this rank trains.
        metrics: Metrics of dynamic sampling and of the balance between ranks.
        staleness: Staleness of this rank's rollouts that were sampled ahead; None if none were.
    """

    generated: list[RolloutGroup]
    pending: PendingRewards | None
    buffer: RolloutBuffer = field(init=False)
    metrics: dict[str, float] = field(default_factory=dict)
    staleness: Staleness | None = None


class Collector:
    """Samples the rollouts of a prompt batch, starts their rewards, and distributes them to the ranks.

    Args:
        run: The run.
        sampler: Samples the rollouts.
        rewarder: Rewards the rollouts.
        timer: Measures the parts of a step.
        sampling: How rollouts are sampled.
        num_generations: Rollouts per prompt.
        branching: How rollouts branch; not at all if None.
        num_mini_batches: Mini-batches that the groups are split into.
        sharing: How groups will be packed, which determines their cost.
        seed: Seed of the split into mini-batches.
        mask_truncated_completions: Do not train rollouts that were truncated at `max_new_tokens`.
        dynamic_sampling: Replace groups whose rewards are all equal.
        max_generation_batches: Maximum number of rounds of sampling per batch under `dynamic_sampling`.
        max_staleness: How many batches ahead rollouts are sampled during the updates; 0 samples none ahead.
        load_policy: Loads the initial policy; needed to sample ahead from a policy whose weights are sharded.

    Attributes:
        sampler: As passed.
        ahead: The rollouts that are sampled ahead; None with `max_staleness` 0.
        can_move: Whether a rank may train groups that another rank sampled.
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
        load_policy: Callable[[], Any] = lambda: None,
    ) -> None:
        check_options({"num_generations": (num_generations, num_generations >= 1, "at least 1")})
        check_options({"max_staleness": (max_staleness, max_staleness >= 0, "0 or larger")})
        if dynamic_sampling and num_generations < 2 and branching is None:
            raise ValueError("dynamic_sampling=True with num_generations=1 would drop every prompt; pass at least 2.")
        self.sampler = sampler
        self.can_move = True
        self.is_informative: Callable[[RolloutGroup], bool] = rewards_differ
        self._run, self._rewarder, self._timer = run, rewarder, timer
        self._sampling, self._num_generations, self._branching = sampling, num_generations, branching
        self._num_mini_batches, self._seed, self._mask_truncated = num_mini_batches, seed, mask_truncated_completions
        self._sharing: Sharing = sharing
        self._dynamic_sampling, self._max_generation_batches = dynamic_sampling, max_generation_batches
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
        """Saves and loads the rollouts sampled ahead; with `max_staleness` 0, reports rollouts in a checkpoint."""
        ahead = self.ahead
        if ahead is None:
            return PerRankState(self._run, lambda: None, partial(log_left_out, reason="max_staleness is 0"))
        return PerRankState(self._run, ahead.state_dict, ahead.load_state_dicts)

    def collect(self, batch: PromptBatch, generate: Generate | None = None) -> CollectedRollouts:
        """Sample groups, start their rewards, and assign them to ranks; `finish` waits for the rewards.

        Args:
            batch: The prompts.
            generate: Samples in place of `Sampler.generate`.
        """
        generate = self.sampler.generate if generate is None else generate
        sample = partial(self._sample, generate, batch.rollout_number)
        generated = sample(batch.prompts) if self.ahead is None else self.ahead.take(batch, sample)
        collected = CollectedRollouts(generated, self._rewarder.start(generated))
        groups = self._keep_informative(batch, collected, sample) if self._dynamic_sampling else generated
        if self.ahead is not None:
            collected.staleness = self.ahead.measure(groups)
        has_logprobs = all(rollout.logprobs is not None for group in groups for rollout in group.rollouts)
        if self._sampling.is_truncated and declares(self.sampler.engine, "truncates_logprobs"):
            has_logprobs = False  # they are not over the whole vocabulary
        with self._waiting_for_ranks():  # whose rollouts take longer
            has_logprobs = all(gather_plain(has_logprobs, self._run.device))
        mini_batches: list[int] = []  # on a single rank, the buffer assigns them
        if num_ranks() > 1:
            groups, mini_batches = self._distribute(groups, batch.rollout_number, collected.metrics)
        collected.buffer = RolloutBuffer(
            groups,
            batch.rollout_number,
            self._num_mini_batches,
            self._seed,
            mini_batches=mini_batches,
            mask_truncated=self._mask_truncated,
        )
        if has_logprobs:
            mark_tokens(collected.buffer, None if self.ahead is None else self.ahead.version)
        else:  # ranks must exchange the same metrics in every step
            collected.buffer.values.pop("rollout_logprobs", None)
        return collected

    def finish(self, collected: CollectedRollouts) -> RolloutBuffer:
        """Wait for the rewards, and put what depends on them, metrics and loss mask, into the buffer. Collective."""
        buffer, device = collected.buffer, self._run.device
        if collected.pending is not None:
            with self._timer.part("reward"):
                collected.pending.wait()
            if num_ranks() > 1:
                with self._timer.part("exchange"):
                    exchange_rewards(collected.generated, buffer.groups, device)
        staleness = None if collected.staleness is None else tuple(collected.staleness)
        per_rank = gather_plain((summarize(collected.generated), staleness), device)
        records = [record for rank_records, _ in per_rank for record in rank_records]
        metrics = rollout_metrics(records) | collected.metrics
        metrics |= staleness_metrics([Staleness(*found) for _, found in per_rank if found is not None])
        metrics |= self.sampler.take_metrics()
        self._rewarder.count_unrewarded(metrics)
        buffer.metrics |= metrics
        buffer.compute_loss_mask()
        buffer.num_tokens = count_tokens(records)
        return buffer

    def _waiting_for_ranks(self) -> AbstractContextManager[None]:
        return self._timer.part("wait_for_ranks") if num_ranks() > 1 else nullcontext()

    def _sample(
        self, generate: Generate, rollout_number: int, prompts: Sequence[Prompt], attempt: int = 0
    ) -> list[RolloutGroup]:
        seed = ("rollout", rollout_number, attempt) if attempt else ("rollout", rollout_number)
        options = drop_none(branching=self._branching)
        with self._timer.part("rollout"):
            groups = generate(prompts, self._sampling, self._num_generations, seed=seed, **options)
        for group in groups:  # their index in the batch of all ranks; replacements come last
            group.group_id = (attempt << 32) + int(group.group_id)  # type: ignore[call-overload]
        return groups

    def _keep_informative(
        self, batch: PromptBatch, collected: CollectedRollouts, sample: Callable[..., list[RolloutGroup]]
    ) -> list[RolloutGroup]:
        """Keep groups whose rewards differ, and sample other prompts for the rest; waits for all rewards."""
        kept: list[RolloutGroup] = []
        new, pending, attempt, device = collected.generated, collected.pending, 1, self._run.device
        assert pending is not None
        while True:
            with self._timer.part("reward"):
                pending.wait()
            kept += [group for group in new if self.is_informative(group)]
            if attempt == self._max_generation_batches:
                break
            with self._waiting_for_ranks():
                missing = int(sum_over_ranks([torch.tensor(len(batch.prompts) - len(kept))], device)[0])
            if not missing:
                break
            prompts = self._data.draw_extra(missing, rollout_number=batch.rollout_number, attempt=attempt)
            new = sample(prompts, attempt)
            if self.ahead is not None:
                self.ahead.mark_current(new)
            collected.generated.extend(new)
            pending = self._rewarder.start(new)
            attempt += 1
        collected.pending = None
        counts = sum_over_ranks([torch.tensor(len(kept)), torch.tensor(len(collected.generated))], device)
        names = ("dynamic_sampling/kept_groups", "dynamic_sampling/generated_groups")
        collected.metrics |= dict(zip(names, counts, strict=True))
        collected.metrics["dynamic_sampling/generation_batches"] = float(attempt)
        # Every rank needs a group, even if it trains nothing.
        return kept or [without_rewards(collected.generated[0])]

    def _distribute(
        self, groups: list[RolloutGroup], rollout_number: int, metrics: dict[str, float]
    ) -> tuple[list[RolloutGroup], list[int]]:
        """Balance work by exchanging groups between ranks; returns those of this rank, and their mini-batches."""
        if self._cost is None:
            policy = self._run.policy
            self._cost = ModelCost.of(find_decoder(policy), policy.get_output_embeddings())
        with self._timer.part("exchange"):
            groups, mini_batches, balance = distribute_groups(
                groups,
                self._cost,
                self._sharing,
                num_mini_batches=self._num_mini_batches,
                seed=derive_seed("order", self._seed, rollout_number),
                rank=self._run.global_rank,
                device=self._run.device,
                can_move=self.can_move,
            )
        metrics |= balance
        return groups, mini_batches
