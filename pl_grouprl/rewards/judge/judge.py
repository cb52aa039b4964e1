"""A reward function that asks a language model for grades."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.conventions import ground_truth_of
from pl_grouprl.rewards.judge.cache import ReplyCache
from pl_grouprl.rewards.judge.client import ChatClient, NoReplyError
from pl_grouprl.rewards.judge.grade import ReplyFormat, read_grade, response_format
from pl_grouprl.rewards.judge.rubric import Rubric
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.background_loop import BackgroundLoop
from pl_grouprl.utilities.optional import HTTPX_AVAILABLE, require
from pl_grouprl.utilities.options import check_options

log = logging.getLogger(__name__)

_FIXED = ("messages", "model", "n", "stream")
_TRIAL = "(This only tests the connection. Any grade on the scale will do.)"


@dataclass(frozen=True)
class _Verdict:
    """The outcome of one request: a grade, or why there is none, and numbers to log."""

    grade: float | None = None
    failure: str = ""
    cached: bool = False
    numbers: dict[str, float] = field(default_factory=dict)


@checked_arguments
class Judge:
    """The grade that a language model gives to a completion by a rubric, from 0 (lowest) to 1 (highest).

    The model is asked over HTTP (`POST {base_url}/chat/completions`, the protocol of OpenAI, which vLLM, llama.cpp and
    others serve), at temperature 0. Has TRL's signature and is async: all completions of a rank are graded at the same
    time, `max_concurrent` requests at once.

    Prompts, completions and columns are marked as data in the request, by a marker that they cannot contain, and the
    model is told to follow no instruction in them. A completion without a readable grade on the scale has failed: it
    gets no reward, is counted in `rewards/Judge/invalid` and by the run's `max_failed_share`. Logged with each batch:
    `grade` (on the scale), `cached` (share of grades that needed no request), and per request `latency` (seconds),
    `prompt_tokens` and `completion_tokens`.

    When a run is set up, one trial request is made, so that a wrong address, model, key or format fails there.

    Args:
        base_url: Address of the API, with its version: `http://localhost:8000/v1`.
        model: Name of the model as the server knows it.
        rubric: What earns which grade. Plain text, after which prompt and completion follow; or a template with
            `{completion}` and, if wanted, `{prompt}`, `{reference}` (the row's reference, found as for functions of
            verl's signature) and any column. `{{name}}` stands for a literal `{name}`. The reward does not apply to
            rows in which one of the values is None.
        scale: The lowest and the highest grade.
        reply_format: `text` asks for a last line `Grade: N`, `json` for an object with a `score`; `json_schema` also
            makes the server enforce it (structured output), which not every server can.
        max_tokens: Tokens of a reply. A reply that is cut off has failed.
        extra_body: Further fields of the request, such as `seed`; null removes a field. For a model that refuses
            `max_tokens`: `{max_tokens: null, max_completion_tokens: 2048}`.
        api_key_env: Name of the environment variable with the API key, if the server wants one. The key itself is read
            for each batch, and never stored, logged or saved.
        max_concurrent: Requests under way at a time, per process.
        timeout: Seconds for each attempt at a request.
        max_retries: How often a request is retried after status 429 or 5xx, a broken connection or a timeout, with
            exponential pauses up to a minute, or as long as `Retry-After` says. Other statuses are not retried.
        cache_dir: A folder that keeps the replies, for all ranks and for later runs. None: only this process remembers
            its latest replies. Requests are looked up by their whole body.

    Raises:
        ModuleNotFoundError: If httpx is not installed (extra `judge`).
        ValueError: If an option is out of range or malformed.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        rubric: str,
        *,
        scale: tuple[float, float] = (0.0, 10.0),
        reply_format: ReplyFormat = "text",
        max_tokens: int = 1024,
        extra_body: dict[str, Any] | None = None,
        api_key_env: str | None = None,
        max_concurrent: int = 16,
        timeout: float = 120.0,
        max_retries: int = 5,
        cache_dir: str | None = None,
    ) -> None:
        require(HTTPX_AVAILABLE, "Judge", "judge")
        check_options(
            {
                "Judge.scale": (scale, scale[0] < scale[1], "the lowest grade, then the highest"),
                "Judge.max_tokens": (max_tokens, max_tokens >= 1, "at least 1"),
                "Judge.max_concurrent": (max_concurrent, max_concurrent >= 1, "at least 1"),
                "Judge.timeout": (timeout, timeout > 0, "larger than 0"),
                "Judge.max_retries": (max_retries, max_retries >= 0, "0 or larger"),
            }
        )
        _check_url(base_url)
        _check_variable(api_key_env)
        if fixed := sorted(set(extra_body or {}) & set(_FIXED)):
            raise ValueError(f"Judge.extra_body has {fixed}, which Judge sets itself; leave them out.")
        self.base_url = base_url
        self.model = model
        self.rubric = rubric
        self.scale = scale
        self.reply_format: ReplyFormat = reply_format
        self.max_tokens = max_tokens
        self.extra_body = extra_body or {}
        self.api_key_env = api_key_env
        self.max_concurrent = max_concurrent
        self.timeout = timeout
        self.max_retries = max_retries
        self.cache_dir = cache_dir
        self._rubric = Rubric(rubric, scale, reply_format)
        self._trial_passed = False
        self._connect()

    def __repr__(self) -> str:
        return f"Judge({self.base_url!r}, {self.model!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out replies and connections."""
        kept = {name: value for name, value in vars(self).items() if name not in ("_client", "_cache")}
        return kept | {"_trial_passed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._connect()

    def run_options(self) -> dict[str, Any]:
        """The options that decide its rewards; the others only change how they are obtained."""
        names = ("model", "rubric", "scale", "reply_format", "max_tokens", "extra_body")
        return {name: getattr(self, name) for name in names}

    def set_up(self) -> None:
        """Make a trial request, once.

        Raises:
            RewardConfigurationError: If the server does not answer it with a grade.
        """
        if self._trial_passed:
            return
        loop = BackgroundLoop("judge-trial")  # a notebook has one running on this thread
        try:
            verdict = loop.submit("Judge", self._make_trial()).result()
        finally:
            loop.close()
        if verdict.grade is None:
            raise RewardConfigurationError(
                f"{self!r}: a trial request to {self._client.url} gave no grade: {verdict.failure}. Check base_url "
                "(which ends in /v1 on most servers), model, api_key_env and reply_format."
            )
        self._trial_passed = True

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Refuse a row that lacks what the rubric shows.

        Raises:
            ValueError: Names what is missing.
        """
        values = _values(columns)
        missing = sorted(self._rubric.fields - values.keys() - {"prompt", "completion"})
        if missing:
            raise ValueError(
                f"Judge.rubric has the fields {missing}, and the row has {sorted(values)}; add the column, or write "
                "{{name}} where {name} is not a field."
            )

    async def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[dict[str, Any] | None]:
        """Grade completions.

        Returns:
            For each completion its reward as `score` (NaN if it failed), and numbers to log; None where the reward does
            not apply.

        Raises:
            RewardConfigurationError: If the environment variable with the key is not set.
            ValueError: As `check_row` does.
        """
        requests = [
            self._request(prompt, completion, {name: values[index] for name, values in columns.items()})
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        verdicts = await self._grade_all(list(dict.fromkeys(body for body in requests if body is not None)))
        failures = [verdicts[body].failure for body in requests if body is not None and verdicts[body].failure]
        if failures:
            log.warning(
                "%r gave no grade for %d of %d completions: %s.", self, len(failures), len(requests), failures[0]
            )
        scores: list[dict[str, Any] | None] = []
        for body in requests:
            scores.append(None if body is None else self._score(verdicts[body]))
            if body is not None:  # the same completion again costs no request
                verdicts[body] = replace(verdicts[body], cached=True, numbers={})
        return scores

    def _score(self, verdict: _Verdict) -> dict[str, Any]:
        if verdict.grade is None:
            return {"score": math.nan}
        least, most = self.scale
        score = (verdict.grade - least) / (most - least)
        return {"score": score, "grade": verdict.grade, "cached": float(verdict.cached), **verdict.numbers}

    def _request(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> bytes | None:
        """The body of a request; None where the reward does not apply."""
        self.check_row(columns)
        values = {**_values(columns), "prompt": prompt, "completion": completion}
        if any(values[name] is None for name in self._rubric.fields):
            return None
        return self._body(values)

    def _body(self, values: Mapping[str, Any]) -> bytes:
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens}
        if self.reply_format == "json_schema":
            body["response_format"] = response_format(self.scale)
        body |= {**self.extra_body, "messages": self._rubric.messages(values)}
        return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True).encode()

    async def _grade_all(self, bodies: Sequence[bytes]) -> dict[bytes, _Verdict]:
        verdicts = {body: verdict for body in bodies if (verdict := self._cached_verdict(body)) is not None}
        unknown = [body for body in bodies if body not in verdicts]
        if unknown:
            async with self._client.session(self._api_key()) as session:
                graded = await asyncio.gather(*(self._ask(session, body) for body in unknown))
            verdicts |= zip(unknown, graded, strict=True)
        return verdicts

    def _cached_verdict(self, body: bytes) -> _Verdict | None:
        reply = self._cache.get(_digest(body))
        verdict = _Verdict() if reply is None else self._read(reply)
        return None if verdict.grade is None else replace(verdict, cached=True)

    async def _ask(self, session: Any, body: bytes) -> _Verdict:
        try:
            reply, seconds = await session.ask(body)
        except NoReplyError as error:
            return _Verdict(failure=str(error))
        verdict = self._read(reply.text)
        if verdict.grade is None:
            return verdict
        self._cache.put(_digest(body), reply.text)
        tokens = {"prompt_tokens": float(reply.prompt_tokens), "completion_tokens": float(reply.completion_tokens)}
        return replace(verdict, numbers={"latency": seconds, **tokens})

    def _read(self, reply: str) -> _Verdict:
        try:
            return _Verdict(read_grade(reply, self.reply_format, self.scale))
        except ValueError as error:
            return _Verdict(failure=f"{error} in the reply {reply[-200:]!r}")

    async def _make_trial(self) -> _Verdict:
        async with self._client.session(self._api_key()) as session:
            return await self._ask(session, self._body(dict.fromkeys(self._rubric.fields, _TRIAL)))

    def _api_key(self) -> str | None:
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env, "").strip()
        if not (key and key.isascii() and key.isprintable()):
            raise RewardConfigurationError(
                f"{self!r}: the environment variable {self.api_key_env} (api_key_env) "
                f"{'has characters that no header may have' if key else 'is not set'}; set it to the API key."
            )
        return key

    def _connect(self) -> None:
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        self._client = ChatClient(url, self.max_concurrent, self.timeout, self.max_retries)
        self._cache = ReplyCache(self.cache_dir)


def _values(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns, and its `reference` if it has one."""
    reference = ground_truth_of(columns)
    return {**({} if reference is None else {"reference": reference}), **columns}


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid or parts.query or parts.fragment:
        raise ValueError(f"Judge.base_url is {url!r}; it must be like http://localhost:8000/v1.")
    if "@" in parts.netloc:
        raise ValueError("Judge.base_url has a user name or password; put a key into a variable: api_key_env.")


def _check_variable(name: str | None) -> None:
    if name is not None and not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise ValueError(
            "Judge.api_key_env is not the name of an environment variable (its value is not shown, as it might be the "
            "key); put the key into a variable and pass the variable's name, such as OPENAI_API_KEY."
        )
