"""Metrics of episodes: tool calls, turns, and tokens that the model did not write."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args

from pl_grouprl.episodes.tools import FailureKind
from pl_grouprl.types import EpisodeRows, Rollout

EpisodeRecord = dict[str, float]
"""Numbers of one episode: `turns`, `context_tokens`, `history_tokens`, `calls`, `seconds`, and failed calls by kind."""

FAILURES: tuple[str, ...] = get_args(FailureKind)


def summarize_episode(episode: EpisodeRows) -> EpisodeRecord | None:
    """The statistics of an episode that metrics need; None for a plain completion."""
    last = episode.last
    if last.messages is None:
        return None
    return last.tool_counts | {
        "turns": float(last.num_turns),
        "context_tokens": float(episode.num_tokens - episode.num_sampled_tokens),
        "history_tokens": float(sum(sum(_turn_ends(row)) for row in episode.rows)),
    }


def episode_metrics(records: Sequence[dict[str, Any]], prefix: str = "") -> dict[str, float]:
    """Statistics of the episodes of all groups; none if there are no episodes.

    Args:
        records: Records of the groups of all ranks; see `summarize`.
        prefix: Prefix of each name, such as `val/`.

    Returns:
        `tools/call_frequency` (calls per rollout) and `tools/failure_frequency` (the share of calls that failed, 0
        without calls), as in TRL; `tools/failures/{kind}`, the number of failed calls of a kind; and means
        per rollout: `episode/turns`, `episode/tool_seconds`, and `episode/context_tokens`, the tokens after the group's
        prompt that the model did not write. `episode/token_ratio` compares two ways to train: the tokens if each turn
        of each rollout were a separate sequence, which repeats its history, over the tokens of the groups, which repeat
        neither prompts nor histories.
    """
    episodes: list[EpisodeRecord] = [
        episode for record in records for episode in record["episodes"] if episode is not None
    ]
    if not episodes:
        return {}

    def total(name: str) -> float:
        return sum(episode.get(name, 0.0) for episode in episodes)

    calls, failures = total("calls"), {kind: total(kind) for kind in FAILURES}
    metrics = {
        "tools/call_frequency": calls / len(episodes),
        "tools/failure_frequency": sum(failures.values()) / max(calls, 1),
        **{f"tools/failures/{kind}": count for kind, count in failures.items()},
        "episode/turns": total("turns") / len(episodes),
        "episode/tool_seconds": total("seconds") / len(episodes),
        "episode/context_tokens": total("context_tokens") / len(episodes),
        "episode/token_ratio": _token_ratio(records),
    }
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def _turn_ends(rollout: Rollout) -> list[int]:
    """For each turn, the number of tokens from the group's prompt to the end of the turn."""
    mask = rollout.loss_mask or [1] * len(rollout.token_ids)
    return [place for place, pair in enumerate(pairwise([*mask, 0]), start=1) if pair == (1, 0)]


def _token_ratio(records: Sequence[dict[str, Any]]) -> float:
    """Tokens with the history repeated for every turn, over tokens with nothing repeated."""
    repeated = sum(
        episode["turns"] * record["prompt_length"] + episode["history_tokens"]
        for record in records
        for episode in record["episodes"]
        if episode is not None
    )
    return repeated / sum(record["prompt_length"] + sum(record["tokens"]) for record in records)
