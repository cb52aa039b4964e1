"""Exchanges the ranks' status through the store that their process group was created with."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from pl_grouprl.utilities.rank_status import RankStatus

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
