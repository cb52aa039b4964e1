"""Turns requests into grades: from the cache if possible, otherwise from the model."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pl_grouprl.rewards.judge.cache import ReplyCache
from pl_grouprl.rewards.judge.client import ChatClient, NoReplyError


@dataclass(frozen=True)
class Verdict:
    """The outcome of one request.

    Attributes:
        grade: The grade; None if there is none.
        failure: Why there is no grade.
        cached: Whether no request was needed.
        cost: Seconds and tokens of the request, by metric name.
    """

    grade: float | None = None
    failure: str = ""
    cached: bool = False
    cost: dict[str, float] = field(default_factory=dict)

    def repeated(self) -> Verdict:
        """The verdict for an identical request, which is not sent again."""
        return replace(self, cached=True, cost={})


class Grader:
    """Obtains verdicts.

    Args:
        client: Sends requests.
        cache: Remembers replies that have a grade.
        read_grade: Reads the grade in a reply; raises a ValueError if there is none.
        read_key: Returns the API key; called whenever requests are sent, so that the key is not kept.
    """

    def __init__(
        self,
        client: ChatClient,
        cache: ReplyCache,
        read_grade: Callable[[str], float],
        read_key: Callable[[], str | None],
    ) -> None:
        self._client = client
        self._cache = cache
        self._read_grade = read_grade
        self._read_key = read_key

    async def grade(self, bodies: Sequence[bytes]) -> dict[bytes, Verdict]:
        """Return verdicts on requests, from the cache where possible.

        Args:
            bodies: Distinct requests; they are sent concurrently.

        Raises:
            RewardConfigurationError: If the key is needed and not set.
        """
        verdicts = {body: verdict for body in bodies if (verdict := self._cached(body)) is not None}
        return verdicts | await self.ask([body for body in bodies if body not in verdicts])

    async def ask(self, bodies: Sequence[bytes]) -> dict[bytes, Verdict]:
        """Same as `grade`, but never from the cache."""
        if not bodies:
            return {}
        async with self._client.session(self._read_key()) as session:
            verdicts = await asyncio.gather(*(self._ask(session, body) for body in bodies))
        return dict(zip(bodies, verdicts, strict=True))

    async def _ask(self, session: Any, body: bytes) -> Verdict:
        try:
            reply, seconds = await session.ask(body)
        except NoReplyError as error:
            return Verdict(failure=str(error))
        verdict = self._read(reply.text)
        if verdict.grade is None:
            return verdict
        self._cache.put(_digest(body), reply.text)
        tokens = {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens}
        return replace(verdict, cost={"latency": seconds, **tokens})

    def _cached(self, body: bytes) -> Verdict | None:
        reply = self._cache.get(_digest(body))
        verdict = Verdict() if reply is None else self._read(reply)
        return None if verdict.grade is None else verdict.repeated()

    def _read(self, reply: str) -> Verdict:
        try:
            return Verdict(self._read_grade(reply))
        except ValueError as error:
            return Verdict(failure=f"{error} in the reply {reply[-200:]!r}")


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()
