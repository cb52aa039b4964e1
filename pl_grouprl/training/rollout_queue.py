"""The queue between the threads that sample rollouts and the main thread that trains on them."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from pl_grouprl.sync.sampler import SamplerLostError
from pl_grouprl.training.queued_group import Join, QueuedGroup, restored_entry
from pl_grouprl.training.staleness import Staleness, measure_staleness, version_of_all
from pl_grouprl.types import NOT_SAMPLED, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.progress import tick

MAX_ATTEMPTS = 20
"""How often a prompt whose groups are always too old is sampled before the run ends."""


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
            return measure_staleness(groups, self.version, dropped)

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
            entries = [entry.state_dict(partial(self._run_versions, entry)) for entry in self._entries]
            return {"version": self.version, "sizes": dict(self._sizes), "entries": entries}

    def load_state_dict(self, state: dict[str, Any], prompts: Callable[[int], Sequence[Prompt]], join: Join) -> int:
        """Restore a state. Unfinished groups, and those whose prompt has changed, are sampled again.

        Args:
            state: What `state_dict` returned.
            prompts: Returns this rank's prompts of a batch, by its number.
            join: Rebuilds a group.

        Returns:
            How many finished groups were left out, because their prompt has changed.
        """
        with self._changed:
            self.version, self._sizes = state["version"], dict(state["sizes"])
            for saved in state["entries"]:
                found = prompts(saved["number"])
                if saved["place"] < len(found):
                    self._entries.append(restored_entry(saved, found[saved["place"]], join))
                elif saved["number"] in self._sizes:  # the batch now has fewer prompts
                    self._sizes[saved["number"]] -= 1
            self._changed.notify_all()
            restored = sum(entry.group is not None for entry in self._entries)
            return sum("rollouts" in saved for saved in state["entries"]) - restored

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
        self._refuse_unknown_versions()
        self._drop_stale()
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

    def _refuse_unknown_versions(self) -> None:
        """For `wait`, during which no weights are sent: no token can have a version that is not known."""
        for entry in self._entries:
            if entry.group is not None and not entry.has_run_versions:
                found = max(max(rollout.weight_versions or (0,)) for rollout in entry.group.rollouts)
                raise RuntimeError(
                    f"{self._engine} reports weight_versions up to {found}, but the newest weights that it was given "
                    f"are {self._versions[-1][0]}."
                )

    def _run_versions(self, entry: QueuedGroup, rollout: Rollout) -> list[int]:
        """Token versions in the run's numbering; that at the start of sampling if the engine reports none."""
        if rollout.weight_versions is None:
            assert entry.version is not None
            return version_of_all(rollout, entry.version)
        if entry.has_run_versions:
            return rollout.weight_versions
        return [self._run_version(version) for version in rollout.weight_versions]

    def _run_version(self, engine_version: int) -> int:
        if not self._versions or engine_version == NOT_SAMPLED:
            return engine_version
        place = bisect_right(self._versions, engine_version, key=lambda pair: pair[0])
        return self._versions[max(place - 1, 0)][1]

    def _drop_stale(self) -> None:
        """Replace groups that are too old by their prompts, to be sampled again, at the same place in the queue."""
        for place, entry in enumerate(self._entries):
            if entry.group is not None and self.version - entry.oldest > self._max_staleness:
                self._dropped += 1
                if entry.attempt + 1 >= MAX_ATTEMPTS:
                    raise RuntimeError(
                        f"{self._engine} sampled a prompt {MAX_ATTEMPTS} times from weights that are too old for "
                        f"max_staleness={self._max_staleness}: the last time from version {entry.oldest}, where "
                        f"version {entry.version} had been sent before; it does not take its weights, or reports wrong "
                        "weight_versions."
                    )
                again = QueuedGroup(entry.number, entry.place, entry.prompt, entry.attempt + 1)
                self._entries[place] = again
                self._changed.notify_all()
