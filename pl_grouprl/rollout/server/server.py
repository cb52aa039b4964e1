"""The trainer's client of one sampling server, for updating its weights; `sequences` does the sampling."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any
from urllib.parse import SplitResult, urlsplit

import httpx2

from pl_grouprl.rollout.server.auth import check_token
from pl_grouprl.utilities.text import mask_secret

_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Seconds between two attempts to reach a server."""

_TOO_MANY = 429
"""HTTP status of an overloaded server or proxy."""

_DEFAULT_PORTS = {"http": 80, "https": 443}

_NO_SAMPLER = "this is not a sampling server; start one with python -m pl_grouprl.rollout.server."


class RefusedError(RuntimeError):
    """The server answered with an error.

    Attributes:
        status: HTTP status.
        is_busy: Whether the server, or a proxy in front of it, is overloaded.
    """

    def __init__(self, url: str, status: int, reason: str) -> None:
        self.status = status
        self.is_busy = status == _TOO_MANY
        super().__init__(f"the sampling server at {url} answers {status}: {reason[:2000]}")


class Server:
    """A client of one server; thread-safe. Calls are not retried.

    Args:
        url: `http://host:port`, or `https://...`.
        token: The server's token.
        timeout: Seconds that it may be unreachable, and the time limit of each call.

    Raises:
        ValueError: If the url or the token is malformed.
    """

    def __init__(self, url: str, *, token: str | None = None, timeout: float = 300.0) -> None:
        self._parts = urlsplit(url)
        if not _is_server_url(self._parts):
            raise ValueError(f"urls has {_without_secrets(url)!r}; it must be like http://127.0.0.1:8000.")
        check_token(token, "token")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.token = token

    def post(self, path: str, body: dict[str, Any] | None = None, **options: Any) -> Any:
        """Post to a route, with httpx2's `options`; return the decoded answer.

        Raises:
            RefusedError: If the server answers with an error.
            httpx2.TransportError: If it cannot be reached, or takes too long.
        """
        return self.decode(self._http.post(path, json=body, **options))

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method of all workers (`rollout.vllm.worker.WeightReceiver`); return each worker's result."""
        answer = self.post("/collective_rpc", {"method": method, "args": list(args)})
        return answer["results"] if answer else []

    def label(self) -> str:
        """The label of its weights."""
        return self.decode(self._http.get("/weight_info"))["weight_version"]

    def describe(self) -> dict[str, Any]:
        """The description of its first worker (`WeightReceiver.describe`), and the number of `workers`."""
        workers = self.rpc("describe")
        return {**workers[0], "workers": len(workers)}

    def wait(self) -> str:
        """Wait until the server can be reached. Returns the label of its weights.

        Raises:
            RefusedError: If it refuses, such as for a wrong token.
            RuntimeError: If it stays unreachable for longer than `timeout`.
        """
        reason: Exception | None = None
        for seconds in self.pauses():
            try:
                return self.label()
            except (httpx2.TransportError, RefusedError) as error:
                reason = self.temporary_or_raise(error)
                time.sleep(seconds)
        raise self.unreachable_error(reason)

    def pauses(self) -> Iterator[float]:
        """Seconds to wait between attempts to reach the server, until `timeout` has passed."""
        wait, ends = _FIRST_WAIT, time.monotonic() + self.timeout
        while time.monotonic() + wait < ends:
            yield wait
            wait = min(2 * wait, _LONGEST_WAIT)

    def temporary_or_raise(self, error: Exception) -> Exception:
        """Return an error that may pass (the server is unreachable, busy, starting or stopping); raise any other."""
        if isinstance(error, RefusedError) and error.status < 500 and not error.is_busy:
            raise error
        return error

    def unreachable_error(self, reason: Exception | None) -> RuntimeError:
        """The error to raise for a server that stays unreachable."""
        return RuntimeError(
            f"the sampling server at {self.url} did not come back within {self.timeout:g} seconds "
            f"({type(reason).__name__}: {reason}). Start it (python -m pl_grouprl.rollout.server --model ... "
            f"--host {self._parts.hostname} --port {self._parts.port or _DEFAULT_PORTS[self._parts.scheme]}), or raise "
            "timeout."
        )

    def decode(self, response: httpx2.Response) -> Any:
        """Decode an answer.

        Raises:
            RefusedError: If it is an error, or not from a sampling server.
        """
        if response.status_code != 200:
            raise RefusedError(self.url, response.status_code, mask_secret(_reason(response), self.token))
        try:
            return response.json() if response.content else None
        except ValueError:
            raise RefusedError(self.url, 404, _NO_SAMPLER) from None

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options of httpx2's clients: no proxies, and no keep-alive connections, which the server may have closed."""
        return {
            "base_url": self.url,
            "headers": {} if self.token is None else {"Authorization": f"Bearer {self.token}"},
            "trust_env": False,
            "limits": httpx2.Limits(max_keepalive_connections=0),
            "verify": httpx2.create_ssl_context() if self._parts.scheme == "https" else False,
        }

    @cached_property
    def _http(self) -> httpx2.Client:
        return httpx2.Client(timeout=self.timeout, **self.options)


def _reason(response: httpx2.Response) -> str:
    """The reason for a refusal, which vLLM puts into `error`, `error.message` or `detail`."""
    if response.status_code == 404:
        return _NO_SAMPLER
    try:
        answer = response.json()
        reason = answer.get("error") or answer.get("detail") or answer
        return str(reason.get("message", reason) if isinstance(reason, dict) else reason)
    except (ValueError, AttributeError):
        return response.reason_phrase


def _is_server_url(parts: SplitResult) -> bool:
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


def _without_secrets(url: str) -> str:
    """The url without user name and password."""
    scheme, divider, rest = url.rpartition("://")
    return f"{scheme}{divider}{rest.rpartition('@')[2]}"
