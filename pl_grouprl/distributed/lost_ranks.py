"""Ends a multi-rank run when one rank is lost, instead of letting the others wait for it."""

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

from pl_grouprl.utilities.options import check_options, checked_arguments
from pl_grouprl.utilities.processes import is_here, kill_process, process_identity
from pl_grouprl.utilities.progress import PROGRESS

# Decides which rank of a run is lost, from the statuses that ranks publish and the local clock.

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


# Exchanges the ranks' status through the store that their process group was created with.

_CALL_LIMIT = timedelta(seconds=60)


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


class RankLink(threading.Thread):
    """Publishes this rank's status and reads those of the others, about once a second.

    A call to the store may block if the process that holds it is frozen, so this thread does nothing else. It ends if
    the store fails, because that process is then gone.

    Args:
        describe: Returns this rank's current status.
        num_ranks: Number of ranks.
        name: Name of the exchange, the same on all ranks and new each time.
        interval: Seconds between two exchanges.

    Attributes:
        statuses: Latest statuses of all ranks that have published.
        contact: When they were read, by the monotonic clock.
    """

    def __init__(self, describe: Callable[[], RankStatus], num_ranks: int, name: str, interval: float) -> None:
        super().__init__(name="rank-link", daemon=True)
        self._describe = describe
        self._name, self._num_ranks, self._interval = name, num_ranks, interval
        self._wake = threading.Condition()
        self._requested = self._done = 0
        self._ended = False
        self.statuses: list[RankStatus] = []
        self.contact = time.monotonic()
        store: Any = distributed_c10d._get_default_store()
        self._store: Any = getattr(store, "_underlying_non_prefix_store", store)

    @property
    def store_name(self) -> str:
        """The store's address and owner."""
        place = f"{getattr(self._store, 'host', '?')}:{getattr(self._store, 'port', '?')}"
        return f"the store of torchrun at {place}" if _store_is_of_agent() else f"the store of rank 0 at {place}"

    @property
    def store_rank(self) -> int | None:
        """The rank whose process has the store; None if torchrun has it."""
        return None if _store_is_of_agent() else 0

    def exchange_now(self, limit: float) -> None:
        """Publish and read now, waiting at most `limit` seconds."""
        with self._wake:
            self._requested += 1
            requested = self._requested
            self._wake.notify_all()
            self._wake.wait_for(lambda: self._done >= requested or self._ended, limit)

    def wait_for_all(self, limit: float) -> None:
        """Wait until all ranks have published, at most `limit` seconds."""
        with self._wake:
            self._wake.wait_for(lambda: len(self.statuses) == self._num_ranks or self._ended, limit)

    def close(self) -> None:
        """End the thread, unless a call to the store blocks it."""
        self._end()
        self.join(2.0)

    def run(self) -> None:
        """Exchange statuses until closed or the store fails."""
        known: set[int] = set()
        try:
            store = self._connect()
            while not self._ended:
                requested = self._requested
                known |= {rank for rank in range(self._num_ranks) if rank not in known and store.check([str(rank)])}
                self._exchange(store, sorted(known))
                self._rest(requested)
        except (RuntimeError, ValueError):  # torch's network errors are RuntimeErrors
            pass
        finally:
            self._end()

    def _connect(self) -> Any:
        store = self._store.clone()  # a second connection: the main thread may be waiting on the first
        store.set_timeout(_CALL_LIMIT)
        return torch.distributed.PrefixStore(self._name, store)

    def _exchange(self, store: Any, known: list[int]) -> None:
        status = self._describe()
        store.set(str(status.rank), json.dumps(asdict(status)))
        answers = store.multi_get([str(rank) for rank in known])
        self.statuses = [RankStatus(**json.loads(answer)) for answer in answers]

    def _rest(self, requested: int) -> None:
        with self._wake:
            self.contact = time.monotonic()
            self._done = requested
            self._wake.notify_all()
            pause = self._interval if len(self.statuses) == self._num_ranks else self._interval / 10
            self._wake.wait_for(lambda: self._ended or self._requested > requested, pause)

    def _end(self) -> None:
        with self._wake:
            self._ended = True
            self._wake.notify_all()


def _store_is_of_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# Ends a multi-rank run when one rank is lost, instead of letting the others wait for it.

LOST_RANK_EXIT_CODE = 70
"""Exit code of ranks that end because another one is lost."""

_ENDING_LIMIT = 60.0
"""Seconds within which a rank ends once a rank has been declared lost."""

_runs = count()
"""Numbers the watchdogs; all ranks start theirs in the same order."""


def check_rank_timeout(rank_timeout: float | None) -> None:
    """Refuse a timeout that is not positive.

    Raises:
        ValueError: If it is not larger than 0.
    """
    valid = rank_timeout is None or rank_timeout > 0
    check_options({"rank_timeout": (rank_timeout, valid, "larger than 0, or None to wait without limit")})


@checked_arguments
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

    Does nothing on a single rank. Modules of this package add it themselves; see their option `rank_timeout`.

    Args:
        rank_timeout: Seconds. It must exceed the time that other ranks ever wait for one that loads a model, saves a
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

    # Record what this rank is doing.

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


class _Watch(threading.Thread):
    """Watches the ranks, and ends this process if one is lost."""

    def __init__(self, rank: int, num_ranks: int, rank_timeout: float) -> None:
        super().__init__(name="rank-watchdog", daemon=True)
        self.interval = min(max(1.0, num_ranks / 16), rank_timeout / 8)
        pid = os.getpid()
        self._own = RankStatus(rank, socket.gethostname(), pid, process_identity(pid))
        self._beats = count(1)
        self._stopped = threading.Event()
        self._judge = RankJudge(rank_timeout)
        self._link = RankLink(self._status, num_ranks, f"pl_grouprl/ranks/{next(_runs)}", self.interval)
        if not entered_collectives():
            rank_zero_warn(
                "the process groups do not count their collectives, so hung ranks cannot be detected, only frozen ones."
            )

    def start(self) -> None:
        """Start once each rank knows the others' processes, so it can name and kill one that is lost early."""
        self._link.start()
        self._link.wait_for_all(10 * self.interval)
        super().start()

    def run(self) -> None:
        """Check the ranks until the run ends."""
        last = time.monotonic()
        while not self._stopped.wait(self.interval):
            now = time.monotonic()
            self._judge.record(self._link.statuses, self._link.contact)
            if now - last > max(2.0, self._judge.silence_limit / 10):  # this process itself has slept
                self._judge.restart_clocks(now)
                self._link.contact = now
            last = now
            self._check(now)

    def stop(self, state: str, error: str) -> None:
        """Publish how this rank ended, and stop watching. Called by the main thread."""
        self._link.exchange_now(2.0)
        if any(status.verdict for status in (self._own, *self._others())):
            self.join(_ENDING_LIMIT)  # the thread ends the process; an error here follows from another rank's end
        first = [other for other in self._others() if other.state == "failed" and state == "failed"]
        self._own = replace(self._own, state="stopped" if first else state, error=error)
        self._link.exchange_now(2.0)
        for other in first:
            _say(f"{other.describe()} failed first, with {other.error}. {self._status().describe()} ends, too.")
        if self._link.store_rank == self._own.rank:
            self._wait_for_readers()
        self._stopped.set()
        self._link.close()
        self.join(2.0)

    def _wait_for_readers(self) -> None:
        """Give the others time to read how this rank ended: the store ends with this process."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline and any(other.state == "running" for other in self._others()):
            time.sleep(0.05)
            self._link.exchange_now(1.0)

    def _check(self, now: float) -> None:
        others = self._others()
        for other in others:
            if is_here(other.identity) and process_identity(other.pid) != other.identity:
                self._judge.record_end(other.rank, now)
        verdicts = [(other.verdict, other.lost) for other in others if other.verdict]
        silence = now - self._link.contact
        if verdicts:
            self._end_run(*verdicts[0])
        elif silence >= self._judge.silence_limit:
            self._judge_store(silence)
        else:
            lost = self._judge.lost(self._link.contact)
            names = {status.rank: status.describe() for status in self._link.statuses}
            if lost:
                self._end_run("; ".join(f"{names[rank]} is lost: {lost[rank]}" for rank in lost), list(lost))

    def _judge_store(self, silence: float) -> None:
        reason = f"{self._link.store_name} has not answered for {silence:.0f} s"
        holder = [other for other in self._others() if other.rank == self._link.store_rank]
        if not holder:
            self._end_run(f"{reason}, which is frozen or gone", [])
        elif holder[0].state != "done":
            self._end_run(f"{holder[0].describe()} is lost: frozen or gone, {reason}", [holder[0].rank])

    def _end_run(self, verdict: str, lost: list[int]) -> None:
        """End this process, even if its main thread is blocked. Its workers and servers notice and end too."""
        self._own = replace(self._own, verdict=verdict, lost=lost)
        _say(
            f"{verdict}. {self._status().describe()} ends with exit code {LOST_RANK_EXIT_CODE}; resume from the latest "
            f"checkpoint. If nothing was wrong, raise rank_timeout (it is {self._judge.rank_timeout:g} s)."
        )
        if self._own.rank in lost:
            faulthandler.dump_traceback(2)
        self._wait_for_verdicts()
        for other in self._others():
            if other.rank in lost and kill_process(other.pid, other.identity):
                _say(f"rank {other.rank} (pid {other.pid}) was killed.")
        _within(1.0, _flush)
        os._exit(LOST_RANK_EXIT_CODE)

    def _wait_for_verdicts(self) -> None:
        """Give the others time to read the verdict, lost ranks two intervals, so their errors do not hide it."""
        begin = time.monotonic()
        while (waited := time.monotonic() - begin) < min(10 * self.interval, _ENDING_LIMIT / 2):
            self._link.exchange_now(self.interval)
            time.sleep(self.interval / 2)
            unaware = [other.rank for other in self._others() if other.state == "running" and not other.verdict]
            if waited > 2 * self.interval and set(unaware) <= set(self._own.lost):
                return

    def _others(self) -> list[RankStatus]:
        return [status for status in self._link.statuses if status.rank != self._own.rank]

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


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Run an action that may block; wait at most this long for it."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(seconds)
