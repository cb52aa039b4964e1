"""The data of a run: prompts, rollouts, groups of rollouts, and how to sample them."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any, Literal

from pl_grouprl.utilities.options import check_fields

__all__ = [
    "NOT_SAMPLED",
    "EpisodeRows",
    "FinishReason",
    "LiveObject",
    "Media",
    "Messages",
    "Prompt",
    "Rollout",
    "RolloutGroup",
    "SamplingConfig",
    "is_per_token",
]

Messages = list[dict[str, Any]]
"""A conversation in chat format: dictionaries with `role` and `content`."""

Media = dict[str, Any]
"""Images and videos of a prompt or rollout as the model reads them: CPU tensors, by the names of its keyword arguments.

Names that end in `token_type_ids` (`mm_token_type_ids`, `token_type_ids`) have one entry per token, shape [tokens]; all
others (`pixel_values`, `image_grid_thw`, ...) have their images, videos or patches along the first axis.
"""


def is_per_token(name: str) -> bool:
    """Whether the media of this name have one entry per token, not per image, video or patch."""
    return name.endswith("token_type_ids")


@dataclass
class Prompt:
    """One prompt, ready for the sampler.

    Attributes:
        token_ids: The prompt as the model reads it, chat template applied.
        prompt: What the data set held: a string, or a list of messages.
        columns: Every other column of the row; reward functions receive them.
        data_source: Name under which validation metrics are reported.
        media: What a processor made of the prompt's images and videos besides the tokens; see `Media`. Empty for text.
        where: The file and line, or the row, that it was read from, for error messages; empty if unknown.
    """

    token_ids: list[int]
    prompt: str | Messages = ""
    columns: dict[str, Any] = field(default_factory=dict)
    data_source: str = "default"
    media: Media = field(default_factory=dict)
    where: str = ""

    @property
    def num_tokens(self) -> int:
        """Number of tokens as the model reads them; a lower bound while images or videos are not processed yet."""
        return len(self.token_ids)

    def open(self) -> Prompt:
        """The prompt as the model reads it: itself, unless its images and videos have still to be processed."""
        return self


NOT_SAMPLED = -1
"""In `Rollout.weight_versions`, a token that the model did not write."""

FinishReason = Literal["stop", "length"]
"""`stop`: the model ended by itself (end token, stop token or stop string). `length`: cut at the limit."""


class LiveObject:
    """A reference to an object that must not be copied: copies share it, and pickles are without it.

    Attributes:
        value: The object; None in another process.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def __copy__(self) -> LiveObject:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> LiveObject:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return LiveObject, ()


@dataclass
class Rollout:
    """One sampled completion.

    Attributes:
        token_ids: The sampled tokens, the end token included where the model produced one. May be empty.
        logprobs: Log-probability of each token as the sampler computed it, at the sampling temperature (1 for greedy
            decoding) over the whole vocabulary: after the repetition penalty, which the policy is trained without, and
            before top-k, top-p and min-p. An engine that can only report them after these declares
            `truncates_logprobs`.
        loss_mask: 1 where a token is trained, 0 where it is only context (tool output). None trains every token.
        finish_reason: Why the completion ended.
        reward: The combined reward, `token_rewards` included; None where no reward function applied; such a rollout is
            not trained.
        rewards: The reward of each function by name, before weighting; the sum where it gave rewards per token.
        failed_rewards: Names of the functions that failed on this rollout; their `rewards` are None.
        reward_numbers: The further numbers in the dictionaries that functions returned, as `{function}/{key}`.
        token_rewards: For reward functions that reward tokens or turns, the weighted sum of what they gave each token
            (a turn's reward is at its last token); None (or NaN) for a token without a reward.
        text: The completion as a string, without special tokens.
        messages: For an episode (see `pl_grouprl.episodes`), the completion as chat messages: the model's, with
            `tool_calls`, and the results of tools. None for a plain completion.
        prompt: The messages before the completion, if an environment added its observation to the group's prompt.
        num_observation_tokens: How many of the first `token_ids` belong to that prompt, if rollouts of a group have
            different ones; these are not trained.
        tool_counts: For an episode, `calls` and `seconds` of tools, and how many calls failed by the kind of failure;
            see `pl_grouprl.episodes.tools.ToolResult`.
        environment_reward: What the environment's `get_reward` returned, NaN if it failed; None if it has no such
            method.
        environment_step_rewards: For each of the episode's turns, the sum of what the environment's `get_step_reward`
            returned after its calls, NaN if it failed; None for a turn without a reward.
        environment_name: The class of that environment, which names its rewards; None if it gives none.
        environment_numbers: Further numbers of the environment, by name; `EnvironmentReward` logs their means.
        environment: The environment itself, for reward functions; None once the rollout has left its process.
        branch_points: For branching rollouts, where in `token_ids` the tree of the group branches along this rollout:
            increasing indices of the first token after each branch point. Empty without branching.
        branch_path: Which continuation this rollout takes at the prompt and then at each branch point, one number more
            than `branch_points`. Rollouts whose first k + 1 numbers are equal share a segment: the tokens from
            branch point k - 1 (the prompt if k = 0) to branch point k (the end if there is none). Empty without
            branching.
        episode: Rollouts of a group with the same value are rows of one episode, see `EpisodeRows`. With None, the
            rollout is a whole episode.
        weight_versions: Version of the weights that each token was sampled from, `NOT_SAMPLED` where the model did not
            write it; None if all come from the weights that the engine had when sampling started. From an engine, as
            given to its `update_weights`; in a run with `max_staleness`, counted in batches of prompts.
        routed_experts: For router replay, the experts of each token in each mixture of the model, a CPU tensor of
            int16, shape [tokens, mixtures, experts per token]; -1 for a token that the sampler did not run, such as the
            last. An engine returns those of the prompt's tokens in front, which the `RolloutGroup` then takes.
        media: The images in `token_ids`, such as a tool returned; see `Media`. Empty for text.
    """

    token_ids: list[int]
    logprobs: list[float] | None = None
    loss_mask: list[int] | None = None
    finish_reason: FinishReason | None = None
    reward: float | None = None
    rewards: dict[str, float | None] = field(default_factory=dict)
    failed_rewards: list[str] = field(default_factory=list)
    reward_numbers: dict[str, float] = field(default_factory=dict)
    text: str | None = None
    token_rewards: list[float | None] | None = None
    messages: Messages | None = None
    prompt: Messages | None = None
    num_observation_tokens: int = 0
    tool_counts: dict[str, float] = field(default_factory=dict)
    environment_reward: float | None = None
    environment_step_rewards: list[float | None] = field(default_factory=list)
    environment_name: str | None = None
    environment_numbers: dict[str, float] = field(default_factory=dict)
    environment: LiveObject | None = field(default=None, compare=False, repr=False)
    branch_points: tuple[int, ...] = ()
    branch_path: tuple[int, ...] = ()
    episode: int | str | None = None
    weight_versions: list[int] | None = None
    routed_experts: Any = field(default=None, compare=False, repr=False)
    media: Media = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("logprobs", "loss_mask", "token_rewards", "weight_versions"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"Rollout.{name} has {len(values)} entries for {len(self.token_ids)} token_ids; pass one per token."
                )
        if not (self.branch_points or self.branch_path):
            return
        self.branch_points, self.branch_path = tuple(self.branch_points), tuple(self.branch_path)
        places = (0, *self.branch_points, len(self.token_ids) + 1)
        increases = all(left < right for left, right in pairwise(places))
        if len(self.branch_path) != len(self.branch_points) + 1 or not increases:
            raise ValueError(
                f"Rollout.branch_points is {self.branch_points} and branch_path {self.branch_path} for "
                f"{len(self.token_ids)} token_ids; pass increasing indices from 1 to the number of tokens, and one "
                "number more."
            )

    @property
    def completion_ids(self) -> list[int]:
        """The tokens after the prompt that this rollout saw: the model's and, in an episode, the results of tools."""
        return self.token_ids[self.num_observation_tokens :]

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens the model wrote; the others are context."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def num_turns(self) -> int:
        """How many turns the model took; 1 for a plain completion."""
        return 1 if self.messages is None else sum(message["role"] == "assistant" for message in self.messages)

    @property
    def step_rewards(self) -> dict[int, float]:
        """The rewards of tokens by position, in order; empty if the rollout has no reward."""
        if self.reward is None or math.isnan(self.reward):
            return {}
        rewards = enumerate(self.token_rewards or ())
        return {place: reward for place, reward in rewards if reward is not None and not math.isnan(reward)}

    @property
    def outcome_reward(self) -> float | None:
        """The part of the reward that belongs to the completion as a whole, not to one of its tokens."""
        return EpisodeRows((self,)).outcome_reward


@dataclass(slots=True)  # created often; a named tuple or a frozen class would take twice as long
class EpisodeRows:
    """One sampled episode: a single rollout, or several rows if its history was rewritten along the way.

    A chat template that strips the thinking of earlier turns, a summary, or a sub-agent changes the model's context in
    the middle of an episode. What the model writes from there on is a new row, which begins with the new context
    (`loss_mask` 0). Statistics and losses treat the rows, one after another, as one sequence of tokens: a rewritten
    history is a step of the environment, like the result of a tool.

    All rows have the episode's reward; each may have token rewards. The last row has the episode's finish reason, text,
    messages, tool calls and environment, and the number of observation tokens that reward functions skip.

    Attributes:
        rows: The rows, in the order in which they were sampled.
    """

    rows: tuple[Rollout, ...]

    @property
    def last(self) -> Rollout:
        """The last row, which reward functions see."""
        return self.rows[-1]

    @property
    def reward(self) -> float | None:
        """The reward of the episode, which all rows have.

        Raises:
            ValueError: If rows have different rewards.
        """
        reward = self.last.reward
        if len(self.rows) == 1:
            return reward
        others = [row.reward for row in self.rows if row.reward != reward]
        if others and not all(value is None or math.isnan(value) for value in (reward, *others)):
            raise ValueError(
                f"reward is {[row.reward for row in self.rows]} in the rows of episode {self.last.episode!r}; give all "
                "of them the reward of the episode."
            )
        return reward

    @property
    def step_rewards(self) -> dict[int, float]:
        """The rewards of tokens by their position in the rows, one row after another; empty without a reward."""
        found: dict[int, float] = {}
        start = 0
        for row in self.rows:
            if row.token_rewards is not None:
                found |= {start + place: reward for place, reward in row.step_rewards.items()}
            start += len(row.token_ids)
        return found

    @property
    def outcome_reward(self) -> float | None:
        """The part of the reward that belongs to the episode as a whole, not to one of its tokens."""
        reward = self.reward
        if reward is None:
            return None
        for row in self.rows:  # `any` takes twice as long
            if row.token_rewards is not None:
                return reward - math.fsum(self.step_rewards.values())
        return reward

    @property
    def turns(self) -> list[tuple[int, int]]:
        """First token and end of each turn, a run of tokens that the model wrote, as positions in the rows."""
        found: list[tuple[int, int]] = []
        end = 0
        for row in self.rows:
            for written, tokens in groupby(row.loss_mask or [1] * len(row.token_ids)):
                start, end = end, end + len(list(tokens))
                if written:
                    found.append((start, end))
        return found

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows after their prompt."""
        return sum([len(row.token_ids) for row in self.rows])

    @property
    def num_sampled_tokens(self) -> int:
        """How many tokens the model wrote."""
        return sum([row.num_sampled_tokens for row in self.rows])


@dataclass
class RolloutGroup:
    """One prompt and the rollouts sampled from it. Groups may have any number of rollouts, of any length.

    Attributes:
        prompt_ids: Tokens of the prompt, at least one.
        rollouts: The completions. Rows of one episode follow each other, in the order in which they were sampled.
        group_id: Names the group in logs and tables.
        columns: Columns of the data set that reward functions receive.
        prompt: The prompt as the data set held it: a string, or a list of messages.
        data_source: Name under which validation metrics are reported.
        media: The images and videos of the prompt, as a processor made them; see `Media`. Empty for text.
        routed_experts: For router replay, the experts of the prompt's tokens, as in `Rollout.routed_experts`: those of
            the first rollout that comes with them, since all rollouts share one encoding of the prompt.
    """

    prompt_ids: list[int]
    rollouts: list[Rollout]
    group_id: Hashable | None = None
    columns: dict[str, Any] = field(default_factory=dict)
    prompt: str | Messages = ""
    data_source: str = "default"
    media: Media = field(default_factory=dict)
    routed_experts: Any = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not self.prompt_ids:
            raise ValueError(
                "RolloutGroup.prompt_ids is empty; pass at least one token, from which the first one follows."
            )
        for rollout in self.rollouts:
            if rollout.routed_experts is not None:
                self._take_prompt_experts(rollout)
        if not self._names_episodes:
            return
        names = [episode.last.episode for episode in self.episodes if episode.last.episode is not None]
        if len(set(names)) < len(names):
            raise ValueError(
                f"Rollout.episode is {[rollout.episode for rollout in self.rollouts]} in the rollouts of a group; pass "
                "the rows of an episode one after another."
            )

    def _take_prompt_experts(self, rollout: Rollout) -> None:
        own, record = len(rollout.token_ids), rollout.routed_experts
        if len(record) == own:
            return
        if len(record) != len(self.prompt_ids) + own:
            raise ValueError(
                f"Rollout.routed_experts has records of {len(record)} tokens for {len(self.prompt_ids)} of the prompt "
                f"and {own} token_ids; pass one for each."
            )
        if self.routed_experts is None:
            self.routed_experts = record[: len(self.prompt_ids)].clone()  # not a view, which keeps all of them
        rollout.routed_experts = record[len(self.prompt_ids) :].clone()

    @property
    def has_media(self) -> bool:
        """Whether the prompt or a rollout has images or videos."""
        return bool(self.media) or any(rollout.media for rollout in self.rollouts)

    @property
    def _names_episodes(self) -> bool:
        """Whether any rollout has an `episode`; if none has, each rollout is one episode."""
        return bool([rollout for rollout in self.rollouts if rollout.episode is not None])  # `any` takes twice as long

    @property
    def episodes(self) -> list[EpisodeRows]:
        """The episodes in the order of their rollouts."""
        if not self._names_episodes:
            return [EpisodeRows((rollout,)) for rollout in self.rollouts]
        numbered = enumerate(self.rollouts)
        by_name = groupby(numbered, lambda pair: (None, pair[0]) if pair[1].episode is None else (pair[1].episode, -1))
        return [EpisodeRows(tuple(rollout for _, rollout in rows)) for _, rows in by_name]

    @property
    def rows_per_episode(self) -> list[int]:
        """Number of rows of each episode."""
        return [len(episode.rows) for episode in self.episodes] if self._names_episodes else [1] * len(self.rollouts)


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled.

    Attributes:
        max_new_tokens: Longest completion in tokens; longer ones end with finish reason `length`.
        temperature: Divides the logits; 0 means greedy decoding.
        top_p: Keeps the smallest set of tokens whose probability reaches this; 1 keeps all.
        top_k: Keeps the k most likely tokens; 0 keeps all.
        min_p: Drops tokens less likely than this fraction of the most likely one; 0 keeps all.
        repetition_penalty: Divides positive logits of tokens that occur in the prompt or the completion so far, and
            multiplies negative ones, before the temperature and in greedy decoding too (CTRL, arXiv:1909.05858, section
            4.1). 1 is off; below 1 encourages repetition.
        stop: Strings that end a completion. The tokens that complete the string are kept.
        stop_token_ids: Tokens that end a completion, besides the model's own end tokens and the one with which the chat
            template ends a turn. Kept in the completion.
    """

    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):  # each letter would end a completion
            raise ValueError(f"SamplingConfig.stop is the string {self.stop!r}; pass a list, [{self.stop!r}].")
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_fields(
            self,
            max_new_tokens=(self.max_new_tokens >= 1, "at least 1"),
            temperature=(self.temperature >= 0, "0 (greedy) or larger"),
            top_p=(0 < self.top_p <= 1, "in (0, 1]"),
            top_k=(self.top_k >= 0, "0 (off) or larger"),
            min_p=(0 <= self.min_p <= 1, "in [0, 1]"),
            repetition_penalty=(self.repetition_penalty > 0, "above 0; 1 is off"),
        )

    @property
    def is_truncated(self) -> bool:
        """Whether top-k, top-p or min-p may exclude tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
