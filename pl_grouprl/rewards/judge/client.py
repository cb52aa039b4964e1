"""Requests chat completions: concurrently up to a limit, with retries and a time limit for each attempt."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from asyncio import sleep
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.utilities.progress import tick
from pl_grouprl.utilities.text import mask_secret

if TYPE_CHECKING:
    from httpx2 import AsyncClient, Response

    from pl_grouprl.utilities.checkpoint_files import OptionalWrites

# Checks the address and API key options of `Judge`, and reads the key.


def chat_url(base_url: str) -> str:
    """The URL that requests are posted to."""
    return f"{base_url.rstrip('/')}/chat/completions"


def check_base_url(url: str) -> None:
    """Refuse anything but an HTTP URL without credentials.

    Raises:
        ValueError: Names the option.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"Judge.base_url is {url!r}; it must look like http://localhost:8000/v1.")
    if "@" in parts.netloc:
        raise ValueError(
            "Judge.base_url has a user name or password; put the key in an environment variable: api_key_env."
        )


def check_key_variable(name: str | None) -> None:
    """Refuse anything but None or the name of an environment variable.

    Raises:
        ValueError: Names the option, and does not show its value.
    """
    if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(
            "Judge.api_key_env is not the name of an environment variable (its value is not shown, as it might be the "
            "key); put the key in a variable and pass the variable's name, such as OPENAI_API_KEY."
        )


def read_key(variable: str | None, judge: str) -> str | None:
    """Read the key from an environment variable; None without a variable.

    Args:
        variable: Name of the variable.
        judge: The judge whose key it is, for the error.

    Raises:
        RewardConfigurationError: If it is not set, or cannot be sent in a header.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not (key and key.isascii() and key.isprintable()):
        raise RewardConfigurationError(
            f"{judge}: the environment variable {variable} (api_key_env) "
            f"{'has characters that a header must not have' if key else 'is not set'}; set it to the API key."
        )
    return key


# Replies of a judge, cached in memory and optionally on disk.

_MOST_IN_MEMORY = 16_384
"""Number of replies kept in memory; the least recently used are dropped first."""


class ReplyCache:
    """Replies by the hash of their request.

    Args:
        folder: Where to keep a file per reply, for other ranks and later runs; None caches in memory only.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._memory: OrderedDict[str, str] = OrderedDict()
        self._writes: OptionalWrites | None = None

    def get(self, digest: str) -> str | None:
        """The reply, or None if it is not known; a damaged file counts as unknown."""
        reply = self._memory.get(digest)
        if reply is None and self._folder is not None:
            reply = _read(self._file(self._folder, digest))
        if reply is not None:
            self._remember(digest, reply)
        return reply

    def put(self, digest: str, reply: str) -> None:
        """Remember a reply. If it cannot be written to disk, warn once."""
        self._remember(digest, reply)
        if self._folder is None:
            return
        from pl_grouprl.utilities.checkpoint_files import OptionalWrites, write_whole  # imports Lightning

        if self._writes is None:
            self._writes = OptionalWrites("Judge")
        with self._writes.to(f"cache_dir {self._folder}"):
            write_whole(self._file(self._folder, digest), json.dumps({"reply": reply}).encode())

    def _remember(self, digest: str, reply: str) -> None:
        self._memory[digest] = reply
        self._memory.move_to_end(digest)
        if len(self._memory) > _MOST_IN_MEMORY:
            self._memory.popitem(last=False)

    @staticmethod
    def _file(folder: Path, digest: str) -> Path:
        return folder / digest[:2] / f"{digest}.json"


def _read(file: Path) -> str | None:
    try:
        reply = json.loads(file.read_bytes())["reply"]
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return reply if isinstance(reply, str) else None


# Requests chat completions: concurrently up to a limit, with retries and a time limit for each attempt.

_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds before the first retry, doubled for each further one; and the longest pause, also for `Retry-After`."""

_MAX_ANSWER_BYTES = 4 << 20

_SHOWN_CHARACTERS = 300
"""How much of an unexpected answer error messages show."""

_jitter = random.Random()  # its own generator: server failures must not change the run's random numbers


class NoReplyError(RuntimeError):
    """A request that got no usable reply."""


class _TransientError(Exception):
    """A failure worth retrying; `wait` is the number of seconds that the server asks for."""

    def __init__(self, reason: str, wait: float = 0.0) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Reply:
    """A reply of the model, and the tokens that the server counted."""

    text: str
    prompt_tokens: float
    completion_tokens: float


class ChatClient:
    """Posts requests to one endpoint. Requests on the same event loop share connections, closed after the last one.

    Statuses 429 and 5xx, broken connections and timeouts are retried after pauses that double from 1 to 60 seconds,
    with jitter, and that are at least as long as `Retry-After` says.

    Args:
        url: URL of the endpoint, `.../chat/completions`.
        max_concurrent: Requests in flight on one event loop, including those that wait for a retry.
        timeout: Seconds for each attempt.
        max_retries: How often a request is retried.
    """

    def __init__(self, url: str, max_concurrent: int, timeout: float, max_retries: int) -> None:
        self.url = url
        self._max_concurrent = max_concurrent
        self._timeout = timeout
        self._max_retries = max_retries
        self._sessions: dict[asyncio.AbstractEventLoop, _Session] = {}

    @asynccontextmanager
    async def session(self, api_key: str | None) -> AsyncIterator[_Session]:
        """The session of this event loop, shared by concurrent callers and closed by the last."""
        loop = asyncio.get_running_loop()
        session = self._sessions.get(loop)
        if session is None:
            session = self._sessions[loop] = _Session(
                self.url, api_key, self._max_concurrent, self._timeout, self._max_retries
            )
        session.users += 1
        try:
            yield session
        finally:
            session.users -= 1
            if not session.users:
                del self._sessions[loop]
                await session.close()


class _Session:
    """Connections of one event loop, and the limit on requests in flight; `users` counts the callers that share it."""

    def __init__(self, url: str, api_key: str | None, max_concurrent: int, timeout: float, max_retries: int) -> None:
        self.users = 0
        self._url, self._api_key, self._timeout, self._max_retries = url, api_key, timeout, max_retries
        self._slots = asyncio.Semaphore(max_concurrent)
        self._http = _open_client(api_key, max_concurrent)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, body: bytes) -> tuple[Reply, float]:
        """Return the reply to a request, and the seconds it took, retries included.

        Raises:
            NoReplyError: If there is no reply.
        """
        clock = asyncio.get_running_loop().time
        async with self._slots:
            began = clock()
            try:
                return await self._ask_with_retries(body), clock() - began
            except NoReplyError as error:
                raise NoReplyError(mask_secret(str(error), self._api_key)) from None

    async def _ask_with_retries(self, body: bytes) -> Reply:
        pause = _FIRST_WAIT
        for attempt in range(self._max_retries + 1):
            tick()
            try:
                return await self._attempt(body)
            except _TransientError as error:
                if attempt == self._max_retries:
                    raise NoReplyError(f"{error} (attempt {attempt + 1} of {attempt + 1})") from error
                if error.wait > _LONGEST_WAIT:
                    raise NoReplyError(f"{error}, and asks to wait {error.wait:g} seconds") from error
                await sleep(max(error.wait, pause * _jitter.uniform(0.5, 1.0)))
                pause = min(2 * pause, _LONGEST_WAIT)
        raise AssertionError

    async def _attempt(self, body: bytes) -> Reply:
        from httpx2 import RequestError

        try:
            status, headers, content = await asyncio.wait_for(self._post(body), self._timeout)
        except asyncio.TimeoutError as error:
            raise _TransientError(f"no answer within {self._timeout:g} seconds") from error
        except RequestError as error:
            raise _TransientError(f"{type(error).__name__}: {error}") from error
        if status == 200:
            return _read_reply(content)
        reason = f"status {status}: {content[:_SHOWN_CHARACTERS]!r}"
        if status == 429 or status >= 500:
            raise _TransientError(reason, _retry_after(headers.get("retry-after", "")))
        raise NoReplyError(reason)

    async def _post(self, body: bytes) -> tuple[int, Any, str]:
        async with self._http.stream("POST", self._url, content=body) as response:
            content = await _read_limited(response)
        text = content.decode(json.detect_encoding(content), errors="replace")
        # Masked before it is truncated, cached or shown: the server might quote the key.
        return response.status_code, response.headers, mask_secret(text, self._api_key)


def _open_client(api_key: str | None, max_concurrent: int) -> AsyncClient:
    import httpx2

    headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    limits = httpx2.Limits(max_connections=max_concurrent, max_keepalive_connections=max_concurrent)
    return httpx2.AsyncClient(headers=headers, limits=limits, timeout=None)


async def _read_limited(response: Response) -> bytes:
    coding = response.headers.get("content-encoding", "identity")
    if coding != "identity":  # a few bytes may decompress to gigabytes
        raise NoReplyError(f"the answer is compressed ({coding!r:.80}), which the request did not accept")
    content = bytearray()
    async for chunk in response.aiter_raw():
        content += chunk
        if len(content) > _MAX_ANSWER_BYTES:
            raise NoReplyError(f"the answer has more than {_MAX_ANSWER_BYTES} bytes")
    return bytes(content)


def _read_reply(content: str) -> Reply:
    try:
        answer = json.loads(content)
        choice = answer["choices"][0]
        text, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        usage = answer.get("usage") or {}
        counts = [float(int(usage.get(name) or 0)) for name in ("prompt_tokens", "completion_tokens")]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise NoReplyError(f"the answer is not a chat completion: {content[:_SHOWN_CHARACTERS]!r}") from error
    if finish_reason == "length":
        raise NoReplyError("the reply was cut off; raise max_tokens")
    if not isinstance(text, str):
        raise NoReplyError(f"the reply has no text (finish_reason {finish_reason!r:.80})")
    return Reply(text, *counts)


def _retry_after(header: str) -> float:
    """Seconds to wait according to `Retry-After`, a number or a date; 0 if it is neither."""
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        date = parsedate_to_datetime(header).astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return 0.0
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())
