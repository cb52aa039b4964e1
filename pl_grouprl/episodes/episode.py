"""An episode in progress: its tokens so far, which of them the model wrote, and the messages that they encode."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pl_grouprl.episodes.limits import EpisodeLimits, smallest
from pl_grouprl.episodes.runner import Session
from pl_grouprl.episodes.tools import ToolCall, ToolResult
from pl_grouprl.types import NOT_SAMPLED, FinishReason, LiveObject, Media, Messages, Rollout


class RowTokens(NamedTuple):
    """The tokens and messages of one row; see the attributes of `Episode`."""

    prompt_ids: list[int]
    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float] | None
    weight_versions: list[int] | None
    messages: Messages


@dataclass
class Episode:
    """One rollout of a prompt over several turns.

    Attributes:
        prompt_index: Index of its prompt in the batch of all ranks.
        stream: Identifies its random numbers; see `PartialRollout`.
        session: Its tools and environment.
        prompt_ids: The prompt as this rollout reads it, with the environment's observation.
        prompt: The prompt as messages; None if it is the dataset's, without an observation.
        opening: The messages of the prompt, observation included.
        media: Images and videos of the prompt.
        token_ids: Tokens after the prompt: the model's and the tools'.
        loss_mask: 1 where the model wrote the token.
        logprobs: Log-probability of each token, 0 if the model did not write it; None if the sampler reports none.
        weight_versions: See `Rollout.weight_versions`.
        messages: `token_ids` as chat messages.
        calls: Calls of the last turn, not yet made.
        iterations: How many times the model has read results.
        finish_reason: Why it ended; None while it is open.
        counts: `calls` of tools, and failed calls by kind.
        seconds: Time spent in its tools.
        path: See `Rollout.branch_path`.
        points: See `Rollout.branch_points`.
        earlier_rows: Rows that ended because the chat template rewrote the history. The fields above are the current
            row's, whose `prompt_ids` is the part of the prompt that the new history still begins with.
    """

    prompt_index: int
    stream: int
    session: Session
    prompt_ids: list[int]
    prompt: Messages | None = None
    opening: Messages = field(default_factory=list)
    media: Media = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    weight_versions: list[int] | None = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    iterations: int = 0
    finish_reason: FinishReason | None = None
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    path: tuple[int, ...] = ()
    points: tuple[int, ...] = ()
    earlier_rows: list[RowTokens] = field(default_factory=list)
    _last_prompt: list[int] = field(default_factory=list)

    @property
    def is_open(self) -> bool:
        """Whether the model still has something to write."""
        return self.finish_reason is None

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return self.prompt_ids + self.token_ids

    def next_prompt(self) -> list[int]:
        """All tokens so far, as the prompt of the next turn; asserts that it extends the previous turn's prompt."""
        history = self.history
        assert history[: len(self._last_prompt)] == self._last_prompt
        self._last_prompt = history
        return history

    def turn_limit(self, max_new_tokens: int, limits: EpisodeLimits, max_length: int | None) -> int:
        """Most tokens of the next turn; 0 or less if there is no room for one.

        Args:
            max_new_tokens: Most tokens that the model may write in the episode.
            limits: Further limits.
            max_length: Longest sequence of the model, prompt included; None if unknown.
        """
        room = smallest(
            limits.max_turn_tokens,
            max_new_tokens - sum(sum(row.loss_mask) for row in self.rows),
            None if limits.max_episode_tokens is None else limits.max_episode_tokens - len(self.token_ids),
            None if max_length is None else max_length - len(self.prompt_ids) - len(self.token_ids),
        )
        assert room is not None
        return room

    def fork(self, count: int, width: int) -> list[Episode]:
        """Its `count` continuations from here on, itself the first; streams are numbered as if there were `width`."""
        path, points, stream = self.path, (*self.points, len(self.token_ids)), self.stream * width
        self.stream = stream
        if count == 1:
            return [self]
        forks = [self, *(copy.deepcopy(self, {id(self.media): self.media}) for _ in range(1, count))]
        for number, fork in enumerate(forks):
            fork.stream, fork.path, fork.points = stream + number, (*path, number), points
        return forks

    def add_turn(self, sampled: Rollout, message: dict[str, Any] | None) -> None:
        """Append what the model wrote, and the message it was parsed into."""
        self.token_ids += sampled.token_ids
        self.loss_mask += [1] * len(sampled.token_ids)
        if self.logprobs is not None:
            self.logprobs = None if sampled.logprobs is None else self.logprobs + list(sampled.logprobs)
        if self.weight_versions is not None:
            versions = sampled.weight_versions
            self.weight_versions = None if versions is None else self.weight_versions + list(versions)
        if message is not None:
            self.messages.append(message)

    def add_results(self, results: Sequence[ToolResult], token_ids: Sequence[int]) -> None:
        """Append results of tools, and the tokens that the model reads for them."""
        self.messages += [result.message for result in results]
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(token_ids)
        if self.weight_versions is not None:
            self.weight_versions += [NOT_SAMPLED] * len(token_ids)
        self.iterations += 1

    def begin_row(self, results: Sequence[ToolResult], context_ids: Sequence[int]) -> None:
        """Append results of tools and begin a new row, because the chat template has rewritten the history.

        Args:
            results: The results.
            context_ids: All tokens that the model reads before the turn.
        """
        self.earlier_rows.append(self.rows[-1])
        self.messages = [*self.messages, *(result.message for result in results)]
        kept = common_length([self.prompt_ids, context_ids])
        self.prompt_ids, self.token_ids = list(context_ids[:kept]), list(context_ids[kept:])
        self.loss_mask = [0] * len(self.token_ids)
        self.logprobs = None if self.logprobs is None else [0.0] * len(self.token_ids)
        unsampled = [NOT_SAMPLED] * len(self.token_ids)
        self.weight_versions = None if self.weight_versions is None else unsampled
        self._last_prompt = []
        self.iterations += 1

    @property
    def rows(self) -> list[RowTokens]:
        """All rows so far, the current one last."""
        tokens = self.prompt_ids, self.token_ids, self.loss_mask, self.logprobs, self.weight_versions
        current = RowTokens(*tokens, self.messages)
        return [*self.earlier_rows, current]

    def count(self, results: Sequence[ToolResult]) -> None:
        """Count calls and failures, including those whose results do not fit."""
        self.counts["calls"] += len(results)
        self.counts.update(result.failure for result in results if result.failure is not None)
        self.seconds += sum(result.seconds for result in results)

    def rollouts(self, name: int, shared_prompt: int, decode: Callable[[list[int]], str]) -> list[Rollout]:
        """The finished rollout, or its rows.

        Args:
            name: `Rollout.episode` of several rows.
            shared_prompt: Number of prompt tokens that all rows of the group share; the rest begin the rollout.
            decode: Returns the text of the tokens after the prompt.
        """
        *earlier, last = (_rollout(row, shared_prompt, decode) for row in self.rows)
        finished = replace(
            last,
            finish_reason=self.finish_reason,
            tool_counts={**{name: float(count) for name, count in self.counts.items()}, "seconds": self.seconds},
            branch_points=self.points,
            branch_path=self.path,
            environment_reward=self.session.reward,
            environment_name=self.session.reward_name,
            environment=None if self.session.environment is None else LiveObject(self.session.environment),
        )
        return [replace(row, prompt=self.prompt, episode=name if earlier else None) for row in (*earlier, finished)]


def _rollout(row: RowTokens, shared_prompt: int, decode: Callable[[list[int]], str]) -> Rollout:
    """One row as a rollout, its `finish_reason` that of a row the model ended."""
    observation_ids = row.prompt_ids[shared_prompt:]
    num_observed = len(observation_ids)
    mask = [0] * num_observed + row.loss_mask
    return Rollout(
        token_ids=observation_ids + row.token_ids,
        logprobs=None if row.logprobs is None else [0.0] * num_observed + row.logprobs,
        weight_versions=None if row.weight_versions is None else [NOT_SAMPLED] * num_observed + row.weight_versions,
        loss_mask=None if all(mask) else mask,
        finish_reason="stop",
        text=decode(row.token_ids),
        messages=row.messages,
        num_observation_tokens=num_observed,
    )


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    places = (place for place, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1)
    return next(places, min(map(len, rows)))
