"""A reward function that has a language model grade completions."""

from __future__ import annotations

import functools
import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pl_grouprl.rewards.base import RewardConfigurationError
from pl_grouprl.rewards.conventions import ground_truth_of
from pl_grouprl.rewards.judge.cache import ReplyCache
from pl_grouprl.rewards.judge.client import ChatClient
from pl_grouprl.rewards.judge.endpoint import chat_url, check_base_url, check_key_variable, read_key
from pl_grouprl.rewards.judge.grade import ReplyFormat, read_grade, response_format
from pl_grouprl.rewards.judge.rubric import Rubric
from pl_grouprl.rewards.judge.verdicts import Grader, Verdict
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.background_loop import BackgroundLoop
from pl_grouprl.utilities.options import check_options

log = logging.getLogger(__name__)

_SET_BY_JUDGE = ("messages", "model", "n", "stream")
"""Fields of a request that `extra_body` must not set."""

_TRIAL_TEXT = "(This only tests the connection. Any grade on the scale will do.)"


@checked_arguments
class Judge:
    """A language model's grade of a completion by a rubric, scaled to 0 (lowest) to 1 (highest).

    The model is queried over HTTP at temperature 0 (`POST {base_url}/chat/completions`, OpenAI's protocol, which vLLM,
    llama.cpp and others serve). Has TRL's signature and is async: all completions of a rank are graded concurrently,
    with `max_concurrent` requests at a time.

    In the request, prompts, completions and columns are enclosed in a marker that they cannot contain, and the model is
    told to follow no instruction in them. If the reply has no grade on the scale, the completion has failed: it gets no
    reward, is counted in `rewards/Judge/invalid`, and counts towards the run's `max_failed_share`. Logged with each
    batch: `grade` (on the scale), `cached` (share of grades that needed no request), and per request `latency`
    (seconds), `prompt_tokens` and `completion_tokens`.

    A trial request at setup reveals a wrong address, model, key or format.

    Args:
        base_url: Address of the API, with its version: `http://localhost:8000/v1`.
        model: Name of the model as the server knows it.
        rubric: What earns which grade. Plain text, to which prompt and completion are appended; or a template with
            `{completion}` and optionally `{prompt}`, `{reference}` (the row's reference, found as for functions of
            verl's signature) and any column. `{{name}}` is a literal `{name}`. The reward does not apply to
            rows where one of these is None.
        scale: The lowest and the highest grade.
        reply_format: `text` asks for a last line `Grade: N`, `json` for an object with a `score`; `json_schema` also
            makes the server enforce it (structured output), which not every server can.
        max_tokens: Most tokens of a reply; a reply that is cut off counts as failed.
        extra_body: Further fields of the request, such as `seed`; null removes a field. For a model that refuses
            `max_tokens`: `{max_tokens: null, max_completion_tokens: 2048}`.
        api_key_env: Name of the environment variable with the API key, if the server needs one. The key itself is read
            for each batch, and never stored or logged.
        max_concurrent: Requests in flight at a time, per process.
        timeout: Seconds for each attempt at a request.
        max_retries: Number of retries after status 429 or 5xx, a broken connection or a timeout, with exponential
            pauses of up to a minute, or as long as `Retry-After` says. Other statuses are not retried.
        cache_dir: Folder that keeps the replies for all ranks and later runs; None: each process remembers only its own
            latest replies. A reply is reused only for an identical request.

    Raises:
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
        check_options(
            {
                "Judge.scale": (scale, scale[0] < scale[1], "the lowest grade, then the highest"),
                "Judge.max_tokens": (max_tokens, max_tokens >= 1, "at least 1"),
                "Judge.max_concurrent": (max_concurrent, max_concurrent >= 1, "at least 1"),
                "Judge.timeout": (timeout, timeout > 0, "larger than 0"),
                "Judge.max_retries": (max_retries, max_retries >= 0, "0 or larger"),
            }
        )
        check_base_url(base_url)
        check_key_variable(api_key_env)
        if reserved := sorted(set(extra_body or {}) & set(_SET_BY_JUDGE)):
            raise ValueError(f"Judge.extra_body has {reserved}, which Judge sets itself; leave them out.")
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
        self._grader = self._make_grader()

    def __repr__(self) -> str:
        return f"Judge({self.base_url!r}, {self.model!r})"

    def __getstate__(self) -> dict[str, Any]:
        """Leave out connections and cached replies."""
        kept = {name: value for name, value in vars(self).items() if name != "_grader"}
        return kept | {"_trial_passed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._grader = self._make_grader()

    def run_options(self) -> dict[str, Any]:
        """The options that its rewards depend on; the others only change how they are obtained."""
        names = ("model", "rubric", "scale", "reply_format", "max_tokens", "extra_body")
        return {name: getattr(self, name) for name in names}

    def set_up(self) -> None:
        """Make a trial request, once.

        Raises:
            RewardConfigurationError: If the reply has no grade.
        """
        if self._trial_passed:
            return
        body = self._encode(dict.fromkeys(self._rubric.fields, _TRIAL_TEXT))
        loop = BackgroundLoop("judge-trial")  # this thread may already run a loop, as in notebooks
        try:
            verdict = loop.submit("Judge", self._grader.ask([body])).result()[body]
        finally:
            loop.close()
        if verdict.grade is None:
            raise RewardConfigurationError(
                f"{self!r}: a trial request to {chat_url(self.base_url)} gave no grade: {verdict.failure}. Check "
                "base_url (which ends in /v1 on most servers), model, api_key_env and reply_format."
            )
        self._trial_passed = True

    def check_row(self, columns: Mapping[str, Any]) -> None:
        """Refuse a row that lacks a field of the rubric.

        Raises:
            ValueError: Names what is missing.
        """
        values = _with_reference(columns)
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
            For each completion, its reward as `score` (NaN if it failed) and numbers to log; None if the reward does
            not apply.

        Raises:
            RewardConfigurationError: If the environment variable with the key is not set.
            ValueError: As for `check_row`.
        """
        bodies = [
            self._request(prompt, completion, {name: values[index] for name, values in columns.items()})
            for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True))
        ]
        verdicts = await self._grader.grade(list(dict.fromkeys(body for body in bodies if body is not None)))
        self._warn_of_failures([None if body is None else verdicts[body] for body in bodies])
        scores: list[dict[str, Any] | None] = []
        for body in bodies:
            if body is None:
                scores.append(None)
                continue
            scores.append(self._score(verdicts[body]))
            verdicts[body] = verdicts[body].repeated()  # for the same completion again
        return scores

    def _warn_of_failures(self, verdicts: Sequence[Verdict | None]) -> None:
        failures = [verdict.failure for verdict in verdicts if verdict is not None and verdict.failure]
        if failures:
            log.warning(
                "%r gave no grade for %d of %d completions: %s.", self, len(failures), len(verdicts), failures[0]
            )

    def _score(self, verdict: Verdict) -> dict[str, Any]:
        if verdict.grade is None:
            return {"score": math.nan}
        lowest, highest = self.scale
        score = (verdict.grade - lowest) / (highest - lowest)
        return {"score": score, "grade": verdict.grade, "cached": float(verdict.cached), **verdict.cost}

    def _request(self, prompt: Any, completion: Any, columns: Mapping[str, Any]) -> bytes | None:
        """The request to grade one completion; None if the reward does not apply."""
        self.check_row(columns)
        values = {**_with_reference(columns), "prompt": prompt, "completion": completion}
        return None if any(values[name] is None for name in self._rubric.fields) else self._encode(values)

    def _encode(self, values: Mapping[str, Any]) -> bytes:
        """The body of a request, with the rubric's fields filled in."""
        body: dict[str, Any] = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens}
        if self.reply_format == "json_schema":
            body["response_format"] = response_format(self.scale)
        body |= {**self.extra_body, "messages": self._rubric.messages(values)}
        return json.dumps({name: value for name, value in body.items() if value is not None}, sort_keys=True).encode()

    def _make_grader(self) -> Grader:
        return Grader(
            ChatClient(chat_url(self.base_url), self.max_concurrent, self.timeout, self.max_retries),
            ReplyCache(self.cache_dir),
            functools.partial(read_grade, reply_format=self.reply_format, scale=self.scale),
            functools.partial(read_key, self.api_key_env, repr(self)),
        )


def _with_reference(columns: Mapping[str, Any]) -> dict[str, Any]:
    """A row's columns, and its `reference` if it has one."""
    reference = ground_truth_of(columns)
    return {**({} if reference is None else {"reference": reference}), **columns}
