"""Samples rollouts while earlier ones are trained, up to `max_staleness` batches ahead.

`RolloutsAhead` submits prompts to a `RolloutQueue`, `SamplingThreads` sample them, and the main thread takes finished
groups. There are two ways. With an engine that takes weights in flight (`updates_in_flight`), many threads sample one
group each while the main thread sends weights. Otherwise one thread samples batch by batch from a copy of the policy
(`PolicyCopy`), whose weights change in between.

The version of the weights is the number of rollout batches that were trained on so far. A token's staleness is the
version about to be updated minus the version that sampled the token.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.kernels import fuse_layers, is_fused, unfuse_layers
from pl_grouprl.models.policy import frozen_copy
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import RolloutEngine, SamplerLostError, SyncedRolloutEngine, declares
from pl_grouprl.training.buffer import rollout_state
from pl_grouprl.training.metrics import StepTimer
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import NOT_SAMPLED, Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.describe import is_allowed
from pl_grouprl.utilities.distributed import derive_seed, num_ranks, raise_on_all_ranks
from pl_grouprl.utilities.options import drop_none
from pl_grouprl.utilities.progress import tick

NAME = "rollouts-ahead"
"""Name of the threads."""

MAX_THREADS = 128
"""Maximum number of groups that a rank samples at a time with an engine that takes weights in flight."""

MAX_ATTEMPTS = 20
"""How often a prompt whose groups are always too old is sampled before the run ends."""

END_SECONDS = 5.0
"""Seconds to wait at the end of a run for requests in flight."""

Join = Callable[[Prompt, list[int], list[Rollout]], RolloutGroup]
"""Builds a group from (prompt, prompt tokens as sampled, rollouts)."""

Sample = Callable[..., list[RolloutGroup]]


class RolloutsAhead:
    """Samples prompts ahead in threads, and hands out finished groups, one for each prompt of a batch.

    Args:
        run: The run.
        sampler: Samples, and sends the weights.
        timer: Measures the parts of a step.
        max_staleness: Largest staleness of a token, in batches of prompts; at least 1.
        sampling: How rollouts are sampled.
        num_generations: Rollouts per prompt.
        branching: How rollouts branch; not at all if None.
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
        load_policy: Callable[[], Any],
    ) -> None:
        self._run, self._sampler, self._timer, self._max_staleness = run, sampler, timer, max_staleness
        self._sampling, self._num_generations, self._branching = sampling, num_generations, branching
        self._load_policy = load_policy
        self.data: Any = None
        self._state: dict[str, Any] | None = None
        self._next_version = 0
        self._queue: RolloutQueue | None = None
        self._copy: PolicyCopy | None = None  # None if the engine takes weights in flight
        self._options: dict[str, Any] = {}
        self._threads: SamplingThreads | None = None

    def open(self) -> None:
        """Prepare for a fit."""
        self.close()  # an earlier fit may have ended with an exception
        sampler, engine = self._sampler, self._sampler.engine
        self._queue = RolloutQueue(self._max_staleness, type(engine).__name__)
        self._copy = None
        if not declares(engine, "updates_in_flight"):
            self._copy = PolicyCopy(self._run, engine, self._load_policy)
        self._options = drop_none(
            episodes=None if sampler.tooling is None else sampler.tooling.loop_for_threads(),
            branching=self._branching,
            stop=sampler.stop_strings(self._sampling),
        )
        self._threads = SamplingThreads(self._queue, self._sample, whole_batches=self._copy is not None)

    def take(self, batch: PromptBatch, sample: Sample) -> list[RolloutGroup]:
        """Wait for one finished group per prompt of this rank's batch, and remove them from the queue. Collective.

        The groups may come from prompts of other batches. Each gets a `group_id` that is unique across ranks.

        Args:
            batch: The prompts.
            sample: Samples them in the main thread, from the policy, if they were not submitted ahead to a copy.
        """
        queue, threads, number, count = self._queue, self._threads, batch.rollout_number, len(batch.prompts)
        assert queue is not None
        assert threads is not None

        def submit_and_wait() -> None:
            queue.set_version(self._next_version, getattr(self._sampler.engine, "version", None))
            if not queue.has(number):
                with self._timer.part("rollout"):
                    queue.submit(number, batch.prompts, None if self._copy is None else sample(batch.prompts))
            for later in range(number + 1, number + self._max_staleness + 1):
                if not queue.has(later):
                    queue.submit(later, self.data.peek(later))
            threads.grow(min(len(queue), MAX_THREADS if self._copy is None else 1))
            queue.wait(count)

        device = self._run.device
        with self._timer.part("wait_for_rollouts"):
            self._restore(queue)
            queue.expect(number)
            # An error on one rank ends the run on all.
            if self._copy is None:
                self._sampler.synced(submit_and_wait)
            else:
                # Wait for the batch first, so that timing does not decide its weights.
                raise_on_all_ranks(lambda: queue.wait(min(count, len(queue))), device)
                with queue.paused():
                    self._copy.fill()
                raise_on_all_ranks(submit_and_wait, device)
            groups = queue.take(number, count)
            self._next_version = queue.version + 1
            if self._copy is None:
                current = [
                    group
                    for group in groups
                    if all(found == queue.version for rollout in group.rollouts for found in sampled_versions(rollout))
                ]
                engine = ThreadEngine(self._sampler.engine)
                self._sampler.compare(current, self._sampling, engine=engine, prompts=batch.prompts)
        for place, group in enumerate(groups):
            group.group_id = self._run.global_rank + num_ranks() * place
        return groups

    def _sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """Sample entries of one batch, in a thread. Their random numbers depend on their places, not on timing."""
        number, attempt = entries[0].number, max(entry.attempt for entry in entries)
        sample_with: Sample = partial(
            self._sampler.sample_with,
            prompts=[entry.prompt for entry in entries],
            sampling=self._sampling,
            num_generations=self._num_generations,
            seed=("rollout", number, "again", attempt) if attempt else ("rollout", number),
            indices=[self._run.global_rank + num_ranks() * entry.place for entry in entries],
            **self._options,
        )
        return sample_with(ThreadEngine(self._sampler.engine)) if self._copy is None else self._copy.sample(sample_with)

    @property
    def version(self) -> int:
        """Version of the weights that are trained now."""
        assert self._queue is not None
        return self._queue.version

    def measure(self, groups: Sequence[RolloutGroup]) -> Staleness:
        """Staleness of the groups that are trained now."""
        assert self._queue is not None
        return self._queue.measure(groups)

    def mark_current(self, groups: Sequence[RolloutGroup]) -> None:
        """Label groups that bypassed the queue as sampled from the current weights."""
        assert self._queue is not None
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            rollout.weight_versions = version_of_all(rollout, self._queue.version)

    def close(self, *, at_once: bool = False) -> None:
        """End the threads. Finished groups are kept for a checkpoint or the next fit.

        Args:
            at_once: Wait at most `END_SECONDS` for running requests, even if they cannot be stopped.
        """
        queue, threads = self._queue, self._threads
        if queue is None or threads is None:
            return
        queue.close()
        if self._copy is None:
            self._sampler.close()  # aborts calls in flight
        if not threads.join(END_SECONDS if at_once or self._copy is None else None):
            rank_zero_warn("rollouts are still being sampled at the end of the run; they are dropped.")
        if self._state is None:
            self._state = queue.state_dict() | {"options": self._sampling_options()}
        self._queue = self._copy = self._threads = None

    # Checkpoints.

    def state_dict(self) -> dict[str, Any] | None:
        """State of this rank's queue, for a checkpoint; None if no fit has begun and nothing was restored."""
        if self._state is None and self._queue is not None:
            if self._copy is not None:  # groups in flight start again after a resume; these would be lost
                self._queue.finish_started()
            return self._queue.state_dict() | {"options": self._sampling_options()}
        return self._state

    def load_state_dicts(self, per_rank: Sequence[dict[str, Any] | None]) -> None:
        """Set the state that the next `take` restores. With another number of ranks, the saved groups are omitted.

        Args:
            per_rank: What `state_dict` returned on each rank that saved.
        """
        if len(per_rank) != num_ranks():
            log_left_out(per_rank, f"{len(per_rank)} ranks had queued them, this run has {num_ranks()}")
            return
        self._state = per_rank[self._run.global_rank]
        again = sum("rollouts" not in entry for state in per_rank if state is not None for entry in state["entries"])
        if again:
            rank_zero_info(
                f"{again} groups of rollouts were not finished when the checkpoint was saved: they start again."
            )

    def _sampling_options(self) -> dict[str, Any]:
        """What rollouts are sampled with, as plain values."""
        branching = None if self._branching is None else asdict(self._branching)
        options = {
            name: value
            for name, value in vars(self._run).get("_noted_options", {}).items()
            if is_allowed(name, ("tools", "environment_factory", "episodes", "seed"))
            and name not in ("episodes.tool_timeout", "episodes.tool_workers")
        }
        options |= {**asdict(self._sampling), "num_generations": self._num_generations, "branching": branching}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}

    def _restore(self, queue: RolloutQueue) -> None:
        state, self._state = self._state, None
        if state is None:
            return
        saved, options = state.get("options", {}), self._sampling_options()
        if changed := [name for name in saved if saved[name] != options.get(name)]:
            entries = [{**entry, "prompt": None} for entry in state["entries"]]  # as if they were other prompts
            state = {**state, "entries": entries}

        def join(prompt: Prompt, token_ids: list[int], rollouts: list[Rollout]) -> RolloutGroup:
            # The tokens may include an environment's observation.
            return self._sampler.group([replace(prompt.open(), token_ids=token_ids)], [rollouts], [0])[0]

        left_out = queue.load_state_dict(state, self.data.peek, join)
        if left_out:
            reason = f"{', '.join(changed)} changed" if changed else "their prompts have changed"
            rank_zero_info(f"{left_out} groups of rollouts sampled ahead are sampled again, because {reason}.")
        self._next_version = queue.version + 1


def log_left_out(per_rank: Sequence[dict[str, Any] | None], reason: str) -> None:
    """Log that the groups of a checkpoint are not restored, and why."""
    count = sum(len(state["entries"]) for state in per_rank if state is not None)
    if count:
        rank_zero_info(
            f"The checkpoint has {count} groups of rollouts that were sampled ahead. They are left out, because "
            f"{reason}. Prompts of the next batches are sampled again."
        )


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
    in_flight = declares(engine, "updates_in_flight")
    takes_threads = isinstance(engine, SyncedRolloutEngine) and declares(engine, "takes_prompt_indices")
    reason = None
    if not corrected:
        reason = "nothing corrects for older weights; set importance_sampling.mode, such as to 'token_truncate'"
    elif in_flight and not takes_threads:
        reason = f"engine is {name}, which lacks update_weights or takes_prompt_indices, to seed each prompt separately"
    elif not in_flight and not declares(engine, "samples_from_copies"):
        reason = (
            f"engine is {name}, which cannot sample while the policy is updated; use one that declares "
            "updates_in_flight (VLLMServerRolloutEngine) or samples_from_copies (HFRolloutEngine)"
        )
    elif not in_flight and type(precision) not in (Precision, MixedPrecision):
        reason = f"precision={precision.precision} sets a default dtype for all threads; use 32-true or a mixed one"
    elif not hasattr(getattr(module.trainer, "datamodule", None), "peek"):
        reason = "it needs to know the next prompts; pass a PromptDataModule as datamodule"
    if reason is not None:
        staleness = getattr(module, "max_staleness", None)
        raise ValueError(f"max_staleness is {staleness}, but {reason}. Or set max_staleness to 0.")


class Staleness(NamedTuple):
    """Staleness of the tokens in one rank's batch, as sums that can be combined across ranks.

    Attributes:
        tokens: Number of sampled tokens.
        total: Sum of their staleness.
        largest: Largest staleness.
        dropped: Groups dropped as stale since the previous batch.
    """

    tokens: int = 0
    total: int = 0
    largest: int = 0
    dropped: int = 0


def staleness_metrics(per_rank: Sequence[Staleness]) -> dict[str, float]:
    """Metrics over all ranks; empty if `per_rank` is."""
    if not per_rank:
        return {}
    tokens, total, largest, dropped = zip(*per_rank, strict=True)
    return {
        "rollout/staleness/mean": sum(total) / max(sum(tokens), 1),
        "rollout/staleness/max": float(max(largest)),
        "rollout/dropped_stale": float(sum(dropped)),
    }


def sampled_versions(rollout: Rollout) -> list[int]:
    """Version of each sampled token; tokens that were not sampled, such as tool output, have none."""
    versions = rollout.weight_versions or []
    mask = [1] * len(versions) if rollout.loss_mask is None else rollout.loss_mask
    return [version for version, bit in zip(versions, mask, strict=True) if bit and version != NOT_SAMPLED]


def version_of_all(rollout: Rollout, version: int) -> list[int]:
    """The `Rollout.weight_versions` of a rollout sampled from a single version."""
    mask = [1] * len(rollout.token_ids) if rollout.loss_mask is None else rollout.loss_mask
    return [version if bit else NOT_SAMPLED for bit in mask]


# What the threads sample with: an engine that takes weights in flight, or a copy of the policy.


class ThreadEngine:
    """An engine for sampling threads: without collective methods, and with a version for every token.

    Args:
        engine: An engine with a version.
    """

    takes_prompt_indices = True
    updates_in_flight = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.takes_limits = declares(engine, "takes_limits")

    @property
    def max_model_len(self) -> int | None:
        """The engine's limit, which it may learn later; None if it has none."""
        length: int | None = getattr(self._engine, "max_model_len", None)
        return length

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Do nothing: the main thread binds the engine."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Rollout]]:
        """Sample; tokens without a version get the engine's version before the call."""
        version = self._engine.version
        groups: list[list[Rollout]] = self._engine.generate(*args, **kwargs)
        for rollout in (rollout for group in groups for rollout in group):
            if rollout.weight_versions is None and version is not None:
                rollout.weight_versions = version_of_all(rollout, version)
        return groups


class PolicyCopy:
    """A frozen copy of a policy, and a copy of its engine that samples from it.

    Args:
        run: Has the policy, before it enters `shared_prefix`, which would apply to the copy too. If its weights are
            shards, each rank gets a whole copy.
        engine: The engine, which declares `samples_from_copies`.
        load_policy: Loads the initial policy, to make a whole copy if the policy's weights are shards.
    """

    def __init__(self, run: Run, engine: RolloutEngine, load_policy: Callable[[], Any]) -> None:
        self._run, self._device = run, run.device
        whole = frozen_copy(run.policy) if run.support.keeps_plain_weights else load_policy().requires_grad_(False)
        if is_fused(run.policy) and not is_fused(whole):
            fuse_layers(whole)
        self._policy = whole.to(self._device).eval()
        self._engine: RolloutEngine = copy.copy(engine)
        self._engine.bind(self._policy, copy.deepcopy(run.tokenizer))  # threads must not share a tokenizer
        self._filled: Any = None

    @torch.no_grad()
    def fill(self) -> None:
        """Copy the policy's weights. Collective; nothing may be sampled meanwhile."""
        if not is_fused(self._run.policy):  # fused layers may have been given up since
            unfuse_layers(self._policy)
        copied = dict(self._policy.named_parameters()) | dict(self._policy.named_buffers())
        for name, weight in self._run.support.named_weights(self._run.policy):
            copied[name].copy_(weight)
        if self._device.type == "cuda":
            self._filled = torch.cuda.current_stream().record_event()

    def sample(self, sample_with: Sample) -> list[RolloutGroup]:
        """Call a function with the engine, on a separate CUDA stream that waits for the weights."""
        if self._filled is None:
            return sample_with(self._engine)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            torch.cuda.current_stream().wait_event(self._filled)
            groups = sample_with(self._engine)
            torch.cuda.current_stream().synchronize()  # before the copy gets other weights
        return groups


class SamplingThreads:
    """Threads that sample until their queue is closed. Errors go to the queue.

    They do not keep the process alive.

    Args:
        queue: The queue.
        sample: Samples the entries that a thread has started; called by several threads at once.
        whole_batches: Whether a thread samples all prompts of a batch together.
    """

    def __init__(self, queue: RolloutQueue, sample: Sample, *, whole_batches: bool) -> None:
        self._queue, self._sample, self._whole_batches = queue, sample, whole_batches
        self._threads: list[threading.Thread] = []

    def grow(self, count: int) -> None:
        """Start threads until there are `count`."""
        while len(self._threads) < count:
            thread = threading.Thread(target=self._run, name=f"{NAME}-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the threads to end after the queue was closed.

        Args:
            seconds: Longest wait; as long as it takes if None.

        Returns:
            Whether all have ended.
        """
        end = None if seconds is None else time.monotonic() + seconds
        for thread in self._threads:
            thread.join(None if end is None else max(end - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while entries := self._queue.start(self._whole_batches):
            try:
                groups = self._sample(entries)
            except BaseException as error:
                self._queue.fail(entries, error)
            else:
                self._queue.finish(entries, groups)
                del groups
            del entries


# The queue between the threads that sample rollouts and the main thread that trains on them.


@dataclass(eq=False)
class QueuedGroup:
    """A prompt and, once it is sampled, its group.

    Attributes:
        number: Number of the prompt batch that it belongs to.
        place: Its index among this rank's prompts of that batch.
        prompt: The prompt.
        attempt: How often it was sampled before and dropped as stale.
        version: Version of the weights when sampling started; None before that.
        syncs: Number of weight syncs before sampling started.
        group: The rollouts; None until they are finished.
        has_run_versions: Whether token versions were translated from the engine's numbering to the run's.
        oldest_token: Version of the oldest sampled token; None while it is not known.
    """

    number: int
    place: int
    prompt: Prompt
    attempt: int = 0
    version: int | None = None
    syncs: int = 0
    group: RolloutGroup | None = None
    has_run_versions: bool = False
    oldest_token: int | None = None

    @property
    def oldest(self) -> int:
        """`oldest_token`, or the version at the start of sampling while that is not known."""
        return (self.version or 0) if self.oldest_token is None else self.oldest_token

    def settle(self) -> None:
        """Note that the token versions are in the run's numbering."""
        assert self.group is not None
        versions = (version for rollout in self.group.rollouts for version in sampled_versions(rollout))
        self.oldest_token, self.has_run_versions = min(versions, default=self.version), True


class RolloutQueue:
    """Prompts in submission order, each waiting, being sampled, or finished.

    The main thread submits prompts and takes groups; sampling threads call `start`, then `finish` or `fail`. Each
    prompt's group is taken exactly once, unless `expect` discards it. No group is taken whose oldest token is staler
    than `max_staleness`: `wait` lets groups overtake others only as long as all can still be taken in time.

    Args:
        max_staleness: Largest staleness of a token that may be trained.
        engine: Name of the rollout engine, for errors.

    Attributes:
        version: Version of the current weights.
    """

    def __init__(self, max_staleness: int, engine: str = "the rollout engine") -> None:
        self._max_staleness, self._engine = max_staleness, engine
        self._changed = threading.Condition()
        self._entries: list[QueuedGroup] = []
        self._sizes: dict[int, int] = {}
        """Number of prompts of each batch that was submitted but not yet taken."""
        self._versions: list[tuple[int, int]] = []
        """(engine's version, run's version) of each sync, in order."""
        self.version = 0
        self._syncs = self._running = self._dropped = 0
        self._is_paused = self._is_closed = False
        self._error: BaseException | None = None
        self._lost: SamplerLostError | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, number: int) -> bool:
        """Whether a batch was submitted but not yet taken."""
        return number in self._sizes

    # The main thread.

    def expect(self, number: int) -> None:
        """Forget batches that will not be trained next, and discard as many groups as they had prompts.

        Happens if an epoch ended early, or the data start over. Groups of those batches are discarded first. Batches
        that follow `number` without a gap stay, even more than `max_staleness` of them, as after a resume with a lower
        limit.
        """
        with self._changed:
            followers = itertools.takewhile(lambda batch: batch in self._sizes, itertools.count(number))
            others = set(self._sizes) - set(followers)
            self._sizes = {batch: size for batch, size in self._sizes.items() if batch not in others}
            surplus = len(self._entries) - sum(self._sizes.values())
            discarded = sorted(self._entries, key=lambda entry: entry.number not in others)[: max(surplus, 0)]
            self._remove(discarded)

    def submit(self, number: int, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup] | None = None) -> None:
        """Queue the prompts of a batch, together with their groups if those are already sampled."""
        with self._changed:
            self._sizes[number] = len(prompts)
            entries = [QueuedGroup(number, place, prompt) for place, prompt in enumerate(prompts)]
            for entry, group in zip(entries, groups or (), strict=groups is not None):
                entry.version, entry.group = self.version, group
            self._entries += entries
            self._changed.notify_all()

    def set_version(self, version: int, engine_version: int | None = None) -> None:
        """Record the version that the sampler now has; also ends the wait after a lost sampler.

        Args:
            version: The version in the run's numbering.
            engine_version: The same in the engine's numbering, which `Rollout.weight_versions` reports.
        """
        with self._changed:
            self.version, self._lost = version, None
            self._syncs += 1
            if engine_version is not None and self._versions[-1:] != [(engine_version, version)]:
                self._versions.append((engine_version, version))
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is sampled: waits for running groups and starts no others."""
        with self._changed:
            self._is_paused = True
        try:
            with self._changed:
                self._changed.wait_for(lambda: not self._running)
            yield
        finally:
            with self._changed:
                self._is_paused = False
                self._changed.notify_all()

    def wait(self, count: int) -> None:
        """Wait for `count` finished groups, and for running ones that could not be taken in time later.

        Later groups may overtake slow ones, but only while a later batch has room for these before they are too stale.
        Slow groups are never dropped, which would bias training towards short rollouts.

        Raises:
            BaseException: What a sampling thread raised.
            SamplerLostError: If the sampler lost its weights; send them again, then call `set_version`.
            RuntimeError: If fewer than `count` groups were submitted, or the engine reports token versions that are
                too old, or that it was never given.
        """
        with self._changed:
            if count > len(self._entries):
                raise RuntimeError(f"{count} groups are to be taken from a queue of {len(self._entries)}; submit more.")
            self._wait_for(lambda: self._is_ready(count))

    def finish_started(self) -> None:
        """Wait until all groups that may be sampled by now are finished.

        Raises:
            BaseException: What a sampling thread raised.
        """
        with self._changed:
            self._wait_for(lambda: not self._running and not self._waiting())

    def take(self, number: int, count: int) -> list[RolloutGroup]:
        """Remove and return finished groups for a batch, those with the oldest tokens first. Call `wait` before.

        Args:
            number: Number of the batch.
            count: How many groups.
        """
        with self._changed:
            taken = self._oldest_finished(count)
            self._remove(taken)
            self._sizes.pop(number, None)
        return [entry.group for entry in taken if entry.group is not None]

    def measure(self, groups: Sequence[RolloutGroup]) -> Staleness:
        """Staleness of the tokens of groups that are trained now; resets the count of dropped groups."""
        with self._changed:
            dropped, self._dropped = self._dropped, 0
            rollouts = (rollout for group in groups for rollout in group.rollouts)
            ages = [self.version - sampled for rollout in rollouts for sampled in sampled_versions(rollout)]
        return Staleness(len(ages), sum(ages), max(ages, default=0), dropped)

    def close(self) -> None:
        """Start no more sampling."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The threads.

    def start(self, whole_batch: bool) -> list[QueuedGroup]:
        """Wait until prompts may be sampled, and mark them as started.

        Args:
            whole_batch: Whether to start all waiting prompts of the first batch, or only one.

        Returns:
            The started entries; empty if the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_start())
            if self._is_closed:
                return []
            waiting = self._waiting()
            started = [entry for entry in waiting if entry.number == waiting[0].number] if whole_batch else waiting[:1]
            for entry in started:
                entry.version, entry.syncs = self.version, self._syncs
            self._running += 1
            return started

    def finish(self, entries: Sequence[QueuedGroup], groups: Sequence[RolloutGroup]) -> None:
        """Store the groups that were sampled for started entries."""
        with self._changed:
            self._running -= 1
            for entry, group in zip(entries, groups, strict=True):
                entry.group = group
            self._changed.notify_all()
        tick()

    def fail(self, entries: Sequence[QueuedGroup], error: BaseException) -> None:
        """Record an error for `wait` to raise. If the sampler was lost, the entries start again after the next sync."""
        with self._changed:
            self._running -= 1
            if isinstance(error, SamplerLostError):
                if any(entry.syncs == self._syncs for entry in entries):  # otherwise the weights were sent again since
                    self._lost = error
                for entry in entries:
                    entry.version = None
            else:
                self._error = error
            self._changed.notify_all()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """The queue as plain containers: finished groups without data columns, and which prompts are unfinished."""
        with self._changed:
            self._translate_versions()
            entries = []
            for entry in self._entries:
                saved: dict[str, Any] = {"number": entry.number, "place": entry.place, "attempt": entry.attempt}
                if entry.group is not None:
                    saved |= {
                        "version": entry.version,
                        "prompt": derive_seed(*entry.prompt.token_ids),
                        "prompt_ids": entry.group.prompt_ids,
                        "routed_experts": entry.group.routed_experts,
                        "rollouts": [
                            rollout_state(rollout) | {"weight_versions": self._run_versions(entry, rollout)}
                            for rollout in entry.group.rollouts
                        ],
                    }
                entries.append(saved)
            return {"version": self.version, "sizes": dict(self._sizes), "entries": entries}

    def load_state_dict(self, state: dict[str, Any], prompts: Callable[[int], Sequence[Prompt]], join: Join) -> int:
        """Restore a state. Unfinished groups, and those whose prompt has changed, are sampled again.

        Args:
            state: What `state_dict` returned.
            prompts: Returns this rank's prompts of a batch, by its number.
            join: Rebuilds a group.

        Returns:
            How many finished groups were omitted, because their prompt has changed.
        """
        with self._changed:
            self.version, self._sizes = state["version"], dict(state["sizes"])
            left_out = 0
            for saved in state["entries"]:
                number, place, found = saved["number"], saved["place"], prompts(saved["number"])
                is_same = place < len(found) and saved.get("prompt") == derive_seed(*found[place].token_ids)
                left_out += "rollouts" in saved and not is_same
                if place < len(found):
                    entry = QueuedGroup(number, place, found[place], saved["attempt"])
                    if is_same:
                        rollouts = [Rollout(**rollout) for rollout in saved["rollouts"]]
                        entry.version, entry.group = saved["version"], join(found[place], saved["prompt_ids"], rollouts)
                        entry.group.routed_experts = saved.get("routed_experts")
                        entry.settle()
                    self._entries.append(entry)
                elif number in self._sizes:  # the batch now has fewer prompts
                    self._sizes[number] -= 1
            self._changed.notify_all()
            return left_out

    # Called while holding the lock.

    def _wait_for(self, condition: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._error or self._lost or condition())
        if self._error or self._lost:
            raise self._error or self._lost  # type: ignore[misc]

    def _remove(self, entries: Sequence[QueuedGroup]) -> None:
        removed = set(entries)
        self._entries = [entry for entry in self._entries if entry not in removed]

    def _may_start(self) -> bool:
        return not (self._is_paused or self._lost or self._error) and bool(self._waiting())

    def _waiting(self) -> list[QueuedGroup]:
        """Entries that may be started: none that would be too stale when its batch is trained."""
        first_batches = sorted(self._sizes)[: self._max_staleness + 1]
        horizon = sum(self._sizes[number] for number in first_batches)
        return [entry for entry in self._entries[:horizon] if entry.version is None]

    def _oldest_finished(self, count: int) -> list[QueuedGroup]:
        finished = [entry for entry in self._entries if entry.group is not None]
        return sorted(finished, key=lambda entry: entry.oldest)[:count]

    def _is_ready(self, count: int) -> bool:
        self._translate_versions()
        self._drop_unusable()
        taken = set(self._oldest_finished(count))
        left = [entry for entry in self._entries if entry not in taken and entry.version is not None]
        return len(taken) == count and not self._must_wait(left)

    def _must_wait(self, left: Sequence[QueuedGroup]) -> bool:
        """Whether groups that are left for later batches, some still running, would become too stale before.

        Of those that must be taken until some batch, there may be no more than the batches until then have prompts.
        """
        later, room = [self._sizes[number] for number in sorted(self._sizes)[1:]], 0
        for ahead in range(self._max_staleness):
            due = [entry for entry in left if self.version + ahead - entry.oldest >= self._max_staleness]
            if len(due) > room and any(entry.group is None for entry in due):
                return True
            room += later[ahead] if ahead < len(later) else 0
        return False

    def _translate_versions(self) -> None:
        """Translate token versions of finished groups to the run's numbering.

        Groups with tokens of weights that were sent since the last `set_version` are left for later: what version those
        weights have is not known yet.
        """
        newest = self._versions[-1][0] if self._versions else None
        for entry in self._entries:
            if entry.group is None or entry.has_run_versions:
                continue
            found = [version for rollout in entry.group.rollouts for version in rollout.weight_versions or ()]
            if newest is None or max(found, default=newest) <= newest:
                for rollout in entry.group.rollouts:
                    rollout.weight_versions = self._run_versions(entry, rollout)
                entry.settle()

    def _run_versions(self, entry: QueuedGroup, rollout: Rollout) -> list[int]:
        """Token versions in the run's numbering; that at the start of sampling if the engine reports none."""
        if rollout.weight_versions is None:
            assert entry.version is not None
            return version_of_all(rollout, entry.version)
        if entry.has_run_versions or not self._versions:
            return rollout.weight_versions

        def run_version(found: int) -> int:
            place = bisect_right(self._versions, found, key=lambda pair: pair[0])
            return self._versions[max(place - 1, 0)][1]

        return [found if found == NOT_SAMPLED else run_version(found) for found in rollout.weight_versions]

    def _drop_unusable(self) -> None:
        """Replace groups that are too old by their prompts, to be sampled again, at the same place in the queue.

        For `wait`, during which no weights are sent: no token can have a version that is not known.
        """
        for place, entry in enumerate(self._entries):
            if entry.group is None:
                continue
            if not entry.has_run_versions:
                found = max(max(rollout.weight_versions or (0,)) for rollout in entry.group.rollouts)
                raise RuntimeError(
                    f"{self._engine} reports weight_versions up to {found}, but the newest weights that it was given "
                    f"are {self._versions[-1][0]}."
                )
            if self.version - entry.oldest <= self._max_staleness:
                continue
            self._dropped += 1
            if entry.attempt + 1 >= MAX_ATTEMPTS:
                raise RuntimeError(
                    f"{self._engine} sampled a prompt {MAX_ATTEMPTS} times from weights that are too old for "
                    f"max_staleness={self._max_staleness}: the last time from version {entry.oldest}, where version "
                    f"{entry.version} had been sent before; it does not take its weights, or reports wrong "
                    "weight_versions."
                )
            self._entries[place] = QueuedGroup(entry.number, entry.place, entry.prompt, entry.attempt + 1)
            self._changed.notify_all()
