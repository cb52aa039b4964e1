"""Client of one sampling server, over HTTP, using only the standard library."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar
from urllib.parse import SplitResult, urlencode, urlsplit

from pl_grouprl.rollout.server.protocol import HEARTBEAT, MAX_JSON, check_token
from pl_grouprl.utilities.progress import tick

T = TypeVar("T")

_SILENCE = 12 * HEARTBEAT
_LEAST_SILENCE = 3 * HEARTBEAT
"""Bounds on the silence after which a rollout's connection counts as broken: `timeout`, clamped to these."""

_BROKEN = 5
"""Give up a rollout after its connection broke this many times."""

_MAX_LINE = 64 << 20
"""Maximum size of a rollout in bytes, about a million tokens."""

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0


class RefusedError(RuntimeError):
    """The server understood a request and refuses it.

    Attributes:
        status: HTTP status.
        answer: The answer: `error`, and with status 409 also `instance`, `version`, `update` and `updating`.
    """

    def __init__(self, url: str, status: int, answer: Mapping[str, Any]) -> None:
        self.url, self.status, self.answer = url, status, answer
        super().__init__(f"the sampling server at {url} answers {status}: {answer.get('error', 'no reason given')}")


class _Broken(Exception):
    """An answer that broke off."""


class ServerClient:
    """Calls one server; thread-safe.

    Retries with exponential backoff (0.1 to 5 seconds) if connections are refused, reset or time out, answers have
    status 5xx, or rollouts break off.

    Args:
        url: `http://host:port`, or `https://...` if a proxy in front of the server speaks TLS.
        token: The server's token.
        timeout: Seconds that a server may be unreachable or silent, and time limit of requests other than rollouts.
            Rollouts have none: the server sends heartbeats, and counts as silent after 15 seconds at the earliest.

    Raises:
        ValueError: If the url or the token is malformed.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 300.0) -> None:
        parts = urlsplit(url)
        if not _is_server(parts):
            raise ValueError(f"urls has {_without_secrets(url)!r}; it must be like http://127.0.0.1:8000.")
        check_token(token, "token")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._parts = parts
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def info(self) -> dict[str, Any]:
        """The server's state: its `instance`, the `version` of its weights, its model."""
        return self._call("GET", "/info")

    def generate(self, request: Mapping[str, Any]) -> list[list[dict[str, Any]]]:
        """Sample rollouts.

        Args:
            request: `version` and `update` that the server must have; `requests`, each with `prompt` and `seeds`;
                `sampling`, `end_ids`, `never`.

        Returns:
            The rollouts of each request, one per seed: `token_ids`, `logprobs`, `finish_reason`.
        """
        body = json.dumps(request).encode()
        counts = [len(prompt["seeds"]) for prompt in request["requests"]]
        broken = 0

        def attempt() -> list[list[dict[str, Any]]]:
            nonlocal broken
            try:
                return self._stream("/generate", body, counts, request["version"])
            except _Broken as error:
                broken += 1
                if broken == _BROKEN:
                    raise RuntimeError(
                        f"the sampling server at {self.url} broke off a rollout {broken} times, most recently: "
                        f"{error}. See its log."
                    ) from error
                raise

        return self._retry(attempt)

    def begin_weights(self) -> str:
        """Begin an update, replacing an unfinished one. Returns its id."""
        return self._call("POST", "/weights/begin", b"{}")["update"]

    def send_bucket(self, update: str, index: int, bucket: bytes) -> None:
        """Send some weights, in safetensors format; `index` counts them. Sending one again is harmless."""
        query = urlencode({"update": update, "index": index})
        self._call("POST", f"/weights/bucket?{query}", bucket, kind="application/octet-stream")

    def connect(self, *, unique_id: str, rank_offset: int, world_size: int) -> None:
        """Make the server's workers join a process group (NCCL); returns when they have joined."""
        self._join_collective(
            "/weights/connect", {"unique_id": unique_id, "rank_offset": rank_offset, "world_size": world_size}
        )

    def announce(self, update: str, index: int, described: Mapping[str, Any]) -> None:
        """Make the server's workers receive a broadcast bucket."""
        self._join_collective("/weights/broadcast", {"update": update, "index": index, **described})

    def end_weights(self, update: str, version: int, names: list[str]) -> list[list[list[Any]]]:
        """Activate the weights. Returns each worker's checksums, for `check_weights`."""
        body = json.dumps({"update": update, "version": version, "names": names}).encode()
        return self._call("POST", "/weights/end", body)["workers"]

    def abort_weights(self, update: str) -> None:
        """Drop an update if it is the server's current one. Not retried: abort is best effort."""
        self._once("POST", "/weights/abort", json.dumps({"update": update}).encode(), timeout=min(self.timeout, 10.0))

    def _join_collective(self, path: str, body: Mapping[str, Any]) -> None:
        """Make the workers join a collective. Not retried: the others would not join again."""
        try:
            self._once("POST", path, json.dumps(body).encode())
        except TimeoutError as error:
            raise RuntimeError(
                f"the workers of the sampling server at {self.url} have waited {self.timeout:g} seconds for NCCL, "
                "which waits forever if another process has died. Stop the server and start it again."
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise RefusedError(self.url, 409, {"error": f"it has gone ({error}).", "version": None}) from error

    def _call(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> dict[str, Any]:
        return self._retry(lambda: self._once(method, path, body, kind))

    def _retry(self, attempt: Callable[[], T]) -> T:
        """Retry until it succeeds or the server has been away for too long."""
        away: float | None = None
        wait = _FIRST_WAIT
        while True:
            began = time.monotonic()
            try:
                return attempt()
            except RefusedError as error:
                if error.status < 500:
                    raise
                reason: Exception = error
            except _Broken as error:  # the server was reachable
                reason, away, wait = error, time.monotonic(), _FIRST_WAIT
            except (OSError, http.client.HTTPException) as error:
                reason = error
            away = began if away is None else away
            if time.monotonic() + wait > away + self.timeout:
                raise RuntimeError(
                    f"the sampling server at {self.url} did not come back within {self.timeout:g} seconds "
                    f"({type(reason).__name__}: {reason}). Start it (python -m pl_grouprl.rollout.server --model ... "
                    f"--host {self._parts.hostname} --port {self._port}), or raise timeout."
                ) from reason
            time.sleep(wait)
            wait = min(2 * wait, _LONGEST_WAIT)

    def _once(
        self, method: str, path: str, body: bytes | None, kind: str = "application/json", timeout: float | None = None
    ) -> dict[str, Any]:
        connection = self._connect(self.timeout if timeout is None else timeout)
        try:
            return _read(self._ask(connection, method, path, body, kind))
        finally:
            connection.close()

    def _stream(self, path: str, body: bytes, counts: list[int], version: int) -> list[list[dict[str, Any]]]:
        connection = self._connect(max(_LEAST_SILENCE, min(self.timeout, _SILENCE)))
        try:
            response = self._ask(connection, "POST", path, body, "application/json")
            try:
                return self._collect(response, counts, version)
            except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as error:
                raise _Broken(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def _collect(
        self, response: http.client.HTTPResponse, counts: list[int], version: int
    ) -> list[list[dict[str, Any]]]:
        found: list[list[dict[str, Any]]] = [[{} for _ in range(count)] for count in counts]
        while line := response.readline(_MAX_LINE + 1):
            message = _message(line)
            token_ids = message.get("token_ids")
            tick(len(token_ids) if isinstance(token_ids, list) else 0)
            if "status" in message:
                if message["status"] >= 500:
                    raise _Broken(message["error"])
                raise RefusedError(self.url, message["status"], message)
            if "version" in message and message["version"] != version:
                raise RefusedError(self.url, 409, {**message, "error": f"its weights are {message['version']}."})
            if "index" in message:
                request_index, number = _rollout_index(message["index"], found)
                found[request_index][number] = message
            if "done" in message and all(all(rollouts) for rollouts in found):
                return found
        raise _Broken("the answer ended before its rollouts did")

    def _ask(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None, kind: str
    ) -> http.client.HTTPResponse:
        headers = {**self._headers, **({} if body is None else {"Content-Type": kind})}
        try:
            connection.request(method, f"{self._parts.path.rstrip('/')}{path}", body, headers)
        except (BrokenPipeError, ConnectionResetError):  # it may have answered before reading everything
            response = _early_answer(connection)
            if response is None:
                raise
        else:
            response = connection.getresponse()
        if response.status != 200:
            raise RefusedError(self.url, response.status, _error(response))
        return response

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(str(self._parts.hostname), self._port, timeout=timeout)

    @property
    def _port(self) -> int:
        return self._parts.port or (443 if self._parts.scheme == "https" else 80)


def _is_server(parts: SplitResult) -> bool:
    try:
        has_port = parts.port != 0
    except ValueError:
        return False
    return (
        parts.scheme in ("http", "https")
        and bool(parts.hostname)
        and has_port
        and not ("@" in parts.netloc or parts.query or parts.fragment)
    )


def _read(response: http.client.HTTPResponse) -> dict[str, Any]:
    body = response.read(MAX_JSON + 1)
    if len(body) > MAX_JSON:
        raise http.client.HTTPException(f"the answer has more than {MAX_JSON} bytes; is this a sampling server?")
    try:
        answer = json.loads(body)
    except ValueError as error:
        raise http.client.HTTPException(f"the answer is not JSON ({error}); is this a sampling server?") from error
    if not isinstance(answer, dict):
        raise http.client.HTTPException("the answer is not a JSON object; is this a sampling server?")
    return answer


def _message(line: bytes) -> dict[str, Any]:
    """Parse a line of an answer with rollouts; a blank one is a heartbeat."""
    if len(line) > _MAX_LINE:
        raise ValueError(f"a line has more than {_MAX_LINE} bytes; is this a sampling server?")
    message = json.loads(line) if line.strip() else {}
    if not isinstance(message, dict):
        raise ValueError("a line is not a JSON object; is this a sampling server?")
    return message


def _rollout_index(index: Any, found: list[list[dict[str, Any]]]) -> tuple[int, int]:
    """Index of a rollout in the result; refuses unrequested and repeated ones, or an answer might never end."""
    missing = (
        (request_index, number)
        for request_index, rollouts in enumerate(found)
        for number, rollout in enumerate(rollouts)
        if not rollout
    )
    place = tuple(index) if isinstance(index, list) else index
    if place not in missing:
        raise ValueError(f"the rollout {str(index)[:100]} was not requested, or has already arrived")
    return place


def _error(response: http.client.HTTPResponse) -> dict[str, Any]:
    try:
        return _read(response)
    except (OSError, http.client.HTTPException):
        return {"error": response.reason}


def _early_answer(connection: http.client.HTTPConnection) -> http.client.HTTPResponse | None:
    try:
        return connection.getresponse()
    except (OSError, http.client.HTTPException):
        return None


def _without_secrets(url: str) -> str:
    """The url without user name and password."""
    scheme, divider, rest = url.rpartition("://")
    return f"{scheme}{divider}{rest.rpartition('@')[2]}"
