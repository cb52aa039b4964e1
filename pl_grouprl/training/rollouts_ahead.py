"""Samples rollouts while earlier ones are trained, up to `max_staleness` batches ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import SyncedRolloutEngine, declares
from pl_grouprl.training.rollout_queue import RolloutQueue
from pl_grouprl.training.rollout_sources import CopySource, InFlightSource, RolloutSource
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.sampling_threads import SamplingThreads
from pl_grouprl.training.staleness import Staleness, sampled_versions, version_of_all
from pl_grouprl.training.step_timer import StepTimer
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import num_ranks
from pl_grouprl.utilities.options import drop_none

END_SECONDS = 5.0
"""Seconds to wait at the end of a run for requests in flight."""


class RolloutsAhead:
    """Samples prompts ahead in threads, and hands out finished groups, one for each prompt of a batch.

    Args:
        run: The run.
        sampler: Samples, and sends the weights.
        timer: Measures the parts of a step.
        max_staleness: Largest staleness of a token, in batches of prompts; at least 1.
        sampling: How rollouts are sampled.
        num_generations: Rollouts per prompt.
        branching: How rollouts branch; None if they do not.
        episodes: Makes the episode loop that the threads use, or None for plain completions.
        load_policy: Loads the initial policy; used to build a full copy when the policy's weights are shards.

    Attributes:
        data: The data module, whose `peek` returns the prompts of later batches.
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
        self.close()  # an earlier fit may have ended with an exception
        run, sampler = self._run, self._sampler
        queue = RolloutQueue(self._max_staleness, type(sampler.engine).__name__)
        options = drop_none(
            episodes=self._make_episodes(), branching=self._branching, stop=sampler.stop_strings(self._sampling)
        )
        arguments = self._sampling, self._num_generations
        if declares(sampler.engine, "updates_in_flight"):
            self._source = InFlightSource(run, sampler, arguments, options)
        else:
            self._source = CopySource(run, sampler, queue, arguments, options, self._load_policy)
        self._queue = queue
        self._threads = SamplingThreads(queue, self._source.sample, whole_batches=self._source.whole_batches)

    def take(self, batch: PromptBatch) -> list[RolloutGroup]:
        """Wait for one finished group per prompt of this rank's batch, and remove them from the queue. Collective.

        The groups may come from prompts of other batches. Each gets a `group_id` that is unique across ranks.
        """
        assert self._queue is not None
        assert self._source is not None
        queue, count = self._queue, len(batch.prompts)
        with self._timer.part("wait_for_rollouts"):
            self._restore(queue)
            queue.expect(batch.rollout_number)
            self._source.refresh(count, lambda: self._submit_and_wait(queue, batch))
            groups = queue.take(batch.rollout_number, count)
            self._next_version = queue.version + 1
            fresh = [group for group in groups if _is_sampled_from(group, queue.version)]
            self._source.check(fresh, batch.prompts)
        rank, ranks = self._run.global_rank, num_ranks()
        for place, group in enumerate(groups):
            group.group_id = rank + ranks * place
        return groups

    def measure(self, groups: Sequence[RolloutGroup]) -> Staleness:
        """Staleness of the groups that are trained now."""
        assert self._queue is not None
        return self._queue.measure(groups)

    def _submit_and_wait(self, queue: RolloutQueue, batch: PromptBatch) -> None:
        """Submit the prompts of this and the next `max_staleness` batches; wait for as many groups as one batch has."""
        assert self._threads is not None
        assert self._source is not None
        queue.set_version(self._next_version, getattr(self._sampler.engine, "version", None))
        number = batch.rollout_number
        if not queue.has(number):
            with self._timer.part("rollout"):
                queue.submit(number, batch.prompts, self._source.sample_now(batch))
        for later in range(number + 1, number + self._max_staleness + 1):
            if not queue.has(later):
                queue.submit(later, self.data.peek(later))
        self._threads.grow(min(len(queue), self._source.max_threads))
        queue.wait(len(batch.prompts))

    def close(self, *, at_once: bool = False) -> None:
        """End the threads. Finished groups are kept for a checkpoint or the next fit.

        Args:
            at_once: Wait at most `END_SECONDS` for running requests, even if they cannot be stopped.
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
            self._state = queue.state_dict() | {"options": self._options()}
        self._queue = self._source = None

    def mark_current(self, groups: Sequence[RolloutGroup]) -> None:
        """Label groups that bypassed the queue as sampled from the current weights."""
        assert self._queue is not None
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.weight_versions = version_of_all(rollout, self._queue.version)

    # Checkpoints.

    def state_dict(self) -> dict[str, Any] | None:
        """State of this rank's queue, for a checkpoint; None if no fit has begun and nothing was restored."""
        if self._state is None and self._queue is not None:
            assert self._source is not None
            self._source.finish()
            return self._queue.state_dict() | {"options": self._options()}
        return self._state

    def load_state_dicts(self, per_rank: Sequence[dict[str, Any] | None]) -> None:
        """Set the state that the next `take` restores. With another number of ranks, the saved groups are left out.

        Args:
            per_rank: What `state_dict` returned on each rank that saved.
        """
        entries = [entry for state in per_rank if state is not None for entry in state["entries"]]
        again = sum("rollouts" not in entry for entry in entries)
        if len(per_rank) != num_ranks():
            log_left_out(per_rank, f"{len(per_rank)} ranks had queued them, this run has {num_ranks()}")
            return
        self._state = per_rank[self._run.global_rank]
        if again:
            rank_zero_info(
                f"{again} groups of rollouts were not finished when the checkpoint was saved: they start again."
            )

    def _options(self) -> dict[str, Any]:
        """What rollouts are sampled with, as plain values."""
        branching = None if self._branching is None else asdict(self._branching)
        options = {**asdict(self._sampling), "num_generations": self._num_generations, "branching": branching}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}

    def _restore(self, queue: RolloutQueue) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        saved, options = state.get("options", {}), self._options()
        if changed := [name for name in saved if saved[name] != options.get(name)]:
            entries = [{**entry, "prompt": None} for entry in state["entries"]]  # as if they were other prompts
            state = {**state, "entries": entries}
        left_out = queue.load_state_dict(state, self.data.peek, self._rebuild_group)
        if left_out:
            reason = f"{', '.join(changed)} changed" if changed else "their prompts have changed"
            rank_zero_info(f"{left_out} groups of rollouts sampled ahead are sampled again, because {reason}.")
        self._next_version = queue.version + 1

    def _rebuild_group(self, prompt: Prompt, token_ids: list[int], rollouts: list[Rollout]) -> RolloutGroup:
        """Rebuild a saved group; its prompt tokens may include an environment's observation."""
        return self._sampler.group([replace(prompt.open(), token_ids=token_ids)], [rollouts])[0]


def log_left_out(per_rank: Sequence[dict[str, Any] | None], reason: str) -> None:
    """Log that the groups of a checkpoint are not restored, and why."""
    count = sum(len(state["entries"]) for state in per_rank if state is not None)
    if count:
        rank_zero_info(
            f"The checkpoint has {count} groups of rollouts that were sampled ahead. They are left out, because "
            f"{reason}. Prompts of the next batches are sampled again."
        )


def _is_sampled_from(group: RolloutGroup, version: int) -> bool:
    return all(found == version for rollout in group.rollouts for found in sampled_versions(rollout))


class CloseRolloutsAhead(pl.Callback):
    """Ends the sampling threads after an exception, because Lightning then skips `teardown`."""

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """End the threads; Lightning then raises the original exception."""
        collector: Any = pl_module.collector
        collector.close(at_once=True)


def check_max_staleness(module: pl.LightningModule, engine: Any, corrected: bool) -> None:
    """Raise at setup if other options rule out sampling ahead.

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
            f"engine is {name}, which declares updates_in_flight but lacks update_weights or takes_prompt_indices "
            "(needed to seed each prompt separately)",
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
