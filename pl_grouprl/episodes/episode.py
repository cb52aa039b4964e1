"""An episode in progress: its tokens so far, which of them the model wrote, and the messages that they encode."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pl_grouprl.episodes.limits import EpisodeLimits, smallest
from pl_grouprl.episodes.runner import Session
from pl_grouprl.episodes.tools import ToolCall, ToolResult
from pl_grouprl.types import FinishReason, LiveObject, Media, Messages, Rollout


@dataclass
class Episode:
    """One rollout of a prompt over several turns.

    Attributes:
        prompt_index: Index of its prompt in the batch of all ranks.
        stream: Identifies its random numbers; see `Unfinished`.
        session: Its tools and environment.
        prompt_ids: The prompt as this rollout reads it, with the environment's observation.
        prompt: The prompt as messages; None if it is the dataset's, without an observation.
        media: Images and videos of the prompt.
        token_ids: Tokens after the prompt: the model's and the tools'.
        loss_mask: 1 where the model wrote the token.
        logprobs: Log-probability of each token, 0 if the model did not write it; None if the sampler reports none.
        messages: `token_ids` as chat messages.
        calls: Calls of the last turn, not yet made.
        iterations: How many times the model has read results.
        finish_reason: Why it ended; None while it is open.
        counts: `calls` of tools, and failed calls by kind.
        seconds: Time spent in its tools.
        path: See `Rollout.branch_path`.
        points: See `Rollout.branch_points`.
    """

    prompt_index: int
    stream: int
    session: Session
    prompt_ids: list[int]
    prompt: Messages | None = None
    media: Media = field(default_factory=dict)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    iterations: int = 0
    finish_reason: FinishReason | None = None
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    path: tuple[int, ...] = ()
    points: tuple[int, ...] = ()
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
            max_new_tokens - sum(self.loss_mask),
            None if limits.max_episode_tokens is None else limits.max_episode_tokens - len(self.token_ids),
            None if max_length is None else max_length - len(self.prompt_ids) - len(self.token_ids),
        )
        assert room is not None
        return room

    def fork(self, count: int, width: int) -> list[Episode]:
        """Its continuations from here on, itself among them: `count` of them, of at most `width`."""
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
        if message is not None:
            self.messages.append(message)

    def add_results(self, results: Sequence[ToolResult], token_ids: Sequence[int]) -> None:
        """Append results of tools, and the tokens that the model reads for them."""
        self.messages += [result.message for result in results]
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        if self.logprobs is not None:
            self.logprobs += [0.0] * len(token_ids)
        self.iterations += 1

    def count(self, results: Sequence[ToolResult]) -> None:
        """Count calls and failures, including those whose results do not fit."""
        self.counts["calls"] += len(results)
        self.counts.update(result.failure for result in results if result.failure is not None)
        self.seconds += sum(result.seconds for result in results)

    def rollout(self, shared_prompt: int, text: str | None) -> Rollout:
        """The finished rollout.

        Args:
            shared_prompt: Number of prompt tokens that all rollouts of the group share; the rest begin the rollout.
            text: The completion as a string.
        """
        observation_ids = self.prompt_ids[shared_prompt:]
        num_observed = len(observation_ids)
        mask = [0] * num_observed + self.loss_mask
        return Rollout(
            token_ids=observation_ids + self.token_ids,
            logprobs=None if self.logprobs is None else [0.0] * num_observed + self.logprobs,
            loss_mask=None if all(mask) else mask,
            finish_reason=self.finish_reason,
            text=text,
            messages=self.messages,
            prompt=self.prompt,
            num_observation_tokens=num_observed,
            tool_counts={**{name: float(count) for name, count in self.counts.items()}, "seconds": self.seconds},
            branch_points=self.points,
            branch_path=self.path,
            environment_reward=self.session.reward,
            environment_name=self.session.reward_name,
            environment=None if self.session.environment is None else LiveObject(self.session.environment),
        )
