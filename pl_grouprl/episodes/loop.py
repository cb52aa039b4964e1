"""Samples episodes in rounds: all open episodes write a turn, then their tools run, then they read the results.

If the sampler takes several calls at once, each episode has its own rounds instead, and waits for no other.

Sampled tokens are never re-tokenized: the next turn's prompt is this turn's prompt, its tokens, and the tokens of the
tool results.

Legend: P prompts, G rollouts of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from pl_grouprl.chat import ChatFormat
from pl_grouprl.episodes.episode import Episode, common_length
from pl_grouprl.episodes.limits import EpisodeLimits
from pl_grouprl.episodes.observations import add_observation, row_of
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.episodes.tools import ToolCall, ToolResult
from pl_grouprl.rollout.branch_loop import RoundSampler, first_own_token, fork_unfinished
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.types import Messages, Prompt, Rollout
from pl_grouprl.utilities.threads import run_concurrently

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
