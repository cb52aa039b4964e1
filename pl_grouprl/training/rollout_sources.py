"""Sources of rollouts that are sampled while others are trained: an engine that takes weights in flight, or a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.rollout.engine import RolloutEngine, declares
from pl_grouprl.training.policy_copy import PolicyCopy
from pl_grouprl.training.queued_group import QueuedGroup
from pl_grouprl.training.rollout_queue import RolloutQueue
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.training.staleness import version_of_all
from pl_grouprl.types import Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import num_ranks, raise_on_all_ranks
from pl_grouprl.utilities.options import drop_none

MAX_THREADS = 128
"""Most groups that a rank samples at a time with an `InFlightSource`."""

SubmitAndWait = Callable[[], None]
"""Submits prompts, and waits until the groups of the next batch are finished."""


class RolloutSource(Protocol):
    """Samples for the sampling threads.

    Attributes:
        whole_batches: Whether the prompts of a batch are sampled together.
        max_threads: Most threads that sample.
        can_stop: Whether `stop` ends calls in flight.
    """

    whole_batches: bool
    max_threads: int
    can_stop: bool

    def refresh(self, count: int, submit_and_wait: SubmitAndWait) -> None:
        """Take the policy's current weights, then call `submit_and_wait`. Collective.

        An error on one rank ends the run on all.

        Args:
            count: Number of groups that `submit_and_wait` waits for.
            submit_and_wait: Called again if the sampler was lost.
        """
        ...

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """Sample the entries that a thread has started."""
        ...

    def sample_now(self, batch: PromptBatch) -> list[RolloutGroup] | None:
        """Sample a batch that was not submitted ahead; None leaves it to the threads."""
        ...

    def check(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> None:
        """Compare the sampler with the policy, once per run. Collective.

        Args:
            groups: Groups from its current weights.
            prompts: This rank's prompts. If the groups have no tokens, rank 0 samples one for the comparison.
        """
        ...

    def finish(self) -> None:
        """Before a checkpoint, wait for groups that it would lose."""
        ...

    def stop(self) -> None:
        """At the end, abort calls in flight if `can_stop`."""
        ...


class InFlightSource:
    """Samples with an engine that declares `updates_in_flight`, a call per group, while the main thread sends weights.

    Args:
        run: The run.
        sampler: Has the engine.
        arguments: Arguments of `Sampler.sample_with` after the prompts.
        options: Its keyword arguments.
    """

    whole_batches = False
    max_threads = MAX_THREADS
    can_stop = True

    def __init__(self, run: Run, sampler: Sampler, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._run, self._sampler = run, sampler
        self._engine = ThreadEngine(sampler.engine)
        self._arguments, self._options = arguments, options

    def refresh(self, count: int, submit_and_wait: SubmitAndWait) -> None:
        """See `RolloutSource.refresh`."""
        self._sampler.synced(submit_and_wait)

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """See `RolloutSource.sample`."""
        return _sample(self._run, self._sampler, self._engine, entries, self._arguments, self._options)

    def sample_now(self, batch: PromptBatch) -> None:
        """See `RolloutSource.sample_now`."""

    def check(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> None:
        """See `RolloutSource.check`."""
        self._sampler.compare(self._engine, groups, self._arguments[0], prompts)

    def finish(self) -> None:
        """See `RolloutSource.finish`. Does not wait: groups in flight start again after a resume."""

    def stop(self) -> None:
        """See `RolloutSource.stop`."""
        self._sampler.close()


class CopySource:
    """Samples from a copy of the policy, with an engine that declares `samples_from_copies`.

    One thread samples batch by batch; the weights change in between.

    Args:
        run: The run.
        sampler: Has the engine.
        queue: The queue whose prompts the thread samples.
        arguments: Arguments of `Sampler.sample_with` after the prompts.
        options: Its keyword arguments.
        load: Loads the initial policy; see `PolicyCopy`.
    """

    whole_batches = True
    max_threads = 1
    can_stop = False

    def __init__(
        self,
        run: Run,
        sampler: Sampler,
        queue: RolloutQueue,
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
        load: Callable[[], Any],
    ) -> None:
        self._run, self._sampler, self._queue = run, sampler, queue
        self._copy = PolicyCopy(run, sampler.engine, load)
        self._arguments, self._options = arguments, options

    def refresh(self, count: int, submit_and_wait: SubmitAndWait) -> None:
        """See `RolloutSource.refresh`. First waits for the batch, so that timing does not decide its weights."""
        device = self._run.device
        raise_on_all_ranks(lambda: self._queue.wait(min(count, len(self._queue))), device)
        with self._queue.paused():
            self._copy.fill()
        raise_on_all_ranks(submit_and_wait, device)

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """See `RolloutSource.sample`."""
        with self._copy.sampling() as engine:
            return _sample(self._run, self._sampler, engine, entries, self._arguments, self._options)

    def sample_now(self, batch: PromptBatch) -> list[RolloutGroup]:
        """See `RolloutSource.sample_now`. Samples from the policy itself, on the main thread."""
        branching = drop_none(branching=self._options.get("branching"))
        return self._run.generate(batch.prompts, *self._arguments, seed=("rollout", batch.rollout_number), **branching)

    def check(self, groups: Sequence[RolloutGroup], prompts: Sequence[Prompt]) -> None:
        """See `RolloutSource.check`. Does nothing: a copy equals the policy."""

    def finish(self) -> None:
        """See `RolloutSource.finish`."""
        self._queue.finish_started()

    def stop(self) -> None:
        """See `RolloutSource.stop`."""


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
        """The engine's limit; None if it has none."""
        length: int | None = getattr(self._engine, "max_model_len", None)
        return length

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """Do nothing: the main thread binds the engine."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Rollout]]:
        """Sample; tokens without a version get the one that the engine had before the call."""
        version = self._engine.version
        groups: list[list[Rollout]] = self._engine.generate(*args, **kwargs)
        for rollout in (rollout for group in groups for rollout in group):
            if rollout.weight_versions is None and version is not None:
                rollout.weight_versions = version_of_all(rollout, version)
        return groups


def _sample(
    run: Run,
    sampler: Sampler,
    engine: RolloutEngine,
    entries: Sequence[QueuedGroup],
    arguments: tuple[Any, ...],
    options: Mapping[str, Any],
) -> list[RolloutGroup]:
    """Sample entries of one batch. Their random numbers depend on batch, place and attempt, not on timing."""
    number, attempt = entries[0].number, max(entry.attempt for entry in entries)
    return sampler.sample_with(
        engine,
        [entry.prompt for entry in entries],
        *arguments,
        seed=("rollout", number, "again", attempt) if attempt else ("rollout", number),
        indices=[run.global_rank + num_ranks() * entry.place for entry in entries],
        **options,
    )
