"""Decides which rank of a run is lost, from the statuses that ranks publish and the local clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

_SILENCE_LIMIT = 300.0
"""Seconds without a sign of life after which a rank counts as frozen; `rank_timeout` if that is less."""

_FAILURE_LIMIT = 60.0
"""Seconds that the others have to end by themselves after a rank has failed or its process has ended."""


@dataclass(frozen=True)
class RankStatus:
    """What a rank publishes about itself.

    Attributes:
        rank: Its number.
        host: Name of its machine.
        pid: Its process.
        identity: Identifies the process; see `process_identity`.
        beat: Increases with each message.
        count: Increases with its progress.
        collectives: How many collectives it has entered, by process group.
        phase: What it is doing.
        step: Its optimizer step.
        state: `running`, `done`, `failed`, or `stopped` after the failure of another rank.
        error: What it failed with.
        verdict: Why it ends the run, if it does.
        lost: The ranks that it blames.
    """

    rank: int
    host: str
    pid: int
    identity: str
    beat: int = 0
    count: int = 0
    collectives: dict[str, int] = field(default_factory=dict)
    phase: str = "start"
    step: int = 0
    state: str = "running"
    error: str = ""
    verdict: str = ""
    lost: list[int] = field(default_factory=list)

    def describe(self) -> str:
        """Identify the rank and what it did last."""
        return f"rank {self.rank} (host {self.host}, pid {self.pid}; last seen in phase {self.phase}, step {self.step})"

    def is_ahead_of(self, other: RankStatus) -> bool:
        """Whether it has entered a collective that the other rank has not, and so waits for that rank."""
        return any(number > other.collectives.get(name, number) for name, number in self.collectives.items())


@dataclass
class _Seen:
    """A rank's latest status, and when it was last alive, began to keep others waiting, and failed."""

    status: RankStatus
    alive: float
    waited_for: float | None = None
    failed: float | None = None


class RankJudge:
    """Finds lost ranks. A slow rank that still makes progress is not lost, nor are ranks all in the same long phase.

    Args:
        rank_timeout: Seconds after which a rank that keeps others waiting, without progress, is lost. At most 300 for a
            rank without a sign of life, and at most 60 for one that has failed while others run.
    """

    def __init__(self, rank_timeout: float) -> None:
        self.rank_timeout = rank_timeout
        self.silence_limit = min(rank_timeout, _SILENCE_LIMIT)
        self._failure_limit = min(rank_timeout, _FAILURE_LIMIT)
        self._seen: dict[int, _Seen] = {}

    def record(self, statuses: Iterable[RankStatus], now: float) -> None:
        """Record the ranks' statuses and when they were read."""
        for status in statuses:
            seen = self._seen.setdefault(status.rank, _Seen(status, now))
            if status.beat != seen.status.beat:
                seen.alive = now
            if (status.count, status.collectives) != (seen.status.count, seen.status.collectives):
                seen.waited_for = None
            if status.state == "failed" and seen.failed is None:
                seen.failed = now
            seen.status = status
        running = self._running().values()
        for seen in running:
            if not any(other.status.is_ahead_of(seen.status) for other in running):
                seen.waited_for = None
            elif seen.waited_for is None:
                seen.waited_for = now

    def record_end(self, rank: int, now: float) -> None:
        """Record that a rank's process has ended."""
        seen = self._seen[rank]
        if seen.status.state == "running" and seen.failed is None:
            seen.failed = now

    def restart_clocks(self, now: float) -> None:
        """Restart all clocks after this process itself has slept."""
        for seen in self._seen.values():
            seen.alive = now
            seen.waited_for = None if seen.waited_for is None else now
            seen.failed = None if seen.failed is None else now

    def lost(self, now: float) -> dict[int, str]:
        """Find lost ranks.

        Args:
            now: When the statuses were last read.

        Returns:
            What is wrong, by rank. Only the most conclusive kind: failed ranks; if none, silent ones; if none, those
            that keep others waiting.
        """
        for find in (self._failed, self._silent, self._behind):
            found = find(now)
            if found:
                return found
        return {}

    def _failed(self, now: float) -> dict[int, str]:
        return {
            rank: f"failed with {seen.status.error}" if seen.status.error else "its process has ended"
            for rank, seen in self._seen.items()
            if seen.status.state in ("running", "failed")
            and seen.failed is not None
            and now - seen.failed >= self._failure_limit
        }

    def _silent(self, now: float) -> dict[int, str]:
        return {
            rank: f"frozen: no sign of life for {now - seen.alive:.0f} s"
            for rank, seen in self._running().items()
            if now - seen.alive >= self.silence_limit
        }

    def _behind(self, now: float) -> dict[int, str]:
        running = self._running()
        waited = {rank: now - seen.waited_for for rank, seen in running.items() if seen.waited_for is not None}
        late = {rank for rank, seconds in waited.items() if seconds >= self.rank_timeout}
        # A late rank that waits for another late one is not the cause.
        causes = {
            rank
            for rank in late
            if not any(running[rank].status.is_ahead_of(running[other].status) for other in late - {rank})
        }
        return {
            rank: f"hung: others have waited {waited[rank]:.0f} s for it, and it made no progress"
            for rank in causes or late
        }

    def _running(self) -> dict[int, _Seen]:
        return {rank: seen for rank, seen in self._seen.items() if seen.status.state == "running"}
