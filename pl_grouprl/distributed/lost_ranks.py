"""Ends a multi-rank run when one rank is lost, instead of letting the others wait for it.

About once a second, each rank publishes its status under its own key in the store that the process group was
created with, reads those of the others, and judges them by its own clock. `RankWatchdog` is the callback, `_Watch` its
thread, `RankJudge` the rules.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import distributed_c10d

from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import is_here, kill_process, process_identity
from pl_grouprl.utilities.progress import PROGRESS

LOST_RANK_EXIT_CODE = 70
"""Exit code of ranks that end because another one is lost."""

_SILENCE_LIMIT = 300.0
"""Seconds without a sign of life after which a rank counts as frozen; `rank_timeout` if that is less."""

_FAILURE_LIMIT = 60.0
"""Seconds that the others have to end by themselves after a rank has failed or its process has ended."""

_ENDING_LIMIT = 60.0
"""Seconds within which a rank ends once a rank has been declared lost."""

_watches = count()
"""Numbers the watches; all ranks start theirs in the same order."""


def check_rank_timeout(rank_timeout: float | None, argument: str = "rank_timeout") -> None:
    """Check that a timeout is positive, or None; the error names the caller's argument.

    Raises:
        ValueError: If it is not larger than 0.
    """
    valid = rank_timeout is None or rank_timeout > 0
    check_options({argument: (rank_timeout, valid, "larger than 0, or None to wait without limit")})


class RankWatchdog(Callback):
    """Ends all ranks with an error that names the lost one: frozen, hung, dead, or failed while the others wait.

    A thread on each rank publishes the rank's progress about once a second and checks the others. A rank is lost if

    - it gives no sign of life for `rank_timeout` seconds, or 300 if that is less: it was stopped (SIGSTOP), is
      thrashing, or runs C code that holds Python's lock;
    - others wait for it in a collective for `rank_timeout` seconds without progress on its side: an endless loop, a
      deadlock, a call that never returns. Decoding steps, reward calls and phases of a step count as progress;
    - it has failed, or its process has ended, and the others still wait after 60 seconds.

    The others then print its number, host, process and what it did last, and end with exit code 70, wherever their main
    thread waits; a lost rank on the same machine is killed. One whose threads still run prints where it hangs. Ranks
    that are slow, or all in the same long phase, are not lost; if the whole machine pauses, counting starts over.

    Does nothing on a single rank. Modules of this package add it themselves; see their option `guards.rank_timeout`.

    Args:
        rank_timeout: Seconds. It must exceed the time that other ranks ever wait while a rank loads a model, saves a
            checkpoint, or does anything else that does not count as progress. The default is below the 1800 seconds
            after which process groups time out without naming a rank.

    Raises:
        ValueError: If it is not larger than 0.
    """

    def __init__(self, rank_timeout: float = 1500.0) -> None:
        check_rank_timeout(rank_timeout)
        self.rank_timeout = rank_timeout
        self._watch: _Watch | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching if there are several ranks."""
        self._stop("stopped")  # of a run that never reached teardown
        if trainer.world_size > 1 and torch.distributed.is_initialized():
            PROGRESS.enter("setup")
            self._watch = _Watch(trainer.global_rank, trainer.world_size, self.rank_timeout)
            self._watch.start()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Tell the other ranks why this one ends, and print which rank failed first."""
        self._stop("failed", f"{type(exception).__name__}: {exception}"[:2000])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stop watching."""
        self._stop("done")

    def _stop(self, state: str, error: str = "") -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.stop(state, error)

    def on_train_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Record the step."""
        PROGRESS.step = trainer.global_step
        PROGRESS.enter("training batch")

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        """Record the step."""
        PROGRESS.step = trainer.global_step
        PROGRESS.enter("end of a training batch")

    def on_validation_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Record the phase."""
        PROGRESS.enter("validation")

    def on_test_batch_start(self, *args: Any, **kwargs: Any) -> None:
        """Record the phase."""
        PROGRESS.enter("test")

    def on_save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Record the phase."""
        PROGRESS.enter("saving a checkpoint")

    def on_load_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Record the phase."""
        PROGRESS.enter("loading a checkpoint")


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
            rank without a sign of life, and at most 60 for a failed rank while others run.
    """

    def __init__(self, rank_timeout: float) -> None:
        self.rank_timeout = rank_timeout
        self.silence_limit = min(rank_timeout, _SILENCE_LIMIT)
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
        limit = min(self.rank_timeout, _FAILURE_LIMIT)
        failed = {
            rank: f"failed with {seen.status.error}" if seen.status.error else "its process has ended"
            for rank, seen in self._seen.items()
            if seen.status.state in ("running", "failed") and seen.failed is not None and now - seen.failed >= limit
        }
        running = self._running()
        silent = {
            rank: f"frozen: no sign of life for {now - seen.alive:.0f} s"
            for rank, seen in running.items()
            if now - seen.alive >= self.silence_limit
        }
        if failed or silent:
            return failed or silent
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


def entered_collectives() -> dict[str, int]:
    """Number of collectives this rank has entered, by process group; a group's members enter them in the same order."""
    world: Any = distributed_c10d._world
    counts = {}
    for group, name in list(world.pg_names.items()):
        members = sorted(world.pg_group_ranks.get(group, ()))
        try:
            counts[f"{name}:{members[0]}-{members[-1]}/{len(members)}"] = group._get_sequence_number_for_group()
        except (RuntimeError, IndexError):  # a backend that does not count, a group without members
            continue
    return counts


class _Watch(threading.Thread):
    """Watches the ranks, and ends this process if one is lost."""

    def __init__(self, rank: int, num_ranks: int, rank_timeout: float) -> None:
        super().__init__(name="rank-watchdog", daemon=True)
        self.interval = min(max(1.0, num_ranks / 16), rank_timeout / 8)
        self._num_ranks, self._judge = num_ranks, RankJudge(rank_timeout)
        self._own = RankStatus(rank, socket.gethostname(), os.getpid(), process_identity(os.getpid()))
        self._statuses: list[RankStatus] = []
        self._contact = time.monotonic()  # when they were read
        self._beats = count(1)
        self._stopped = threading.Event()
        self._exchanging = threading.Lock()
        self._number = next(_watches)
        self._store: Any = None
        of_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self._store_rank = None if of_agent else 0
        store: Any = distributed_c10d._get_default_store()
        self._base: Any = getattr(store, "_underlying_non_prefix_store", store)
        place = f"{getattr(self._base, 'host', '?')}:{getattr(self._base, 'port', '?')}"
        self._store_name = f"the store of {'torchrun' if of_agent else 'rank 0'} at {place}"
        if not entered_collectives():
            rank_zero_warn(
                "the process groups do not count their collectives, so hung ranks cannot be detected, only frozen ones."
            )

    def start(self) -> None:
        """Start once each rank knows the others' processes, so it can name and kill one that is lost early."""
        deadline = time.monotonic() + 10 * self.interval
        while len(self._statuses) < self._num_ranks and time.monotonic() < deadline:
            _within(deadline - time.monotonic(), self._exchange)
            time.sleep(self.interval / 10)
        super().start()

    def run(self) -> None:
        """Exchange statuses and check the ranks until the run ends."""
        last = time.monotonic()
        while not self._stopped.wait(self.interval):
            if not self._exchanging.locked():  # else the store is slow, frozen or gone
                _within(self.interval, self._exchange)
            now = time.monotonic()
            self._judge.record(self._statuses, self._contact)
            if now - last > 2 * self.interval + max(2.0, self._judge.silence_limit / 10):
                self._judge.restart_clocks(now)  # this process itself has slept
                self._contact = now
            last = now
            self._check(now)

    def stop(self, state: str, error: str) -> None:
        """Publish how this rank ended, and stop watching. Called by the main thread."""
        _within(2.0, self._exchange)
        if any(status.verdict for status in (self._own, *self._others())):
            self.join(_ENDING_LIMIT)  # the thread ends the process; an error here follows from another rank's end
        first = [other for other in self._others() if other.state == "failed" and state == "failed"]
        self._own = replace(self._own, state="stopped" if first else state, error=error)
        _within(2.0, self._exchange)
        for other in first:
            _say(f"{other.describe()} failed first, with {other.error}. {self._status().describe()} ends, too.")
        if self._store_rank == self._own.rank:  # the store ends with this process, so let the others read this first
            deadline = time.monotonic() + 5
            while time.monotonic() < deadline and any(other.state == "running" for other in self._others()):
                time.sleep(0.05)
                _within(1.0, self._exchange)
        self._stopped.set()
        self.join(2.0)

    def _exchange(self) -> None:
        """Publish this rank's status, and read those of all that have published.

        Blocks while the process that holds the store is frozen; does nothing once it is gone.
        """
        with (
            self._exchanging,
            contextlib.suppress(RuntimeError, ValueError),
        ):  # torch's network errors are RuntimeErrors
            if self._store is None:
                connection = self._base.clone()  # a second one: the main thread may be waiting on the first
                connection.set_timeout(timedelta(seconds=60))
                self._store = torch.distributed.PrefixStore(f"pl_grouprl/ranks/{self._number}", connection)
            self._store.set(str(self._own.rank), json.dumps(asdict(self._status())))
            known = {status.rank for status in self._statuses}
            known |= {rank for rank in range(self._num_ranks) if rank not in known and self._store.check([str(rank)])}
            answers = self._store.multi_get([str(rank) for rank in sorted(known)])
            self._statuses = [RankStatus(**json.loads(answer)) for answer in answers]
            self._contact = time.monotonic()

    def _check(self, now: float) -> None:
        """End the run if another rank ends it, a rank is lost, or the store no longer answers."""
        others = self._others()
        for other in others:
            if is_here(other.identity) and process_identity(other.pid) != other.identity:
                self._judge.record_end(other.rank, now)
        verdicts = [(other.verdict, other.lost) for other in others if other.verdict]
        silence = now - self._contact
        if verdicts:
            self._end_run(*verdicts[0])
        elif silence >= self._judge.silence_limit:
            reason = f"{self._store_name} has not answered for {silence:.0f} s"
            holder = [other for other in others if other.rank == self._store_rank]
            if not holder:
                self._end_run(f"{reason}, which is frozen or gone", [])
            elif holder[0].state != "done":
                self._end_run(f"{holder[0].describe()} is lost: frozen or gone, {reason}", [holder[0].rank])
        elif lost := self._judge.lost(self._contact):
            names = {status.rank: status.describe() for status in self._statuses}
            self._end_run("; ".join(f"{names[rank]} is lost: {lost[rank]}" for rank in lost), list(lost))

    def _end_run(self, verdict: str, lost: list[int]) -> None:
        """End this process, even if its main thread is blocked. Its workers and servers notice and end too."""
        self._own = replace(self._own, verdict=verdict, lost=lost)
        _say(
            f"{verdict}. {self._status().describe()} ends with exit code {LOST_RANK_EXIT_CODE}; resume from the latest "
            f"checkpoint. If nothing was wrong, raise guards.rank_timeout (it is {self._judge.rank_timeout:g} s)."
        )
        if self._own.rank in lost:
            faulthandler.dump_traceback(2)
        # Let the others read the verdict, lost ranks two intervals, so their errors do not hide it.
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < min(10 * self.interval, _ENDING_LIMIT / 2):
            if not self._exchanging.locked():
                _within(self.interval, self._exchange)
            time.sleep(self.interval / 2)
            unaware = {other.rank for other in self._others() if other.state == "running" and not other.verdict}
            if waited > 2 * self.interval and unaware <= set(lost):
                break
        for other in self._others():
            if other.rank in lost and kill_process(other.pid, other.identity):
                _say(f"rank {other.rank} (pid {other.pid}) was killed.")
        for stream in (sys.stdout, sys.stderr):
            _within(1.0, stream.flush)
        os._exit(LOST_RANK_EXIT_CODE)

    def _others(self) -> list[RankStatus]:
        return [status for status in self._statuses if status.rank != self._own.rank]

    def _status(self) -> RankStatus:
        return replace(
            self._own,
            beat=next(self._beats),
            count=PROGRESS.count,
            collectives=entered_collectives(),
            phase=PROGRESS.phase,
            step=PROGRESS.step,
        )


def _say(text: str) -> None:
    """Write to file descriptor 2 directly; the main thread may hold the lock of `sys.stderr`."""
    _within(5.0, lambda: os.write(2, f"\n[rank watchdog] {text}\n".encode()))


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Run an action that may block; wait at most this long for it."""

    def run() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(max(seconds, 0.0))
