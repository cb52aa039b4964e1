"""Distributes the prompts of all calls over servers, each to the least busy one, in one event loop."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import Any

import httpx

from pl_grouprl.rollout.server.sequences import BrokenError, BusyError, PromptRequest, end, read, read_label, sample
from pl_grouprl.rollout.server.server import RefusedError, Server
from pl_grouprl.types import Rollout
from pl_grouprl.utilities.progress import tick

_HEARTBEAT = 5.0
"""Seconds between two looks at a server that samples."""

_SILENCE = (15.0, 60.0)
"""Bounds on the seconds after which a silent server counts as away: `timeout`, clamped to these. Only its engine may be
silent for longer, for `timeout`: the first rollouts may wait for a compiler."""

_BROKEN = 5
"""Give up after a server, or all of them a prompt, broke off this many times."""

_FIRST_PAUSE = 0.5
"""Seconds until a server that broke off is asked again; doubles each time."""


class _Job:
    """A prompt until it is sampled.

    Attributes:
        request: What a server is asked for.
        result: Its rollouts.
        task: Samples it, at a server.
        breaks: How often that was broken off.
    """

    def __init__(self, request: PromptRequest) -> None:
        self.request = request
        self.result: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()
        self.task: asyncio.Task[None] | None = None
        self.breaks = 0


class _Member:
    """A server.

    Attributes:
        server: The server.
        state: `unknown` until it was asked for its label.
        jobs: What it samples.
        most: Most jobs that it took, after it refused one more.
        breaks: How often it broke off since it last finished a job.
        watcher: Watches it.
        http: Its client, while it is watched.
        broken: Set to the reason when it breaks off.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.watcher: asyncio.Task[None] | None = None
        self.jobs: set[_Job] = set()
        self.reset()

    def reset(self) -> None:
        """Forget what was known of it."""
        self.state, self.breaks, self.most = "unknown", 0, math.inf
        self.http: httpx.AsyncClient | None = None
        self.broken: asyncio.Future[Exception] | None = None


class Distribution:
    """Distributes prompts over servers, and watches these.

    What a server breaks off starts again, there or at another one.

    Args:
        servers: The servers.
        at_once: Prompts that each works on at a time.
    """

    def __init__(self, servers: Sequence[Server], at_once: int) -> None:
        self._at_once = at_once
        self._members = [_Member(server) for server in servers]
        self._waiting: deque[_Job] = deque()
        self._unfinished: set[_Job] = set()

    async def sample(self, requests: Sequence[PromptRequest]) -> list[list[Rollout]]:
        """Sample prompts, beside those of other calls; see `ServerPool.sample`."""
        jobs = [_Job(request) for request in requests]
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
            await end(job.task for job in jobs if job.task is not None)

    def _distribute(self) -> None:
        """Let free servers begin, the least busy first. None gets more than its share, even if it answers first."""
        present = [member for member in self._members if member.state != "away"]
        most = min(self._at_once, -(-len(self._unfinished) // max(len(present), 1)))
        while self._waiting:
            free = [one for one in present if one.state == "up" and len(one.jobs) < min(most, one.most)]
            if not free:
                return
            job = self._waiting.popleft()
            if job in self._unfinished:
                self._start(min(free, key=lambda member: len(member.jobs)), job)

    def _start(self, member: _Member, job: _Job) -> None:
        def leave(task: asyncio.Task[None]) -> None:
            if job.task is task:  # else it has begun again, perhaps here
                member.jobs.discard(job)
            self._distribute()

        member.jobs.add(job)
        job.task = asyncio.create_task(self._work(member, job))
        job.task.add_done_callback(leave)

    async def _work(self, member: _Member, job: _Job) -> None:
        """Sample a prompt at a server."""
        try:
            assert member.http is not None
            rollouts = await sample(member.http, member.server, job.request)
        except (BrokenError, httpx.TransportError) as error:
            member.jobs.discard(job)
            if isinstance(error, BusyError) and member.jobs:  # it goes on with these
                member.most = len(member.jobs)
                self._waiting.appendleft(job)
                return
            job.breaks += 1
            if job.breaks == _BROKEN:
                self._finish(job, _broke_off(member, error))
            else:
                self._waiting.appendleft(job)
            if member.broken is not None and not member.broken.done():
                member.broken.set_result(error)
        except Exception as error:
            self._finish(job, error)
        else:
            member.breaks = 0
            member.most += 1  # perhaps it takes more by now
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
        """Make a server take part while it can be reached. An error of its own ends all calls."""
        http = None
        try:
            silence = min(max(member.server.timeout, _SILENCE[0]), _SILENCE[1])
            http = httpx.AsyncClient(timeout=httpx.Timeout(silence, read=None), **member.server.options)
            member.http = http
            while True:
                self._check(member, await self._reach(member, http))
                member.broken = asyncio.get_running_loop().create_future()
                member.state = "up"
                self._distribute()
                try:
                    await _until_one_fails(
                        _raise(member.broken), self._ask(member, http, silence), self._ask_label(member, http)
                    )
                except (BrokenError, httpx.TransportError) as error:
                    await self._pause(member, error)
        except Exception as error:
            for job in list(self._unfinished):
                self._finish(job, error)
        finally:
            member.watcher = None  # before this waits, so that the next call begins anew
            member.reset()
            if http is not None:
                await http.aclose()

    async def _pause(self, member: _Member, error: Exception) -> None:
        """Let others have the prompts of a server that broke off, for a while."""
        member.state = "away"
        member.breaks += 1
        if member.breaks == _BROKEN:
            raise _broke_off(member, error) from error
        tasks = {job: job.task for job in member.jobs if job.task is not None}
        await end(tasks.values())
        self._waiting.extendleft(job for job, task in tasks.items() if task.cancelled())
        self._distribute()
        await asyncio.sleep(_FIRST_PAUSE * 2 ** (member.breaks - 1))

    async def _reach(self, member: _Member, http: httpx.AsyncClient) -> str:
        """See `Server.wait`."""
        reason: Exception | None = None
        for seconds in member.server.pauses():
            try:
                return await read_label(http, member.server)
            except (httpx.TransportError, RefusedError) as error:
                reason = member.server.passing(error)
                member.state = "away"
                self._distribute()
                await asyncio.sleep(seconds)
        raise member.server.away(reason)

    async def _ask(self, member: _Member, http: httpx.AsyncClient, silence: float) -> None:
        """Ask the server now and then: rollouts may take long, but not without an answer to this."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            with suppress(BusyError):  # it answers
                read(member.server, await http.get("/health", timeout=silence))
            tick()

    async def _ask_label(self, member: _Member, http: httpx.AsyncClient) -> None:
        """The same for its engine, and for the weights, which another trainer may change."""
        while True:
            await asyncio.sleep(_HEARTBEAT)
            response = await http.get("/weight_info", timeout=member.server.timeout)
            with suppress(BusyError):
                self._check(member, read(member.server, response)["weight_version"])

    def _check(self, member: _Member, label: str) -> None:
        for job in self._unfinished:
            job.request.check(label, member.server)


def _broke_off(member: _Member, error: Exception) -> RuntimeError:
    return RuntimeError(
        f"the sampling server at {member.server.url} broke off a rollout {_BROKEN} times, most recently: "
        f"{type(error).__name__}: {error}. See its log."
    )


async def _raise(reason: asyncio.Future[Exception]) -> None:
    raise await reason


async def _until_one_fails(*parts: Coroutine[Any, Any, None]) -> None:
    tasks = [asyncio.create_task(part) for part in parts]
    try:
        await asyncio.gather(*tasks)
    finally:
        await end(tasks)
