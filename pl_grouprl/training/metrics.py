"""Rollout metrics under TRL's names, computed from plain records that ranks can exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pl_grouprl.rewards.results import mean, reward_metrics, reward_row, std
from pl_grouprl.training.branch_metrics import branch_metrics, count_sampled
from pl_grouprl.training.episode_metrics import episode_metrics, summarize_episode
from pl_grouprl.training.selection import numbers_differ
from pl_grouprl.types import EpisodeRows, RolloutGroup

Record = dict[str, Any]
"""A group without its tokens: numbers, strings, and lists and dictionaries of them."""


def summarize(groups: Sequence[RolloutGroup]) -> list[Record]:
    """Keep what metrics need of each group.

    Lists have one entry per episode, but `tokens` has one per rollout. In `rewards`, a missing reward is NaN.
    """
    return [_summarize(group, group.episodes) for group in groups]


def _summarize(group: RolloutGroup, episodes: Sequence[EpisodeRows]) -> Record:
    return {
        "data_source": group.data_source,
        "prompt_length": len(group.prompt_ids),
        "lengths": [episode.num_sampled_tokens for episode in episodes],
        "tokens": [len(rollout.token_ids) for rollout in group.rollouts],
        "truncated": [episode.last.finish_reason == "length" for episode in episodes],
        "rewards": [number_or_nan(episode.reward) for episode in episodes],
        "reward_rows": [reward_row(episode.last) for episode in episodes],
        "sampled": count_sampled(group.rollouts),
        "episodes": [summarize_episode(episode) for episode in episodes],
    }


def rollout_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Reward and completion statistics over all groups.

    Returns:
        `reward` (mean), `reward_std` (mean over groups of the standard deviation inside the group, Bessel-corrected),
        `frac_reward_zero_std`, and `completions/...` lengths in tokens that the model wrote. Rollouts without a reward
        are left out of the rewards, and the rows of an episode are one rollout. Also `reward_metrics`,
        `episode_metrics` and `branch_metrics`.
    """
    spreads = [std(_finite(record["rewards"])) for record in records]
    lengths = [length for record in records for length in record["lengths"]]
    truncated = [flag for record in records for flag in record["truncated"]]
    metrics = {
        "reward": mean(_finite([reward for record in records for reward in record["rewards"]])),
        "reward_std": sum(spreads) / max(len(spreads), 1),
        "frac_reward_zero_std": mean([not numbers_differ(record["rewards"]) for record in records]),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }
    metrics |= reward_metrics([row for record in records for row in record["reward_rows"]])
    return metrics | episode_metrics(records) | branch_metrics(records)


def count_tokens(records: Sequence[Record]) -> int:
    """Count the tokens of all sequences, the prompt once per rollout."""
    return sum(record["prompt_length"] * len(record["tokens"]) + sum(record["tokens"]) for record in records)


def number_or_nan(value: float | None) -> float:
    """Convert to float; None becomes NaN."""
    return math.nan if value is None else float(value)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]
