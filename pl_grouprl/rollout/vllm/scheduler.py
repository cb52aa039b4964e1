"""Distributes prompts over servers, for several threads at once.

`Scheduler` is what threads call; while there are calls, it runs an event loop in a thread of its own, and in it a
`_Dispatcher`, which gives each prompt to the least busy server and watches the servers.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx2

from pl_grouprl.rollout.vllm.client import (
    BrokenOffError,
    BusyError,
    PromptRequest,
    RefusedError,
    Server,
    cancel_all,
    decode,
    run_all,
    sample,
)
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.processes import BackgroundLoop, max_open_files
from pl_grouprl.utilities.progress import tick

_HEARTBEAT = 5.0
"""Seconds between two health checks of a server."""

_SILENCE = (15.0, 60.0)
"""A server that is silent for `timeout` seconds, clamped to these bounds, counts as away. Its engine may be silent for
all of `timeout`, because the first rollouts may wait for a compiler."""

_MAX_BREAKS = 5
"""Give up when a server breaks off this many times in a row, or a prompt is broken off this many times."""

_OTHER_FILES = 256
"""Open files to leave to the rest of the process: each sequence that a server samples has a connection."""

_MIN_SEQUENCES = 8
"""Sequences that a server samples at a time, however few files may be open."""

_FIRST_PAUSE = 0.5
"""Seconds until a server that broke off is asked again; doubles each time."""


class Scheduler:
    """Samples on several servers; thread-safe.

    Args:
        servers: The servers.
        max_concurrent: Number of prompts that a server works on at a time.
    """

    def __init__(self, servers: Sequence[Server], max_concurrent: int) -> None:
        self._servers, self._max_concurrent = servers, max_concurrent
        self._lock = threading.Lock()
        self._running: tuple[BackgroundLoop, _Dispatcher] | None = None
        self._calls: set[Future[Any]] = set()

    def sample(self, requests: Sequence[PromptRequest]) -> list[list[Rollout]]:
        """Sample each prompt's rollouts; other threads may call this at the same time.

        Raises:
            SamplerLostError: If a server has lost its weights.
            WeightsMismatchError: If a server has other weights.
            ValueError: If a server rejects a request.
            RuntimeError: If a server stays unreachable or keeps breaking off, or `cancel` was called.
        """
        if not requests:
            return []
        call = None
        try:
            with self._lock:
                if self._running is None:
                    dispatcher = _Dispatcher(self._servers, self._max_concurrent)
                    self._running = BackgroundLoop("sampling-servers"), dispatcher
                loop, dispatcher = self._running
                call = loop.submit("rollouts", dispatcher.sample(requests))
                self._calls.add(call)
            return call.result()
        except CancelledError:
            raise RuntimeError("the engine was closed while it sampled.") from None
        finally:
            if call is not None:
                call.cancel()  # after an interruption
            idle = None
            with self._lock:
                self._calls = {call for call in self._calls if not call.done()}
                if not self._calls:
                    idle, self._running = self._running, None  # first, in case an interruption ends this method
            if idle is not None:
                idle[0].close()

    def cancel(self) -> None:
        """Cancel all calls; each raises a RuntimeError."""
        with self._lock:
            for call in self._calls:
                call.cancel()


@dataclass(eq=False)
class _Job:
    """A prompt to sample.

    Attributes:
        request: The request to send.
        result: Future of its rollouts.
        task: The task that samples it; None before the first.
        breaks: How often a server broke it off.
    """

    request: PromptRequest
    result: asyncio.Future[list[Rollout]]
    task: asyncio.Task[None] | None = None
    breaks: int = 0


class _Member:
    """A server and its state.

    Attributes:
        server: The server.
        gate: Limits the sequences that it samples at a time.
        state: `unknown` at first, then `up` or `away`.
        jobs: The jobs that it is sampling.
        max_jobs: Maximum number of jobs: lowered when it refuses one, raised by each that it finishes.
        breaks: How often it broke off since it last finished a job.
        pauses: Pauses while it refuses all jobs, until its `timeout`; None if it does not.
        watcher: The task that watches it.
        http: Its client, while it is watched.
        broken: Future that fails with the error with which it breaks off.
    """

    def __init__(self, server: Server, max_sequences: int) -> None:
        self.server = server
        self.gate = asyncio.Semaphore(max_sequences)
        self.watcher: asyncio.Task[None] | None = None
        self.jobs: set[_Job] = set()
        self.reset()

    def reset(self) -> None:
        """Forget what is known about the server."""
        self.state, self.breaks, self.max_jobs = "unknown", 0, math.inf
        self.pauses: Iterator[float] | None = None
        self.http: httpx2.AsyncClient | None = None
        self.broken: asyncio.Future[None] | None = None


class _Dispatcher:
    """Gives prompts to servers, and watches the servers; in one event loop.

    A prompt that a server breaks off starts again, on the same server or another.
    """

    def __init__(self, servers: Sequence[Server], max_concurrent: int) -> None:
        self._max_concurrent = max_concurrent
        max_sequences = max((max_open_files() - _OTHER_FILES) // len(servers), _MIN_SEQUENCES)
        self._members = [_Member(server, max_sequences) for server in servers]
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[_Job] = set()

    async def sample(self, requests: Sequence[PromptRequest]) -> list[list[Rollout]]:
        """Sample prompts, concurrently with other calls; see `Scheduler.sample`."""
        loop = asyncio.get_running_loop()
        jobs = [_Job(request, loop.create_future()) for request in requests]
        self._waiting.extend(jobs)
        self._unfinished.update(jobs)
        for member in self._members:
            if member.watcher is None:
                member.watcher = asyncio.create_task(self._watch(member))
        self._distribute()
        try:
            return list(await asyncio.gather(*(job.result for job in jobs)))
        finally:
            self._unfinished.difference_update(jobs)
            await cancel_all(job.task for job in jobs if job.task is not None)

    def _distribute(self) -> None:
        """Start waiting jobs on free servers, the least busy first.

        No server gets more than its share, even if it is the first to answer.
        """
        present = [member for member in self._members if member.state != "away"]
        share = min(self._max_concurrent, -(-len(self._unfinished) // max(len(present), 1)))
        while self._waiting:
            free = [one for one in present if one.state == "up" and len(one.jobs) < min(share, one.max_jobs)]
            if not free:
                return
            job = self._waiting.popleft()
            if job in self._unfinished:
                self._start(job, min(free, key=lambda member: len(member.jobs)))

    def _start(self, job: _Job, member: _Member) -> None:
        def leave(task: asyncio.Task[None]) -> None:
            if job.task is task:  # otherwise it has started again, perhaps on this server
                member.jobs.discard(job)
            self._distribute()

        member.jobs.add(job)
        job.task = asyncio.create_task(self._work(member, job))
        job.task.add_done_callback(leave)

    async def _work(self, member: _Member, job: _Job) -> None:
        """Sample a prompt on a server."""
        try:
            assert member.http is not None
            http, server, request, gate = member.http, member.server, job.request, member.gate
            rollouts = await run_all(sample(http, server, request, body, gate) for body in request.bodies)
        except (BrokenOffError, httpx2.TransportError) as error:
            member.jobs.discard(job)
            if isinstance(error, BusyError) and member.jobs:  # it keeps its jobs, but takes no more
                member.max_jobs = len(member.jobs)
                self._waiting.appendleft(job)
                return
            job.breaks += not isinstance(error, BusyError)
            if job.breaks == _MAX_BREAKS:
                self._finish(job, _broke_off(member, error))
            else:
                self._waiting.appendleft(job)
            if member.broken is not None and not member.broken.done():
                member.broken.set_exception(error)
        except Exception as error:
            self._finish(job, error)
        else:
            member.breaks, member.pauses = 0, None
            member.max_jobs += 1  # it may have room for more now
            self._finish(job, rollouts)

    def _finish(self, job: _Job, result: list[Rollout] | Exception) -> None:
        self._unfinished.discard(job)
        if job.result.done():
            return
        if isinstance(result, Exception):
            job.result.set_exception(result)
        else:
            job.result.set_result(result)

    async def _watch(self, member: _Member) -> None:
        """Use a server while it can be reached. A permanent error fails all calls."""
        http = None
        try:
            silence = min(max(member.server.timeout, _SILENCE[0]), _SILENCE[1])
            http = httpx2.AsyncClient(timeout=httpx2.Timeout(silence, read=None), **member.server.options)
            member.http = http
            while True:
                self._check(member, await self._reach(member, http))
                member.broken = asyncio.get_running_loop().create_future()
                member.state = "up"
                self._distribute()
                try:
                    health = self._ask(member, http, "/health", silence)
                    await run_all(
                        [member.broken, health, self._ask(member, http, "/weight_info", member.server.timeout)]
                    )
                except (BrokenOffError, httpx2.TransportError) as error:
                    await self._pause(member, error)
        except Exception as error:
            for job in list(self._unfinished):
                self._finish(job, error)
        finally:
            member.watcher = None  # before the `await`, so that the next call starts a new one
            member.reset()
            if http is not None:
                await http.aclose()

    async def _reach(self, member: _Member, http: httpx2.AsyncClient) -> str:
        """`Server.wait`, as a coroutine."""
        reason: Exception | None = None
        for seconds in member.server.pauses():
            try:
                answer = await http.get("/weight_info", timeout=member.server.timeout)
                return str(member.server.decode(answer)["weight_version"])
            except (httpx2.TransportError, RefusedError) as error:
                reason = member.server.temporary_or_raise(error)
                member.state = "away"
                self._distribute()
                await asyncio.sleep(seconds)
        raise member.server.unreachable_error(reason)

    async def _pause(self, member: _Member, error: Exception) -> None:
        """Give the prompts of a server that broke off to the others, and leave it alone for a while.

        Raises:
            RuntimeError: If it was overloaded for its `timeout`, or broke off too often.
        """
        member.state = "away"
        if isinstance(error, BusyError):
            member.pauses = member.pauses or member.server.pauses()
            seconds = next(member.pauses, None)
            if seconds is None:
                raise member.server.unreachable_error(error) from error
        else:
            member.breaks += 1
            if member.breaks == _MAX_BREAKS:
                raise _broke_off(member, error) from error
            seconds = _FIRST_PAUSE * 2 ** (member.breaks - 1)
        tasks = {job: job.task for job in member.jobs if job.task is not None}
        await cancel_all(tasks.values())
        self._waiting.extendleft(job for job, task in tasks.items() if task.cancelled())
        self._distribute()
        await asyncio.sleep(seconds)

    async def _ask(self, member: _Member, http: httpx2.AsyncClient, path: str, seconds: float) -> None:
        """Ask a server every few seconds.

        A live server answers `/health`, however long rollouts take; its engine, and who has changed its weights,
        `/weight_info`.
        """
        while True:
            await asyncio.sleep(_HEARTBEAT)
            response = await http.get(path, timeout=seconds)
            with suppress(BusyError):  # busy, so alive
                answer = decode(member.server, response)
                if path == "/weight_info":
                    self._check(member, answer["weight_version"])
            tick()

    def _check(self, member: _Member, label: str) -> None:
        for job in self._unfinished:
            job.request.labels.version(label, job.request.min_version, member.server.url)


def _broke_off(member: _Member, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"the sampling server at {member.server.url} broke off a rollout {_MAX_BREAKS} times, most recently: "
        f"{type(error).__name__}: {error}. See its log."
    )
