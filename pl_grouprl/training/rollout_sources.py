"""Where rollouts are sampled while others are trained: at an engine that takes weights in flight, or from a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.rollout.engine import RolloutEngine, declares
from pl_grouprl.training.policy_copy import PolicyCopy
from pl_grouprl.training.rollout_queue import QueuedGroup, RolloutQueue, version_of_all
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler import Sampler
from pl_grouprl.types import Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import num_ranks, raise_on_all_ranks
from pl_grouprl.utilities.options import drop_none

MAX_THREADS = 128
"""Most groups that a rank has in flight at an engine that takes weights in flight."""

Ready = Callable[[], None]
"""Submits prompts and waits until the groups of the next batch are there."""


class RolloutSource(Protocol):
    """Samples in threads.

    Attributes:
        whole_batches: Whether the prompts of a batch are sampled together.
        max_threads: Most threads that sample.
        can_stop: Whether `stop` ends calls in flight.
    """

    whole_batches: bool
    max_threads: int
    can_stop: bool

    def refresh(self, count: int, ready: Ready) -> None:
        """Give it the policy's current weights, then call `ready`. Collective; an error on one rank ends all.

        Args:
            count: Groups that `ready` waits for.
            ready: Called again if the sampler was lost.
        """
        ...

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """Sample what a thread has started."""
        ...

    def sample_now(self, batch: PromptBatch) -> list[RolloutGroup] | None:
        """Sample a batch that was not submitted before, or None to have it submitted."""
        ...

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """Compare the sampler with the policy, once per run, by groups that have its current weights. Collective."""
        ...

    def finish(self) -> None:
        """Before a checkpoint, wait for what would be lost."""
        ...

    def stop(self) -> None:
        """At the end, give up calls in flight if that is possible."""
        ...


class InFlightSource:
    """An engine with `updates_in_flight`: a call for each group, while the weights go to it from the main thread.

    Args:
        run: The run.
        sampler: Has the engine.
        arguments: Of `Sampler.sample_with`, behind the prompts.
        options: Its keyword arguments.
    """

    whole_batches = False
    max_threads = MAX_THREADS
    can_stop = True

    def __init__(self, run: Run, sampler: Sampler, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        self._run, self._sampler = run, sampler
        self._engine = ThreadEngine(sampler.engine)
        self._arguments, self._options = arguments, options

    def refresh(self, count: int, ready: Ready) -> None:
        """See `RolloutSource.refresh`."""
        self._sampler.synced(ready)

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """See `RolloutSource.sample`."""
        return _sample(self._run, self._sampler, self._engine, entries, self._arguments, self._options)

    def sample_now(self, batch: PromptBatch) -> None:
        """See `RolloutSource.sample_now`."""

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """See `RolloutSource.check`."""
        self._sampler.compare(groups, self._arguments[0])

    def finish(self) -> None:
        """See `RolloutSource.finish`: what is in flight starts again after a resume."""

    def stop(self) -> None:
        """See `RolloutSource.stop`."""
        self._sampler.close()


class CopySource:
    """An engine with `samples_from_copies`: one thread samples batch by batch, from weights that change in between.

    Args:
        run: The run.
        sampler: Has the engine.
        queue: What the thread samples.
        arguments: Of `Sampler.sample_with`, behind the prompts.
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

    def refresh(self, count: int, ready: Ready) -> None:
        """See `RolloutSource.refresh`. Waits for the groups of this batch first, so that their weights are certain."""
        device = self._run.device
        raise_on_all_ranks(lambda: self._queue.wait(min(count, len(self._queue))), device)
        with self._queue.paused():
            self._copy.fill()
        raise_on_all_ranks(ready, device)

    def sample(self, entries: Sequence[QueuedGroup]) -> list[RolloutGroup]:
        """See `RolloutSource.sample`."""
        with self._copy.sampling() as engine:
            return _sample(self._run, self._sampler, engine, entries, self._arguments, self._options)

    def sample_now(self, batch: PromptBatch) -> list[RolloutGroup]:
        """See `RolloutSource.sample_now`. From the policy itself: the thread has nothing to do for this batch."""
        branching = drop_none(branching=self._options.get("branching"))
        return self._run.generate(batch.prompts, *self._arguments, seed=("rollout", batch.rollout_number), **branching)

    def check(self, groups: Sequence[RolloutGroup]) -> None:
        """See `RolloutSource.check`: a copy is the policy."""

    def finish(self) -> None:
        """See `RolloutSource.finish`."""
        self._queue.wait(len(self._queue))

    def stop(self) -> None:
        """See `RolloutSource.stop`."""


class ThreadEngine:
    """An engine as sampling threads see it: without its collective methods, and every token has a version.

    Args:
        engine: An engine with a version.
    """

    takes_prompt_indices = True

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.takes_limits = declares(engine, "takes_limits")

    @property
    def max_model_len(self) -> int | None:
        """The engine's."""
        length: int | None = getattr(self._engine, "max_model_len", None)
        return length

    def bind(self, model: Any, tokenizer: Any = None) -> None:
        """The main thread binds it."""

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Rollout]]:
        """Sample; tokens without a version have the one that the engine had before."""
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
