"""Samples rollouts while earlier ones are trained, up to `max_staleness` batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import SyncedRolloutEngine, declares
from pl_grouprl.training.rollout_queue import RolloutQueue, Staleness, sampled_versions, version_of_all
from pl_grouprl.training.rollout_sources import CopySource, InFlightSource, RolloutSource
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.sampling_threads import SamplingThreads
from pl_grouprl.training.step_timer import StepTimer
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import num_ranks
from pl_grouprl.utilities.options import drop_none

END_SECONDS = 5.0
"""How long the end of a run waits for requests that are in flight."""


class RolloutsAhead:
    """Queues the prompts of the next batches, and takes as many finished groups as a batch has prompts.

    Args:
        run: The run.
        sampler: Samples, and sends the weights.
        timer: Measures the parts of a step.
        max_staleness: Largest staleness of a token, in batches of prompts; at least 1.
        sampling: How rollouts are sampled.
        num_generations: Rollouts per prompt.
        branching: How they branch; None for not at all.
        episodes: Makes the episode loop of the threads; None for plain completions.
        load_policy: Loads the initial policy, for a copy of one whose weights are shards.

    Attributes:
        data: The data module, which knows the next prompts.
    """

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        timer: StepTimer,
        *,
        max_staleness: int,
        sampling: SamplingConfig,
        num_generations: int,
        branching: Branching | None,
        episodes: Callable[[], EpisodeLoop | None],
        load_policy: Callable[[], Any],
    ) -> None:
        self._run, self._sampler, self._timer, self._max_staleness = run, sampler, timer, max_staleness
        self._sampling, self._num_generations = sampling, num_generations
        self._branching, self._make_episodes = branching, episodes
        self._load_policy = load_policy
        self.data: Any = None
        self._state: dict[str, Any] | None = None
        self._next_version = 0
        self._queue: RolloutQueue | None = None
        self._source: RolloutSource | None = None
        self._threads: SamplingThreads | None = None

    def open(self) -> None:
        """Prepare for a fit."""
        self.close()  # of a fit that an exception has ended
        run, sampler, queue = self._run, self._sampler, RolloutQueue(self._max_staleness)
        options = drop_none(
            episodes=self._make_episodes(), branching=self._branching, stop=sampler.stop_for_threads(self._sampling)
        )
        arguments = self._sampling, self._num_generations
        if declares(sampler.engine, "updates_in_flight"):
            self._source = InFlightSource(run, sampler, arguments, options)
        else:
            self._source = CopySource(run, sampler, queue, arguments, options, self._load_policy)
        self._queue = queue
        self._threads = SamplingThreads(queue, self._source.sample, whole_batches=self._source.whole_batches)

    def take(self, batch: PromptBatch) -> tuple[list[RolloutGroup], Staleness]:
        """Wait for the groups of a training batch: this rank's, and as many as it has prompts. Collective.

        They need not belong to the prompts of this batch. Their `group_id` is unique over all ranks.
        """
        assert self._queue is not None
        assert self._source is not None
        queue, count = self._queue, len(batch.prompts)
        with self._timer.part("wait_for_rollouts"):
            self._restore(queue)
            queue.expect(batch.rollout_number)
            self._source.refresh(count, lambda: self._get_ready(queue, batch))
            groups, staleness = queue.take(batch.rollout_number, count)
            self._next_version = queue.version + 1
            fresh = [group for group in groups if _all_from(group, queue.version)]
            self._source.check(fresh)
        rank, ranks = self._run.global_rank, num_ranks()
        for place, group in enumerate(groups):
            group.group_id = rank + ranks * place
        return groups, staleness

    def _get_ready(self, queue: RolloutQueue, batch: PromptBatch) -> None:
        """Submit prompts of this batch and of those that may be sampled ahead, and wait."""
        assert self._threads is not None
        assert self._source is not None
        queue.set_version(self._next_version, getattr(self._sampler.engine, "version", None))
        number = batch.rollout_number
        if not queue.has(number):
            with self._timer.part("rollout"):
                queue.submit(number, batch.prompts, self._source.sample_now(batch))
        for at in range(number + 1, number + self._max_staleness + 1):
            if not queue.has(at):
                queue.submit(at, self.data.peek(at))
        self._threads.grow(min(len(queue), self._source.max_threads))
        queue.wait(len(batch.prompts))

    def close(self, *, at_once: bool = False) -> None:
        """End the threads. What was sampled stays, for a checkpoint or another fit.

        Args:
            at_once: Do not wait for what is being sampled longer than a few seconds.
        """
        queue, threads, self._threads = self._queue, self._threads, None
        if queue is None or threads is None:
            return
        assert self._source is not None
        queue.close()
        self._source.stop()
        if not threads.join(END_SECONDS if at_once or self._source.can_stop else None):
            rank_zero_warn("rollouts are still being sampled at the end of the run; they are dropped.")
        if self._state is None:
            self._state = queue.state_dict()
        self._queue = self._source = None

    def mark_current(self, groups: Sequence[RolloutGroup]) -> None:
        """Set the version of groups that were sampled from the current weights, outside of the queue."""
        assert self._queue is not None
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.weight_versions = version_of_all(rollout, self._queue.version)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any] | None:
        """The groups that are queued and sampled on this rank; None if there are none."""
        if self._state is None and self._queue is not None:
            assert self._source is not None
            self._source.finish()
            return self._queue.state_dict()
        return self._state

    def load_state_dicts(self, per_rank: Sequence[dict[str, Any] | None]) -> None:
        """Restore this rank's groups from those of all saved ranks. What cannot be restored is sampled again."""
        entries = [entry for state in per_rank if state is not None for entry in state["entries"]]
        again = sum("rollouts" not in entry for entry in entries)
        if len(per_rank) != num_ranks():
            leave_out(per_rank, f"{len(per_rank)} ranks had queued them, this run has {num_ranks()}")
            return
        self._state = per_rank[self._run.global_rank]
        if again:
            rank_zero_info(
                f"{again} groups of rollouts were not finished when the checkpoint was saved: they start again."
            )

    def _restore(self, queue: RolloutQueue) -> None:
        state, self._state = self._state, None
        if state is not None:
            queue.load_state_dict(state, self.data.peek, self._join)
            self._next_version = queue.version + 1

    def _join(self, prompt: Prompt, token_ids: list[int], rollouts: list[Rollout]) -> RolloutGroup:
        """A group whose prompt's tokens may be those with an environment's observation."""
        return self._sampler.group([replace(prompt.open(), token_ids=token_ids)], [rollouts])[0]


def leave_out(per_rank: Sequence[dict[str, Any] | None], reason: str) -> None:
    """Say that a run leaves out the groups of a checkpoint."""
    count = sum(len(state["entries"]) for state in per_rank if state is not None)
    if count:
        rank_zero_info(
            f"The checkpoint has {count} groups of rollouts that were sampled ahead. They are left out, because "
            f"{reason}. Prompts of the next batches are sampled again."
        )


def _all_from(group: RolloutGroup, version: int) -> bool:
    return all(found == version for rollout in group.rollouts for found in sampled_versions(rollout))


class CloseRolloutsAhead(pl.Callback):
    """Ends the threads after an exception, when Lightning does not call `teardown`."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End them; the original exception is still raised."""
        collector: Any = pl_module.collector
        collector.close(at_once=True)


def check_max_staleness(module: pl.LightningModule, engine: Any, corrected: bool) -> None:
    """Refuse, at setup, options that cannot be combined with sampling ahead.

    Args:
        module: The module, attached to its Trainer.
        engine: Its rollout engine.
        corrected: Whether the loss corrects for the sampler's log-probabilities.

    Raises:
        ValueError: Says why, and what to change.
    """
    name, precision = type(engine).__name__, module.trainer.precision_plugin
    in_flight, from_copy = declares(engine, "updates_in_flight"), declares(engine, "samples_from_copies")
    for unfit, reason in (
        (
            not corrected,
            "its rollouts come from older weights and nothing corrects for that; set importance_sampling, for "
            "example to 'token_truncate'",
        ),
        (
            not in_flight and not from_copy,
            f"engine is {name}, which cannot sample while the policy is updated: it declares neither "
            "updates_in_flight (VLLMServerRolloutEngine does) nor samples_from_copies (HFRolloutEngine does). Use one "
            "of those",
        ),
        (
            in_flight and not (isinstance(engine, SyncedRolloutEngine) and declares(engine, "takes_prompt_indices")),
            f"engine is {name}, which declares updates_in_flight but lacks update_weights or takes_prompt_indices, by "
            "which each prompt has random numbers of its own",
        ),
        (
            not in_flight and type(precision) not in (Precision, MixedPrecision),
            f"precision={precision.precision} sets a default dtype for all threads; use 32-true or a mixed precision",
        ),
        (
            not hasattr(getattr(module.trainer, "datamodule", None), "peek"),
            "it needs to know the next prompts; pass a PromptDataModule as datamodule",
        ),
    ):
        if unfit:
            staleness = getattr(module, "max_staleness", None)
            raise ValueError(f"max_staleness is {staleness}, but {reason}. Or set max_staleness to 0.")
