"""Samples episodes in rounds: all open episodes write a turn, then their tools run, then they read the results."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from pl_grouprl.chat import ChatFormat
from pl_grouprl.data.encoding import EMPTY_PROMPT
from pl_grouprl.episodes.runner import Session, ToolRunner
from pl_grouprl.episodes.tools import ToolCall, ToolResult
from pl_grouprl.rollout.branching import Branching, RoundSampler, first_own_token, fork_unfinished
from pl_grouprl.types import NOT_SAMPLED, FinishReason, LiveObject, Media, Messages, Prompt, Rollout
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import run_concurrently

# Limits on the length of an episode.


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, besides `sampling.max_new_tokens`, which limits the tokens that the model writes in it.

    Attributes:
        max_tool_calling_iterations: How many times the model may call tools and read their results; it then answers
            once more, and calls in that answer are not executed. None is no limit.
        max_turn_tokens: Most tokens that the model writes in one turn; None is no limit.
        max_episode_tokens: Most tokens after the prompt, tool results included; None leaves only the limit of the
            model's context.

    Raises:
        ValueError: If a limit is out of range.
    """

    max_tool_calling_iterations: int | None = None
    max_turn_tokens: int | None = None
    max_episode_tokens: int | None = None

    def __post_init__(self) -> None:
        lowest = {"max_tool_calling_iterations": 0, "max_turn_tokens": 1, "max_episode_tokens": 1}
        values = {name: getattr(self, name) for name in lowest}
        check_options(
            {
                name: (value, value is None or value >= lowest[name], f"at least {lowest[name]}, or None for no limit")
                for name, value in values.items()
            }
        )


def smallest(*limits: int | None) -> int | None:
    """The smallest of some limits, where None is no limit."""
    known = [limit for limit in limits if limit is not None]
    return min(known, default=None)


# The arguments of an environment's `reset`, and how its observation joins the prompt.


def row_of(prompt: Prompt) -> dict[str, Any]:
    """The keyword arguments of `reset`: the dataset's columns, and the prompt unless the environment writes it."""
    written = {} if prompt.prompt == EMPTY_PROMPT else {"prompt": prompt.prompt}
    return written | prompt.columns


def add_observation(prompt: Prompt, observation: str) -> Messages:
    """The messages of a prompt, with the environment's observation at the end of the last one."""
    if isinstance(prompt.prompt, str):
        raise ValueError(f"{prompt.where or 'a row'}: the prompt is a string; tools and environments need messages.")
    *before, last = prompt.prompt
    content = last["content"]
    if isinstance(content, str):
        content += observation
    else:
        content = [*content, {"type": "text", "text": observation}]
    return [*before, {**last, "content": content}]


# An episode in progress: its tokens so far, which of them the model wrote, and the messages that they encode.


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


# Samples episodes in rounds: all open episodes write a turn, then their tools run, then they read the results.
#
# If the sampler takes several calls at once, each episode has its own rounds instead, and waits for no other.
#
# Sampled tokens are never re-tokenized: the next turn's prompt is this turn's prompt, its tokens, and the tokens of the
# tool results.
#
# Legend: P prompts, G rollouts of each.

_FIRST_CHARACTERS = 2**14
"""How much of a tool's result is encoded first; eight times more follows as long as it fits, up to the whole."""

_CUT_TOKENS = 16
"""By how many tokens a result may become shorter when what follows it is encoded, too."""


class EpisodeLoop:
    """Samples episodes of a run.

    Args:
        chat: Renders and parses the conversations.
        runner: Runs the tools and environments.
        limits: Limits on an episode's length.
        may_rewrite: Re-render the conversation before each turn, and begin a new row of the episode where the chat
            template changes what the model has read.
        lock: Held while conversations are rendered and parsed, if several threads run the loop.

    Attributes:
        runner: As passed.
    """

    def __init__(
        self,
        chat: ChatFormat,
        runner: ToolRunner,
        limits: EpisodeLimits,
        *,
        may_rewrite: bool = False,
        lock: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.runner, self._chat, self._limits, self._may_rewrite = runner, chat, limits, may_rewrite
        self._lock = nullcontext() if lock is None else lock

    def run(
        self,
        sampler: RoundSampler[Episode],
        prompts: Sequence[Prompt],
        prompt_indices: Sequence[int],
        max_new_tokens: int,
        num_generations: int,
        branching: Branching | None = None,
    ) -> tuple[list[Prompt], list[list[Rollout]]]:
        """Sample `num_generations` episodes of each prompt.

        Args:
            sampler: Samples the turns.
            prompts: Open prompts, P of them.
            prompt_indices: Index of each in the batch of all ranks.
            max_new_tokens: Most tokens that the model writes in an episode.
            num_generations: G.
            branching: How episodes branch between turns, which needs tools and no environments; None for not at all.

        Returns:
            The prompts, each cut to what its rollouts share, and each prompt's rollouts, one per row of an episode.
        """
        episodes: list[Episode] = []

        def begin() -> None:
            episodes.extend(self._begin(prompts, prompt_indices, num_generations))  # from here on they are released
            with self._lock:
                for number, episode in enumerate(episodes):
                    self._read_prompt(prompts[number // num_generations], episode)
            if branching is not None:
                for episode in episodes:
                    episode.path = (episode.stream % num_generations,)
            _check_lengths(episodes, sampler.max_length)

        try:
            sampler.raise_together(begin)
            if sampler.is_concurrent:
                alone = [[episode] for episode in episodes]
                run_concurrently([partial(self._run_turns, sampler, one, max_new_tokens, branching) for one in alone])
            else:
                self._run_turns(sampler, episodes, max_new_tokens, branching)
            sampler.raise_together(lambda: self.runner.finish([episode.session for episode in episodes]))
        finally:
            self.runner.release([episode.session for episode in episodes])
        groups = [[one for one in episodes if one.prompt_index == index] for index in prompt_indices]
        with self._lock:
            finished = [self._finish(prompt, group) for prompt, group in zip(prompts, groups, strict=True)]
        return [prompt for prompt, _ in finished], [rollouts for _, rollouts in finished]

    def _begin(self, prompts: Sequence[Prompt], prompt_indices: Sequence[int], num_generations: int) -> list[Episode]:
        rows = [row_of(prompt) for prompt in prompts for _ in range(num_generations)]
        sessions = iter(self.runner.begin(rows))
        return [
            Episode(index, stream, next(sessions), prompt.token_ids, media=prompt.media)
            for prompt, index in zip(prompts, prompt_indices, strict=True)
            for stream in range(index * num_generations, (index + 1) * num_generations)
        ]

    def _run_turns(
        self,
        sampler: RoundSampler[Episode],
        episodes: list[Episode],
        max_new_tokens: int,
        branching: Branching | None,
    ) -> None:
        turn = 0
        while sampler.any_open(any(episode.is_open for episode in episodes)):
            sampler.raise_together(partial(self._advance, sampler, turn, episodes, max_new_tokens, branching))
            turn += 1

    def _read_prompt(self, prompt: Prompt, episode: Episode) -> None:
        """Encode the prompt of an episode, if its session or the chat format changes it."""
        observation, messages = episode.session.observation, prompt.prompt
        if observation is not None:
            messages = episode.prompt = add_observation(prompt, observation)
        if observation is not None or self._chat.encodes_prompts:
            assert not isinstance(messages, str)  # refused when the data was read
            episode.prompt_ids = self._chat.encode_prompt(messages, self.runner.schemas(episode.session.kind))
        if self._may_rewrite:
            episode.opening = self._check_rewritable(prompt, messages)

    @staticmethod
    def _check_rewritable(prompt: Prompt, messages: str | Messages) -> Messages:
        assert not isinstance(messages, str)  # refused when the data was read
        if prompt.media or messages[-1]["role"] == "assistant":
            what = "has images or videos" if prompt.media else "ends in a message that the model continues"
            raise ValueError(
                f"rewritten_history is 'new_row', but {prompt.where or 'a prompt'} {what}, so the conversation cannot "
                "be re-rendered; use a chat template that does not rewrite the history, and 'refuse'."
            )
        return messages

    def _advance(
        self,
        sampler: RoundSampler[Episode],
        turn: int,
        episodes: list[Episode],
        max_new_tokens: int,
        branching: Branching | None,
    ) -> None:
        """Let the model write one turn of each open episode, then run the tools that it calls."""

        def limit_of(episode: Episode) -> int:
            return episode.turn_limit(max_new_tokens, self._limits, sampler.max_length)

        for episode in episodes:
            if episode.is_open and limit_of(episode) <= 0:
                episode.finish_reason = "length"
        if branching is not None and 0 < turn <= branching.depth:
            episodes[:] = fork_episodes(episodes, branching, max_new_tokens)
        writing = [episode for episode in episodes if episode.is_open]
        sampled = sampler.sample(turn, writing, [limit_of(episode) for episode in writing])
        for episode, rollout in zip(writing, sampled, strict=True):
            self._take_turn(episode, rollout)
        self._call_tools([episode for episode in writing if episode.is_open], sampler.max_length)

    def _take_turn(self, episode: Episode, sampled: Rollout) -> None:
        with self._lock:
            message = self._read_turn(episode, sampled.token_ids) if sampled.token_ids else None
        episode.add_turn(sampled, message)
        allowed, calls = self._limits.max_tool_calling_iterations, (message or {}).get("tool_calls") or []
        if sampled.finish_reason == "length" or not calls or (allowed is not None and episode.iterations >= allowed):
            episode.finish_reason = sampled.finish_reason or "stop"
        else:
            episode.calls = [_read_call(call) for call in calls]

    def _read_turn(self, episode: Episode, token_ids: Sequence[int]) -> dict[str, Any]:
        """Parse a turn into a message; without tools it is plain text."""
        if not self.runner.has_tools:
            return self._chat.plain_message(token_ids)
        return self._chat.parse(token_ids, episode.history, self.runner.schemas(episode.session.kind))

    def _call_tools(self, episodes: Sequence[Episode], max_length: int | None) -> None:
        """Execute the calls of a turn; if an episode's results do not fit, it drops them all and ends."""
        results = self.runner.call([(episode.session, episode.calls) for episode in episodes])
        for episode, answers in zip(episodes, results, strict=True):
            episode.count(answers)
            history = episode.history
            with self._lock:
                next_ids = self._read_results(episode, history, answers, max_length)
            if not self._fits(len(next_ids) - len(episode.prompt_ids), len(next_ids), max_length):
                episode.finish_reason = "length"
            elif next_ids[: len(history)] == history:
                episode.add_results(answers, next_ids[len(history) :])
            else:
                episode.begin_row(answers, next_ids)

    def _read_results(
        self, episode: Episode, history: list[int], answers: Sequence[ToolResult], max_length: int | None
    ) -> list[int]:
        """All tokens that the model reads before its next turn; only the first of them if they do not fit by far."""
        characters = _FIRST_CHARACTERS
        while True:
            results = [{**answer.message, "content": answer.content[:characters]} for answer in answers]
            if not self._may_rewrite:
                next_ids = history + self._chat.encode_results(results)
            else:
                messages = [*episode.opening, *episode.messages, *results]
                next_ids = self._chat.encode_history(history, messages, self.runner.schemas(episode.session.kind))
            least = len(next_ids) - _CUT_TOKENS
            is_whole = all(len(answer.content) <= characters for answer in answers)
            if is_whole or not self._fits(least - len(episode.prompt_ids), least, max_length):
                return next_ids
            characters *= 8

    def _fits(self, length: int, total: int, max_length: int | None) -> bool:
        most = self._limits.max_episode_tokens
        return (most is None or length <= most) and (max_length is None or total < max_length)

    def _finish(self, prompt: Prompt, episodes: Sequence[Episode]) -> tuple[Prompt, list[Rollout]]:
        shared = common_length([row.prompt_ids for episode in episodes for row in episode.rows])
        decode = partial(self._chat.tokenizer.decode, skip_special_tokens=True)
        rollouts = [row for name, one in enumerate(episodes) for row in one.rollouts(name, shared, decode)]
        return replace(prompt, token_ids=episodes[0].prompt_ids[:shared]), rollouts


def fork_episodes(episodes: Sequence[Episode], branching: Branching, max_new_tokens: int) -> list[Episode]:
    """Continue each open episode `width` times, within the budget."""
    sampled = Counter[int]()
    for episode in episodes:
        sampled[episode.prompt_index] += sum(episode.loss_mask[first_own_token(episode.path, episode.points) :])
    return fork_unfinished(episodes, branching, sampled, lambda episode: max_new_tokens - sum(episode.loss_mask))


def _check_lengths(episodes: Sequence[Episode], max_length: int | None) -> None:
    """Refuse prompts that observations made too long for an answer; dataset prompts were checked at setup."""
    longest = max((len(episode.prompt_ids) for episode in episodes), default=0)
    if max_length is not None and longest >= max_length:
        raise ValueError(
            f"a prompt has {longest} tokens including what its environment's reset returned, but the model and its "
            f"sampler take at most {max_length} including the answer; return less text from reset."
        )


def _read_call(call: dict[str, Any]) -> ToolCall:
    """Read a call in OpenAI's nested format, or a flat one."""
    function = call.get("function", call)
    return ToolCall(function["name"], function.get("arguments") or {}, call.get("type", "function"))
