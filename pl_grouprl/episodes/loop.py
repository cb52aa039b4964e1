"""Samples episodes in rounds: all open episodes write a turn, then their tools run, then they read the results.

If the sampler takes several calls at once, each episode has its own rounds instead, and waits for none of the others.
Sampled tokens are never re-tokenized: the next turn's prompt is this turn's prompt, its tokens, and the tokens of the
tool results.

Legend: P prompts, G rollouts of each.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.chat import ChatFormat
from pl_grouprl.data.encoding import EMPTY_PROMPT
from pl_grouprl.episodes.runner import Session, ToolRunner
from pl_grouprl.episodes.tools import ToolCall, ToolResult
from pl_grouprl.packing.batch import concat_media
from pl_grouprl.rollout.branching import Branching, RoundSampler, continued_experts, first_own_token, fork_unfinished
from pl_grouprl.types import NOT_SAMPLED, FinishReason, LiveObject, Media, Messages, Prompt, Rollout
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.processes import run_concurrently

_FIRST_CHARACTERS = 2**14
"""How much of a tool's result is encoded first; eight times more follows as long as it fits, up to the whole."""

_CUT_TOKENS = 16
"""By how many tokens a result may become shorter when what follows it is encoded, too."""


@dataclass(frozen=True)
class EpisodeLimits:
    """Limits of an episode, besides `sampling.max_new_tokens`, which limits the tokens that the model writes in it.

    Attributes:
        max_tool_calling_iterations: How many times the model may call tools and read their results; it then answers
            once more, and calls in that answer are not executed. No limit if None.
        max_turn_tokens: Maximum number of tokens that the model writes in one turn; no limit if None.
        max_tokens: Maximum number of tokens after the prompt, tool results included; if None, only the model's
            context limits them.

    Raises:
        ValueError: If a limit is out of range.
    """

    max_tool_calling_iterations: int | None = None
    max_turn_tokens: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, lowest in (("max_tool_calling_iterations", 0), ("max_turn_tokens", 1), ("max_tokens", 1)):
            value = getattr(self, name)
            valid = value is None or value >= lowest
            check_options({f"episodes.{name}": (value, valid, f"at least {lowest}, or None for no limit")})


def smallest(*limits: int | None) -> int | None:
    """The smallest of some limits; no limit if all are None."""
    return min((limit for limit in limits if limit is not None), default=None)


def common_length(rows: Sequence[Sequence[int]]) -> int:
    """Length of the longest prefix that all rows share."""
    places = (place for place, column in enumerate(zip(*rows, strict=False)) if len(set(column)) > 1)
    return next(places, min(map(len, rows)))


@dataclass
class EpisodeRow:
    """One row of an episode's tokens. An episode has several if the chat template rewrites the history.

    Attributes:
        prompt_ids: The prompt as the episode reads it, with the environment's observation; in a later row, the part of
            it that the new history still begins with.
        token_ids: Tokens after the prompt: the model's and the tools'.
        loss_mask: 1 where the model wrote the token.
        logprobs: Log-probability of each token, 0 if the model did not write it; None if the sampler reports none.
        weight_versions: See `Rollout.weight_versions`.
        messages: `token_ids` as chat messages.
        routed_experts: See `Rollout.routed_experts`, of all tokens so far up to the last turn's, prompt included.
        media: The images in `token_ids`.
    """

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] | None = field(default_factory=list)
    weight_versions: list[int] | None = field(default_factory=list)
    messages: Messages = field(default_factory=list)
    routed_experts: Tensor | None = None
    media: Media = field(default_factory=dict)

    @property
    def history(self) -> list[int]:
        """All tokens so far."""
        return self.prompt_ids + self.token_ids

    def add(self, token_ids: Sequence[int], turn: Rollout | None = None, media: Media | None = None) -> None:
        """Append tokens that the model wrote in a turn or reads before the next, with images in them."""
        count = len(token_ids)
        self.media = concat_media([(self.media, len(self.token_ids)), (media or {}, count)])
        logprobs = [0.0] * count if turn is None else turn.logprobs
        versions = [NOT_SAMPLED] * count if turn is None else turn.weight_versions
        self.token_ids += token_ids
        self.loss_mask += [0 if turn is None else 1] * count
        self.logprobs = None if self.logprobs is None or logprobs is None else [*self.logprobs, *logprobs]
        if self.weight_versions is not None:
            self.weight_versions = None if versions is None else [*self.weight_versions, *versions]
        if turn is not None and turn.routed_experts is not None:
            self.routed_experts = continued_experts(self.routed_experts, turn.routed_experts)

    def rollout(self, shared_prompt: int, decode: Callable[[list[int]], str]) -> Rollout:
        """The row as a rollout of a prompt of `shared_prompt` tokens; its `finish_reason` says that the model ended."""
        observation_ids = self.prompt_ids[shared_prompt:]
        num_observed = len(observation_ids)
        mask = [0] * num_observed + self.loss_mask
        versions, record = self.weight_versions, self.routed_experts
        if record is not None:  # results of tools after the last turn have none
            missing = len(self.history) - len(record)
            record = torch.cat([record, record.new_full((missing, *record.shape[1:]), -1)])
        return Rollout(
            token_ids=observation_ids + self.token_ids,
            logprobs=None if self.logprobs is None else [0.0] * num_observed + self.logprobs,
            weight_versions=None if versions is None else [NOT_SAMPLED] * num_observed + versions,
            loss_mask=None if all(mask) else mask,
            finish_reason="stop",
            text=decode(self.token_ids),
            messages=self.messages,
            num_observation_tokens=num_observed,
            routed_experts=record,
            media=concat_media([({}, num_observed), (self.media, len(self.token_ids))]),
        )


@dataclass
class Episode:
    """One rollout of a prompt over several turns.

    Attributes:
        prompt_index: Index of its prompt in the batch of all ranks.
        stream: Identifies its random numbers; see `PartialRollout`.
        session: Its tools and environment.
        rows: Its tokens, the current row last.
        prompt: The prompt as messages; None if it is the dataset's, without an observation.
        opening: The messages of the prompt, observation included.
        prompt_media: Images and videos of the prompt.
        calls: Calls of the last turn, not yet made.
        iterations: How many times the model has read results.
        finish_reason: Why it ended; None while it is open.
        counts: `calls` of tools, and failed calls by kind.
        seconds: Time spent in its tools.
        step_rewards: See `Rollout.environment_step_rewards`.
        path: See `Rollout.branch_path`.
        points: See `Rollout.branch_points`.
    """

    prompt_index: int
    stream: int
    session: Session
    rows: list[EpisodeRow]
    prompt: Messages | None = None
    opening: Messages = field(default_factory=list)
    prompt_media: Media = field(default_factory=dict)
    calls: list[ToolCall] = field(default_factory=list)
    iterations: int = 0
    finish_reason: FinishReason | None = None
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    step_rewards: list[float | None] = field(default_factory=list)
    path: tuple[int, ...] = ()
    points: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether the model still has something to write."""
        return self.finish_reason is None

    @property
    def row(self) -> EpisodeRow:
        """The current row."""
        return self.rows[-1]

    @property
    def media(self) -> Media:
        """Images and videos of all tokens so far."""
        row = self.row
        return concat_media([(self.prompt_media, len(row.prompt_ids)), (row.media, len(row.token_ids))])

    def next_prompt(self) -> list[int]:
        """All tokens so far, as the prompt of the next turn."""
        return self.row.history

    def turn_limit(self, max_new_tokens: int, limits: EpisodeLimits, max_length: int | None) -> int:
        """Maximum number of tokens of the next turn; 0 or less if there is no room for one.

        Args:
            max_new_tokens: Maximum number of tokens that the model may write in the episode.
            limits: Further limits.
            max_length: Maximum sequence length of the model, prompt included; None if unknown.
        """
        room = smallest(
            limits.max_turn_tokens,
            max_new_tokens - sum(sum(row.loss_mask) for row in self.rows),
            None if limits.max_tokens is None else limits.max_tokens - len(self.row.token_ids),
            None if max_length is None else max_length - len(self.row.prompt_ids) - len(self.row.token_ids),
        )
        assert room is not None
        return room

    def fork(self, count: int, width: int) -> list[Episode]:
        """Its `count` continuations from here on, itself the first; streams are numbered as if there were `width`."""
        path, points = self.path, (*self.points, len(self.row.token_ids))
        self.stream *= width
        if count == 1:
            return [self]
        media = {id(own): own for own in (self.prompt_media, *(row.media for row in self.rows))}  # not copied
        forks = [self, *(copy.deepcopy(self, dict(media)) for _ in range(1, count))]
        for number, fork in enumerate(forks):
            fork.stream, fork.path, fork.points = self.stream + number, (*path, number), points
        return forks

    def add_results(self, results: Sequence[ToolResult], next_ids: list[int], media: Media) -> None:
        """Append results of tools. A new row begins if the chat template has rewritten the history.

        Args:
            results: The results.
            next_ids: All tokens that the model reads before its next turn.
            media: The images in the results.
        """
        row, history = self.row, self.row.history
        if next_ids[: len(history)] != history:
            kept = common_length([row.prompt_ids, next_ids])
            logprobs: list[float] | None = None if row.logprobs is None else []
            versions: list[int] | None = None if row.weight_versions is None else []
            row = EpisodeRow(next_ids[:kept], [], [], logprobs, versions, list(row.messages))
            self.rows.append(row)
        row.add(next_ids[len(row.history) :], media=media)
        row.messages += [result.message for result in results]
        self.iterations += 1

    def rollouts(self, name: int, shared_prompt: int, decode: Callable[[list[int]], str]) -> list[Rollout]:
        """The finished rollout, or its rows.

        Args:
            name: `Rollout.episode` of several rows.
            shared_prompt: Number of prompt tokens that all rows of the group share; the rest begin the rollout.
            decode: Returns the text of the tokens after the prompt.
        """
        *earlier, last = (row.rollout(shared_prompt, decode) for row in self.rows)
        finished = replace(
            last,
            finish_reason=self.finish_reason,
            tool_counts={**{name: float(count) for name, count in self.counts.items()}, "seconds": self.seconds},
            branch_points=self.points,
            branch_path=self.path,
            environment_reward=self.session.reward,
            environment_step_rewards=self.step_rewards if self.session.reward_name is not None else [],
            environment_name=self.session.reward_name,
            environment=None if self.session.environment is None else LiveObject(self.session.environment),
        )
        return [replace(row, prompt=self.prompt, episode=name if earlier else None) for row in (*earlier, finished)]


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
        sampler: RoundSampler,
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
            max_new_tokens: Maximum number of tokens that the model writes in an episode.
            num_generations: G.
            branching: How episodes branch between turns, which needs tools and no environments; they do not branch if
                None.

        Returns:
            The prompts, each cut to the part that its rollouts share, and each prompt's rollouts, one per row of an
            episode.
        """
        episodes: list[Episode] = []

        def begin() -> None:
            opened = [prompt for prompt in prompts for _ in range(num_generations)]
            streams = [i * num_generations + number for i in prompt_indices for number in range(num_generations)]
            written = ({} if one.prompt == EMPTY_PROMPT else {"prompt": one.prompt} for one in opened)
            sessions = self.runner.begin([row | one.columns for row, one in zip(written, opened, strict=True)])
            for prompt, stream, session in zip(opened, streams, sessions, strict=True):
                row = EpisodeRow(prompt.token_ids)
                episodes.append(Episode(stream // num_generations, stream, session, [row], prompt_media=prompt.media))
                if branching is not None:
                    episodes[-1].path = (stream % num_generations,)
            with self._lock:  # from here on, the sessions are released
                for prompt, episode in zip(opened, episodes, strict=True):
                    self._read_prompt(prompt, episode)
            longest = max((len(episode.row.prompt_ids) for episode in episodes), default=0)
            if sampler.max_length is not None and longest >= sampler.max_length:  # setup checked the dataset's prompts
                raise ValueError(
                    f"a prompt has {longest} tokens including what its environment's reset returned, and the model "
                    f"takes at most {sampler.max_length} with the answer; return less text from reset."
                )

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
        decode = partial(self._chat.tokenizer.decode, skip_special_tokens=True)
        cut, rollouts = [], []
        with self._lock:
            for prompt, index in zip(prompts, prompt_indices, strict=True):
                group = [one for one in episodes if one.prompt_index == index]
                shared = common_length([row.prompt_ids for one in group for row in one.rows])
                cut.append(replace(prompt, token_ids=group[0].row.prompt_ids[:shared]))
                rollouts.append([row for name, one in enumerate(group) for row in one.rollouts(name, shared, decode)])
        return cut, rollouts

    def _read_prompt(self, prompt: Prompt, episode: Episode) -> None:
        """Encode the prompt of an episode, if its session or the chat format changes it."""
        observation, messages = episode.session.observation, prompt.prompt
        if observation is None and not self._chat.encodes_prompts and not self._may_rewrite:
            return
        assert not isinstance(messages, str)  # checked when the data was read
        if observation is not None:
            *before, last = messages
            content = last["content"]
            if isinstance(content, str):
                content += observation
            else:
                content = [*content, {"type": "text", "text": observation}]
            messages = episode.prompt = [*before, {**last, "content": content}]
        if observation is not None or self._chat.encodes_prompts:
            schemas = self.runner.schemas(episode.session.kind)
            episode.row.prompt_ids = self._chat.encode_prompt(messages, schemas)
        if self._may_rewrite:
            if prompt.media or messages[-1]["role"] == "assistant":
                what = "has images or videos" if prompt.media else "ends in a message that the model continues"
                raise ValueError(
                    f"episodes.rewritten_history is 'new_row', but {prompt.where or 'a prompt'} {what}, so the "
                    "conversation cannot be re-rendered; use a template that keeps the history, and 'refuse'."
                )
            episode.opening = messages

    def _run_turns(
        self, sampler: RoundSampler, episodes: list[Episode], max_new_tokens: int, branching: Branching | None
    ) -> None:
        turn = 0

        def limit_of(episode: Episode) -> int:
            return episode.turn_limit(max_new_tokens, self._limits, sampler.max_length)

        def advance() -> None:
            """Let the model write one turn of each open episode, then run the tools that it calls."""
            nonlocal turn
            for episode in episodes:
                if episode.is_open and limit_of(episode) <= 0:
                    episode.finish_reason = "length"
            if branching is not None and 0 < turn <= branching.depth:
                written = Counter[int]()
                for episode in episodes:
                    own = first_own_token(episode.path, episode.points)
                    written[episode.prompt_index] += sum(episode.row.loss_mask[own:])
                episodes[:] = fork_unfinished(
                    episodes, branching, written, lambda episode: max_new_tokens - sum(episode.row.loss_mask)
                )
            writing = [episode for episode in episodes if episode.is_open]
            sampled = sampler.sample(turn, writing, [limit_of(episode) for episode in writing])
            for episode, rollout in zip(writing, sampled, strict=True):
                self._take_turn(episode, rollout)
            self._call_tools([episode for episode in writing if episode.is_open], sampler.max_length)
            turn += 1

        while sampler.any_open(any(episode.is_open for episode in episodes)):
            sampler.raise_together(advance)

    def _take_turn(self, episode: Episode, sampled: Rollout) -> None:
        """Add what the model wrote, with the calls in it; without tools it is plain text."""
        message: dict[str, Any] = {}
        with self._lock:
            if sampled.token_ids and self.runner.has_tools:
                schemas = self.runner.schemas(episode.session.kind)
                message = self._chat.parse(sampled.token_ids, episode.row.history, schemas)
            elif sampled.token_ids:
                message = self._chat.plain_message(sampled.token_ids)
        episode.row.add(sampled.token_ids, sampled)
        if sampled.token_ids:
            episode.step_rewards.append(None)
        if message:
            episode.row.messages.append(message)
        allowed, calls = self._limits.max_tool_calling_iterations, message.get("tool_calls") or []
        if sampled.finish_reason == "length" or not calls or (allowed is not None and episode.iterations >= allowed):
            episode.finish_reason = sampled.finish_reason or "stop"
            return
        functions = [call.get("function", call) for call in calls]  # in OpenAI's nested format, or a flat one
        episode.calls = [
            ToolCall(function["name"], function.get("arguments") or {}, call.get("type", "function"))
            for call, function in zip(calls, functions, strict=True)
        ]

    def _call_tools(self, episodes: Sequence[Episode], max_length: int | None) -> None:
        """Execute the calls of a turn; if an episode's results do not fit, it drops them all and ends."""
        answers = self.runner.call([(episode.session, episode.calls) for episode in episodes])
        for episode, answer in zip(episodes, answers, strict=True):
            results = [
                result.without_images() if result.images and not self._chat.reads_images else result
                for result in answer
            ]
            episode.counts["calls"] += len(results)
            episode.counts.update(result.failure for result in results if result.failure is not None)
            episode.seconds += sum(result.seconds for result in results)
            if rewards := [result.reward for result in results if result.reward is not None]:
                episode.step_rewards[-1] = sum(rewards)
            most = smallest(
                None if max_length is None else max_length - 1,
                None if self._limits.max_tokens is None else self._limits.max_tokens + len(episode.row.prompt_ids),
            )
            with self._lock:
                next_ids, media = self._read_results(episode, results, most)
            if most is None or len(next_ids) <= most:
                episode.add_results(results, next_ids, media)
            else:
                episode.finish_reason = "length"

    def _read_results(
        self, episode: Episode, results: Sequence[ToolResult], most: int | None
    ) -> tuple[list[int], Media]:
        """All tokens that the model reads before its next turn, only some if they exceed `most` by far; new images."""
        history, characters, media = episode.row.history, _FIRST_CHARACTERS, dict[str, Any]()
        images = [image for result in results for _, image in result.images]
        if images and self._may_rewrite:
            raise ValueError(
                "episodes.rewritten_history is 'new_row', but a tool returned an image, so the conversation cannot be "
                "re-rendered; use a template that keeps the history, and 'refuse'."
            )
        while True:
            messages = [replace(result, content=result.content[:characters]).message for result in results]
            if images:
                added, media = self._chat.encode_results_with_images(messages, images)
                next_ids = history + added
            elif not self._may_rewrite:
                next_ids = history + self._chat.encode_results(messages)
            else:
                messages = [*episode.opening, *episode.row.messages, *messages]
                next_ids = self._chat.encode_history(history, messages, self.runner.schemas(episode.session.kind))
            is_whole = all(len(result.content) <= characters for result in results)
            if is_whole or (most is not None and len(next_ids) - _CUT_TOKENS > most):
                return next_ids, media
            characters *= 8
