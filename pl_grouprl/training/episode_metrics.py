"""What is logged about episodes: tool calls, turns, and the tokens that the model did not write."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from pl_grouprl.episodes.tools import FailureKind
from pl_grouprl.types import Rollout

EpisodeRecord = dict[str, float]
"""An episode in numbers: `turns`, `context_tokens`, `calls`, `seconds`, and failed calls by kind."""

FAILURES: tuple[str, ...] = get_args(FailureKind)


def summarize_episode(rollout: Rollout) -> EpisodeRecord | None:
    """Keep what metrics need; None for a plain completion."""
    if rollout.messages is None:
        return None
    return rollout.tool_counts | {
        "turns": float(rollout.num_turns),
        "context_tokens": float(len(rollout.token_ids) - rollout.num_sampled_tokens),
    }


def episode_metrics(records: Sequence[dict[str, Any]], prefix: str = "") -> dict[str, float]:
    """Statistics of the episodes of all groups; none if there are no episodes.

    Args:
        records: As from `summarize`, of all ranks.
        prefix: Precedes each name, such as `val/`.

    Returns:
        `tools/call_frequency` (calls per rollout) and `tools/failure_frequency` (the share of calls that failed, 0
        without calls), as in TRL; `tools/failures/{kind}`, calls that failed so; and means per rollout:
        `episode/turns` of the model, `episode/tool_seconds`, and `episode/context_tokens`, the tokens after the
        group's prompt that the model did not write.
    """
    episodes: list[EpisodeRecord] = [own for record in records for own in record["episodes"] if own is not None]
    if not episodes:
        return {}

    def total(name: str) -> float:
        return sum(own.get(name, 0.0) for own in episodes)

    calls, failures = total("calls"), {kind: total(kind) for kind in FAILURES}
    metrics = {
        "tools/call_frequency": calls / len(episodes),
        "tools/failure_frequency": sum(failures.values()) / max(calls, 1),
        **{f"tools/failures/{kind}": count for kind, count in failures.items()},
        "episode/turns": total("turns") / len(episodes),
        "episode/tool_seconds": total("seconds") / len(episodes),
        "episode/context_tokens": total("context_tokens") / len(episodes),
    }
    return {f"{prefix}{name}": value for name, value in metrics.items()}
