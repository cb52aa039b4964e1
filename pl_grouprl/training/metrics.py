"""Rollout metrics under TRL's names, computed from plain records that ranks can exchange."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pl_grouprl.training.branch_metrics import branch_metrics, count_sampled
from pl_grouprl.training.episode_metrics import episode_metrics, summarize_episode
from pl_grouprl.training.selection import numbers_differ
from pl_grouprl.types import EpisodeRows, RolloutGroup

_STANDARD_SUFFIXES = ("/mean", "/std", "/none", "/invalid")

Record = dict[str, Any]
"""A group without its tokens: numbers, strings, and lists and dictionaries of them."""


def summarize(groups: Sequence[RolloutGroup]) -> list[Record]:
    """Keep what metrics need of each group.

    Lists have one entry per episode, but `tokens` has one per rollout, and `by_function` has only the finite rewards of
    each function. In `rewards`, a missing reward is NaN.
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
        "by_function": _finite_rewards([episode.last.rewards for episode in episodes]),
        "sampled": count_sampled(group.rollouts),
        "episodes": [summarize_episode(episode) for episode in episodes],
    }


def _finite_rewards(rewards: Sequence[dict[str, float | None]]) -> dict[str, list[float]]:
    """Each function's finite rewards in one group, before weighting; a name without any is kept, so it is logged."""
    collected: dict[str, list[float]] = {}
    for of_episode in rewards:
        for name, reward in of_episode.items():
            values = collected.setdefault(name, [])
            if reward is not None and math.isfinite(reward):
                values.append(float(reward))
    return collected


def rollout_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Reward and completion statistics over all groups.

    Returns:
        `reward` (mean), `reward_std` (mean over groups of the standard deviation inside the group, Bessel-corrected),
        `frac_reward_zero_std`, `rewards/{name}/mean` and `/std`, and `completions/...` lengths in tokens that the
        model wrote. Rollouts without a reward are left out of the rewards, and the rows of an episode are one rollout.
        Also `episode_metrics` and `branch_metrics`.
    """
    spreads = [_std(_finite(record["rewards"])) for record in records]
    lengths = [length for record in records for length in record["lengths"]]
    truncated = [flag for record in records for flag in record["truncated"]]
    metrics = {
        "reward": _mean(_finite([reward for record in records for reward in record["rewards"]])),
        "reward_std": sum(spreads) / max(len(spreads), 1),
        "frac_reward_zero_std": _mean([not numbers_differ(record["rewards"]) for record in records]),
        "completions/mean_length": sum(lengths) / len(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(truncated) / len(truncated),
    }
    for name, values in rewards_by_function(records).items():
        metrics[f"rewards/{name}/mean"] = _mean(values)
        metrics[f"rewards/{name}/std"] = _std(values)
    return metrics | episode_metrics(records) | branch_metrics(records)


def rewards_by_function(records: Sequence[Record]) -> dict[str, list[float]]:
    """Each function's finite rewards in all groups, before weighting."""
    collected: dict[str, list[float]] = {}
    for record in records:
        for name, values in record["by_function"].items():
            collected.setdefault(name, []).extend(values)
    return collected


def count_tokens(records: Sequence[Record]) -> int:
    """Count the tokens of all sequences, the prompt once per rollout."""
    return sum(record["prompt_length"] * len(record["tokens"]) + sum(record["tokens"]) for record in records)


RewardCall = tuple[int, dict[str, float]]
"""How many episodes were rewarded together, and what `apply_rewards` returned."""


def merge_reward_metrics(calls: Sequence[RewardCall]) -> dict[str, float]:
    """Merge the metrics of reward calls: counts are summed, other values averaged over episodes."""
    merged: dict[str, float] = {}
    for name in sorted({name for _, metrics in calls for name in metrics}):
        known = [(count, metrics[name]) for count, metrics in calls if name in metrics]
        if name.endswith(("/none", "/invalid")):
            merged[name] = sum(value for _, value in known)
        else:
            merged[name] = sum(count * value for count, value in known) / max(sum(count for count, _ in known), 1)
    return merged


def extra_numbers(calls: Sequence[RewardCall]) -> dict[str, float]:
    """Means of the extra numbers that reward functions return in dictionaries, as `rewards/{name}/{key}`."""
    merged = merge_reward_metrics(calls)
    return {name: value for name, value in merged.items() if not name.endswith(_STANDARD_SUFFIXES)}


def number_or_nan(value: float | None) -> float:
    """Convert to float; None becomes NaN."""
    return math.nan if value is None else float(value)


def _finite(values: Sequence[float]) -> list[float]:
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def _std(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    mean = _mean(values)
    return math.sqrt(sum((value - mean) * (value - mean) for value in values) / (len(values) - 1))
