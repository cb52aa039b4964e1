"""Turns the traces of the library `verifiers` into rollouts.

A trace is a graph of messages; a branch is a path from its root to a leaf, and becomes a row of the episode.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pl_grouprl.episodes.loop import common_length
from pl_grouprl.types import FinishReason, Messages, Prompt, Rollout

WasSampled = Callable[[Sequence[int]], bool]
"""Whether the server read and wrote exactly these tokens."""


@dataclass
class Row:
    """A branch of a trace.

    Attributes:
        token_ids: All tokens, the prompt included.
        loss_mask: 1 for tokens that the model wrote, unless an earlier branch trains them.
        logprobs: Log-probability of each token, 0 if it is not trained.
        prompt: Messages that open the conversation.
        messages: The other messages, beginning with one of the model.
    """

    token_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    prompt: Messages
    messages: Messages

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first trained one."""
        return self.loss_mask.index(1)


@dataclass
class FinishedEpisode:
    """A finished episode.

    Attributes:
        rows: Its branches that are trained.
        reward: The sum of its rewards; NaN if it failed.
        numbers: Metrics and unweighted rewards, by name.
        finish_reason: Why it ended.
        tool_counts: See `Rollout.tool_counts`.
        failure: Why it failed; None if it did not.
    """

    rows: list[Row] = field(default_factory=list)
    reward: float = math.nan
    numbers: dict[str, float] = field(default_factory=dict)
    finish_reason: FinishReason = "stop"
    tool_counts: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def read_episode(episode: Any, was_sampled: WasSampled, ran_out: Callable[[str], bool]) -> FinishedEpisode:
    """Read a finished episode.

    Args:
        episode: An `Episode` of verifiers.
        was_sampled: Whether the server sampled exactly these tokens.
        ran_out: Whether the trace of this id was denied tokens because of the run's limits.

    Raises:
        ValueError: If it trains several traces, or has images.
        RuntimeError: If a trace has tokens that the server did not sample.
    """
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) > 1:
        names = ", ".join(trace.agent.name for trace in trained)
        raise ValueError(f"an episode of {episode.env.id!r} trains {len(trained)} agent runs ({names}), not one.")
    if not trained:
        return FinishedEpisode(failure=_last_error(episode.errors) or "no agent ran that is trained")
    (trace,) = trained
    out_of_room = ran_out(trace.id)
    rewards = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    played = FinishedEpisode(
        rows=read_rows(trace, was_sampled),
        numbers={name: float(value) for name, value in (metrics | rewards).items() if math.isfinite(value)},
        finish_reason="length" if out_of_room or trace.is_truncated or trace.is_timeout else "stop",
        tool_counts={"calls": float(len(trace.tool_messages)), "seconds": trace.timing.agent.harness.duration},
    )
    # A harness may end normally although its model calls failed.
    last = trace.calls[-1].error if trace.calls else None
    if not (episode.ok and trace.ok):
        played.failure = _last_error([*trace.errors, *episode.errors]) or "the episode failed"
    elif len(rewards) < len(trace.rewards):
        played.failure = "scoring did not finish"
    elif last is not None and not out_of_room:
        played.failure = f"the last model call failed: {last.message}"
    elif not played.rows:
        played.failure = "the model wrote nothing"
    else:
        played.reward = trace.reward
    return played


def _last_error(errors: Sequence[Any]) -> str | None:
    return f"{errors[-1].type}: {errors[-1].message}" if errors else None


def read_rows(trace: Any, was_sampled: WasSampled) -> list[Row]:
    """The branches of a trace that have something to train; tokens of several branches are trained in the first.

    Raises:
        ValueError: If there are images.
        RuntimeError: If the server did not sample the tokens to train.
    """
    rows: list[Row] = []
    trained: set[int] = set()
    for branch in trace.branches:
        nodes = branch.nodes
        new = [node.sampled and bool(node.logprobs) and id(node) not in trained for node in nodes]
        if not branch.trainable or not any(new):
            continue
        contents = [node.message.content for node in nodes if isinstance(node.message.content, list)]
        if branch.mm_token_type_ids or any(part.type != "text" for content in contents for part in content):
            raise ValueError("an episode has images or other media, but with a harness only text can be trained.")
        row = Row([], [], [], [], [])
        for node, is_new in zip(nodes, new, strict=True):
            row.token_ids += node.token_ids
            if is_new and (len(node.logprobs) != sum(node.mask) or not was_sampled(row.token_ids)):
                raise RuntimeError(
                    f"the harness reports {len(row.token_ids)} tokens of an episode, the last {sum(node.mask)} as "
                    "written by the model, but no server read and wrote exactly these, so they cannot be trained."
                )
            mask = [int(sampled) for sampled in node.mask] if is_new else [0] * len(node.token_ids)
            logprobs = iter(node.logprobs)
            row.loss_mask += mask
            row.logprobs += [next(logprobs) if is_trained else 0.0 for is_trained in mask]
        messages = [_message(node.message) for node in nodes]
        first = next(place for place, node in enumerate(nodes) if node.sampled)
        opening = rows[0].prompt if rows else []
        if opening and messages[: len(opening)] == opening:  # earlier turns may be re-tokenized, and so not sampled
            first = min(first, len(opening))
        row.prompt, row.messages = messages[:first], messages[first:]
        rows.append(row)
        trained.update(id(node) for node in nodes)
    return rows


def _message(message: Any) -> dict[str, Any]:
    """A message in the form of the chat templates."""
    plain = message.model_dump(exclude_none=True)
    if "tool_calls" in plain:
        plain["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return {"content": "", **plain}


def make_group(prompt: Prompt, episodes: Sequence[FinishedEpisode], reward_name: str) -> tuple[Prompt, list[Rollout]]:
    """The prompt, with the tokens that all rows of a group begin with, and the group's rollouts.

    Args:
        prompt: The prompt in the data set.
        episodes: The group's episodes.
        reward_name: Name of the reward.

    Raises:
        ValueError: If the rows do not even begin with the same token.
    """
    prompts = [row.token_ids[: row.prompt_length] for episode in episodes for row in episode.rows]
    shared = common_length(prompts) if prompts else 0
    if prompts and not shared:
        raise ValueError(f"contexts of {prompt.where or 'a task'} begin with different tokens and share no prompt.")
    rollouts: list[Rollout] = []
    for index, played in enumerate(episodes):
        for row in played.rows:
            loss_mask = row.loss_mask[shared:]
            rollout = Rollout(
                row.token_ids[shared:],
                row.logprobs[shared:],
                None if all(loss_mask) else loss_mask,
                finish_reason="stop",
                messages=row.messages,
                prompt=None if row.prompt == prompt.prompt else row.prompt,
                num_observation_tokens=row.prompt_length - shared,
                episode=index if len(played.rows) > 1 else None,
            )
            rollouts.append(rollout)
        if not played.rows:
            rollouts.append(Rollout([], [], [], messages=[]))
        rollouts[-1] = replace(
            rollouts[-1],
            finish_reason=played.finish_reason,
            tool_counts=played.tool_counts,
            environment_reward=played.reward,
            environment_name=reward_name,
            environment_numbers=played.numbers,
        )
    return (replace(prompt, token_ids=prompts[0][:shared]) if prompts else prompt), rollouts
