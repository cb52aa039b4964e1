"""Groups of rollouts between the threads that sample them and the updates that train them.

Weights have a version: the number of batches of rollouts that were trained before. The staleness of a token is the
version that is trained next less the version that it was sampled from.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pl_grouprl.sync.sampler import SamplerLostError
from pl_grouprl.training.distribution import rollout_state
from pl_grouprl.types import NOT_SAMPLED, Prompt, Rollout, RolloutGroup
from pl_grouprl.utilities.distributed import derive_seed
from pl_grouprl.utilities.progress import tick

Join = Callable[[Prompt, list[int], list[Rollout]], RolloutGroup]
"""(prompt, tokens that it was sampled with, its rollouts) -> their group."""


@dataclass(eq=False)
class QueuedGroup:
    """A prompt and, once it is sampled, its group.

    Attributes:
        number: The batch of prompts that it belongs to.
        place: Its place among this rank's prompts of that batch.
        prompt: The prompt.
        attempt: How many times it was sampled and dropped before.
        version: Of the weights when its sampling started; None while it waits for that.
        syncs: Syncs of the weights until then.
        group: The group, once it is sampled.
        is_settled: Whether the versions of its tokens are the run's, not the engine's.
    """

    number: int
    place: int
    prompt: Prompt
    attempt: int = 0
    version: int | None = None
    syncs: int = 0
    group: RolloutGroup | None = None
    is_settled: bool = False

    def versions(self) -> list[int]:
        """The version of each sampled token; if none was sampled, that of the start."""
        assert self.group is not None
        found = [version for rollout in self.group.rollouts for version in sampled_versions(rollout)]
        return found or [self.version or 0]


@dataclass
class Staleness:
    """Staleness of the sampled tokens that a rank has taken, as sums that ranks can exchange."""

    tokens: int = 0
    total: int = 0
    largest: int = 0
    dropped: int = 0


def staleness_metrics(per_rank: Sequence[Staleness]) -> dict[str, float]:
    """Metrics over all ranks; none without ranks."""
    if not per_rank:
        return {}
    tokens, total = sum(one.tokens for one in per_rank), sum(one.total for one in per_rank)
    return {
        "rollout/staleness/mean": total / max(tokens, 1),
        "rollout/staleness/max": float(max(one.largest for one in per_rank)),
        "rollout/dropped_stale": float(sum(one.dropped for one in per_rank)),
    }


class RolloutQueue:
    """Groups in the order in which their prompts were submitted: waiting, being sampled, or sampled.

    One thread, the main one, submits and takes; others `start` and `finish`. What is submitted is taken exactly once.
    A group whose oldest token is more than `max_staleness` old is not taken but sampled again.

    Args:
        max_staleness: Largest staleness of a token that may be trained.

    Attributes:
        version: Version of the current weights.
    """

    def __init__(self, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._changed = threading.Condition()
        self._entries: list[QueuedGroup] = []
        self._sizes: dict[int, int] = {}
        """Prompts of each batch that is submitted and not yet trained."""
        self._versions: list[tuple[int, int]] = []
        """The engine's version and ours of each sync."""
        self.version = 0
        self._syncs = self._running = self._dropped = 0
        self._is_paused = self._is_closed = False
        self._error: BaseException | None = None
        self._lost: SamplerLostError | None = None

    def __len__(self) -> int:
        return len(self._entries)

    def has(self, number: int) -> bool:
        """Whether the prompts of a batch are submitted, and the batch is not trained yet."""
        return number in self._sizes

    # The main thread.

    def expect(self, number: int) -> None:
        """Discard as many groups as belong to batches that do not follow: an epoch ended early, or data start over."""
        with self._changed:
            others = {at for at in self._sizes if not number <= at <= number + self._max_staleness}
            self._sizes = {at: size for at, size in self._sizes.items() if at not in others}
            surplus = len(self._entries) - sum(self._sizes.values())
            discarded = sorted(self._entries, key=lambda entry: entry.number not in others)[: max(surplus, 0)]
            self._entries = [entry for entry in self._entries if entry not in discarded]

    def submit(self, number: int, prompts: Sequence[Prompt], groups: Sequence[RolloutGroup] | None = None) -> None:
        """Queue the prompts of a batch, with their groups if they have just been sampled."""
        with self._changed:
            self._sizes[number] = len(prompts)
            entries = [QueuedGroup(number, place, prompt) for place, prompt in enumerate(prompts)]
            for entry, group in zip(entries, groups or (), strict=groups is not None):
                entry.version, entry.group = self.version, group
            self._entries += entries
            self._changed.notify_all()

    def set_version(self, version: int, engine_version: int | None = None) -> None:
        """Tell that the weights are in place from which groups are sampled from now on.

        Args:
            version: Their version.
            engine_version: The engine's number of it, which it reports in `Rollout.weight_versions`.
        """
        with self._changed:
            self.version, self._lost = version, None
            self._syncs += 1
            if engine_version is not None and self._versions[-1:] != [(engine_version, version)]:
                self._versions.append((engine_version, version))
            self._changed.notify_all()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Context in which nothing is sampled; waits for what is being sampled."""
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
        """Wait until `take` can take so many groups.

        That includes every group that would be too old for the next batch. None is dropped for being slow, which would
        favour short rollouts; a slow one is overtaken for as long as its tokens may still be trained.

        Raises:
            BaseException: What a sampling thread raised.
            SamplerLostError: If the sampler has lost its weights; they must be sent again, then `set_version`.
            RuntimeError: If fewer are submitted.
        """
        with self._changed:
            if count > len(self._entries):
                raise RuntimeError(f"{count} groups are to be taken from a queue of {len(self._entries)}; submit more.")
            self._changed.wait_for(lambda: self._error or self._lost or self._is_ready(count))
            if self._error or self._lost:
                raise self._error or self._lost  # type: ignore[misc]

    def take(self, number: int, count: int) -> tuple[list[RolloutGroup], Staleness]:
        """Take finished groups as those of a batch, the ones with the oldest tokens first; `wait` comes before.

        Args:
            number: The batch.
            count: How many.
        """
        with self._changed:
            finished = [entry for entry in self._entries if entry.group is not None]
            taken = sorted(finished, key=lambda entry: min(entry.versions()))[:count]
            self._entries = [entry for entry in self._entries if entry not in taken]
            self._sizes.pop(number, None)
            staleness = self._measure(taken)
            self._dropped = 0
        return [entry.group for entry in taken if entry.group is not None], staleness

    def close(self) -> None:
        """Start nothing any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    # The threads.

    def start(self, whole_batch: bool) -> list[QueuedGroup]:
        """Wait for prompts to sample, then mark them as started.

        Args:
            whole_batch: Return all that wait of the first batch, otherwise one.

        Returns:
            Them; none if the queue is closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self._may_start())
            if self._is_closed:
                return []
            waiting = [entry for entry in self._entries if entry.version is None]
            started = [entry for entry in waiting if entry.number == waiting[0].number] if whole_batch else waiting[:1]
            for entry in started:
                entry.version, entry.syncs = self.version, self._syncs
            self._running += 1
            return started

    def finish(self, entries: Sequence[QueuedGroup], groups: Sequence[RolloutGroup]) -> None:
        """Put in the groups of what was started."""
        with self._changed:
            self._running -= 1
            for entry, group in zip(entries, groups, strict=True):
                entry.group = group
            self._changed.notify_all()
        tick()

    def fail(self, entries: Sequence[QueuedGroup], error: BaseException) -> None:
        """End the run with an error; or, if the sampler was lost, wait for the next sync and start again."""
        with self._changed:
            self._running -= 1
            if isinstance(error, SamplerLostError):
                if any(entry.syncs == self._syncs for entry in entries):  # else the weights were sent again since
                    self._lost = error
                for entry in entries:
                    entry.version = None
            else:
                self._error = error
            self._changed.notify_all()

    # Checkpoints.

    def state_dict(self) -> dict[str, Any]:
        """Plain containers: what was sampled, without columns, and which prompts were not."""
        with self._changed:
            self._settle()
            return {"version": self.version, "sizes": dict(self._sizes), "entries": list(map(_state, self._entries))}

    def load_state_dict(self, state: dict[str, Any], prompts: Callable[[int], Sequence[Prompt]], join: Join) -> None:
        """Restore a state. What was not sampled, or with other prompts, is sampled again.

        Args:
            state: What `state_dict` returned.
            prompts: This rank's prompts of a batch.
            join: Makes a group of a prompt and its rollouts.
        """
        with self._changed:
            self.version, self._sizes = state["version"], dict(state["sizes"])
            for saved in state["entries"]:
                found = prompts(saved["number"])
                if saved["place"] < len(found):
                    self._entries.append(_restored(saved, found[saved["place"]], join))
                elif saved["number"] in self._sizes:  # the batch has fewer prompts now
                    self._sizes[saved["number"]] -= 1
            self._changed.notify_all()

    # Under the lock.

    def _may_start(self) -> bool:
        blocked = self._is_paused or self._lost or self._error
        return not blocked and any(entry.version is None for entry in self._entries)

    def _is_ready(self, count: int) -> bool:
        self._settle()
        self._drop_stale()
        running = [entry for entry in self._entries if entry.version is not None and entry.group is None]
        finished = sum(entry.group is not None for entry in self._entries)
        return finished >= count and not any(self._is_due(entry) for entry in running)

    def _is_due(self, entry: QueuedGroup) -> bool:
        """Whether its tokens would be too old for the next batch."""
        assert entry.version is not None
        return self.version - entry.version >= self._max_staleness

    def _settle(self) -> None:
        """Number the versions of sampled tokens as ours, by the syncs so far; without any, they have the start's."""
        for entry in self._entries:
            if entry.group is None or entry.is_settled:
                continue
            for rollout in entry.group.rollouts:
                if rollout.weight_versions is None:
                    assert entry.version is not None
                    rollout.weight_versions = version_of_all(rollout, entry.version)
                else:
                    rollout.weight_versions = list(map(self._own_version, rollout.weight_versions))
            entry.is_settled = True

    def _own_version(self, engine_version: int) -> int:
        if not self._versions or engine_version == NOT_SAMPLED:
            return engine_version
        place = bisect_right(self._versions, engine_version, key=lambda pair: pair[0])
        return self._versions[max(place - 1, 0)][1]

    def _drop_stale(self) -> None:
        """Queue the prompts of groups that are too old again, before others, so that as many groups come as before."""
        for place, entry in enumerate(self._entries):
            if entry.group is not None and self.version - min(entry.versions()) > self._max_staleness:
                self._dropped += 1
                again = QueuedGroup(entry.number, entry.place, entry.prompt, entry.attempt + 1)
                self._entries[place] = again
                self._changed.notify_all()

    def _measure(self, taken: Sequence[QueuedGroup]) -> Staleness:
        ages = [
            self.version - version
            for entry in taken
            if entry.group is not None
            for rollout in entry.group.rollouts
            for version in sampled_versions(rollout)
        ]
        return Staleness(len(ages), sum(ages), max(ages, default=0), self._dropped)


def sampled_versions(rollout: Rollout) -> list[int]:
    """The version of each token that the model wrote."""
    versions = rollout.weight_versions or []
    mask = [1] * len(versions) if rollout.loss_mask is None else rollout.loss_mask
    return [version for version, bit in zip(versions, mask, strict=True) if bit and version != NOT_SAMPLED]


def version_of_all(rollout: Rollout, version: int) -> list[int]:
    """`Rollout.weight_versions` of a rollout whose tokens all come from one version."""
    mask = [1] * len(rollout.token_ids) if rollout.loss_mask is None else rollout.loss_mask
    return [version if bit else NOT_SAMPLED for bit in mask]


def _state(entry: QueuedGroup) -> dict[str, Any]:
    plain = {"number": entry.number, "place": entry.place, "attempt": entry.attempt}
    if entry.group is None:
        return plain
    return plain | {
        "version": entry.version,
        "prompt": derive_seed(*entry.prompt.token_ids),
        "prompt_ids": entry.group.prompt_ids,
        "rollouts": [rollout_state(rollout) for rollout in entry.group.rollouts],
    }


def _restored(saved: dict[str, Any], prompt: Prompt, join: Join) -> QueuedGroup:
    entry = QueuedGroup(saved["number"], saved["place"], prompt, saved["attempt"])
    if saved.get("prompt") != derive_seed(*prompt.token_ids):
        return entry
    rollouts = [Rollout(**rollout) for rollout in saved["rollouts"]]
    group = join(prompt, saved["prompt_ids"], rollouts)
    return replace(entry, version=saved["version"], group=group, is_settled=True)
