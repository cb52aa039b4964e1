"""Metrics of rollouts, episodes and branches, and the parts of a step's time."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, get_args

from pl_grouprl.attention import find_decoder
from pl_grouprl.episodes.tools import FailureKind
from pl_grouprl.models.cost import ModelCost
from pl_grouprl.packing import build_trie
from pl_grouprl.rewards.base import mean, reward_metrics, reward_row, std
from pl_grouprl.rollout.branching import first_own_token
from pl_grouprl.training.buffer import RolloutBuffer, numbers_differ
from pl_grouprl.types import EpisodeRows, Rollout, RolloutGroup
from pl_grouprl.utilities.device_defaults import DEVICES, find_device
from pl_grouprl.utilities.progress import PROGRESS

# Metrics, under TRL's names where it has them, from plain records that ranks can exchange.

Record = dict[str, Any]
"""A group without its tokens: numbers, strings, and lists and dictionaries of them."""


def summarize(groups: Sequence[RolloutGroup]) -> list[Record]:
    """Keep what metrics need of each group.

    Lists have one entry per episode, but `tokens` has one per rollout. In `rewards`, a missing reward is NaN.
    """
    records = []
    for group in groups:
        episodes = group.episodes
        records.append(
            {
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
        )
    return records


def rollout_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Reward and completion statistics over all groups.

    Returns:
        `reward` (mean), `reward_std` (mean over groups of the standard deviation inside the group, Bessel-corrected),
        `reward_min`, `reward_max`, `frac_reward_zero_std`, and `completions/...` lengths in tokens that the model
        wrote. Rollouts without a reward do not count in the rewards, and the rows of an episode are one rollout. Also
        `reward_metrics`, `episode_metrics` and `branch_metrics`.
    """
    rewards = _finite([reward for record in records for reward in record["rewards"]])
    spreads = [std(_finite(record["rewards"])) for record in records]
    lengths = [length for record in records for length in record["lengths"]]
    truncated = [flag for record in records for flag in record["truncated"]]
    metrics = {
        "reward": mean(rewards),
        "reward_std": sum(spreads) / max(len(spreads), 1),
        "reward_min": min(rewards, default=math.nan),
        "reward_max": max(rewards, default=math.nan),
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
        "history_tokens": float(sum(map(_history_tokens, episode.rows))),
    }


def _history_tokens(rollout: Rollout) -> int:
    """Sum over turns of the tokens from the group's prompt to the end of the turn."""
    mask = rollout.loss_mask or [1] * len(rollout.token_ids)
    return sum(place for place, pair in enumerate(pairwise([*mask, 0]), start=1) if pair == (1, 0))


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
    found = [(record, episode) for record in records for episode in record["episodes"] if episode is not None]
    if not found:
        return {}

    def total(name: str) -> float:
        return sum(episode.get(name, 0.0) for _, episode in found)

    calls, failures = total("calls"), {kind: total(kind) for kind in FAILURES}
    repeated = sum(episode["turns"] * record["prompt_length"] + episode["history_tokens"] for record, episode in found)
    metrics = {
        "tools/call_frequency": calls / len(found),
        "tools/failure_frequency": sum(failures.values()) / max(calls, 1),
        **{f"tools/failures/{kind}": count for kind, count in failures.items()},
        "episode/turns": total("turns") / len(found),
        "episode/tool_seconds": total("seconds") / len(found),
        "episode/context_tokens": total("context_tokens") / len(found),
        "episode/token_ratio": repeated / sum(record["prompt_length"] + sum(record["tokens"]) for record in records),
    }
    return {f"{prefix}{name}": value for name, value in metrics.items()}


def count_sampled(rollouts: Sequence[Rollout]) -> int | None:
    """Tokens that the model wrote for a group, shared ones counted once; None without branching."""
    if not any(rollout.branch_path for rollout in rollouts):
        return None
    starts = [first_own_token(rollout.branch_path, rollout.branch_points) for rollout in rollouts]
    masks = [rollout.loss_mask or [1] * len(rollout.token_ids) for rollout in rollouts]
    return sum(sum(mask[start:]) for mask, start in zip(masks, starts, strict=True))


def branch_metrics(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Statistics of the trees of all groups; none without branching.

    Args:
        records: Records of the groups of all ranks; see `summarize`.

    Returns:
        `branching/leaves`, rollouts per group; `branching/sampled_tokens`, tokens that the model wrote per group,
        shared ones counted once; and `branching/token_ratio`, the tokens of all leaves over those sampled.
    """
    trees = [record for record in records if record["sampled"] is not None]
    if not trees:
        return {}
    sampled = sum(record["sampled"] for record in trees)
    return {
        "branching/leaves": sum(len(record["lengths"]) for record in trees) / len(trees),
        "branching/sampled_tokens": sampled / len(trees),
        "branching/token_ratio": sum(sum(record["lengths"]) for record in trees) / max(sampled, 1),
    }


# The time of a step.


class StepTimer:
    """Charges all time of a step to the innermost running part, or to `other` if none is running.

    A nested part pauses the outer one, so no time counts twice. For the main thread only.

    Time is charged by `enter`, `leave` and `mark`; time after the last of them belongs to no part. A step that ends
    with `mark` thus excludes later callbacks.

    Args:
        now: Monotonic clock in seconds; defaults to `time.perf_counter`.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or time.perf_counter
        self._seconds: dict[str, float] = {}
        self.start()

    def start(self) -> None:
        """Begin a step. Parts of earlier steps stay listed, with 0 seconds."""
        self._seconds = dict.fromkeys(self._seconds, 0.0)
        self._running = ["other"]
        self._charged_until = self._now()

    def enter(self, name: str) -> None:
        """Begin a part; see `part` for a context manager."""
        self.mark()
        self._running.append(name)
        self._seconds.setdefault(name, 0.0)
        PROGRESS.enter(name)

    def leave(self) -> None:
        """End the innermost part."""
        self.mark()
        self._running.pop()
        PROGRESS.enter(self._running[-1])

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Charge the time inside this context to a part."""
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def mark(self) -> None:
        """Charge the time until now to the running part, without ending it."""
        now = self._now()
        name = self._running[-1]
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._charged_until
        self._charged_until = now

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each part of the current step, with `other` and the sum, `step`."""
        parts = {"other": 0.0} | self._seconds
        return parts | {"step": sum(parts.values())}


SCORING = ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values")
"""Parts of a step that score rollouts without gradient."""


class Throughput:
    """Tokens per second and model FLOPs utilization (MFU), from the start of a rollout to its last update.

    MFU is the share of the GPU's dense bfloat16 rate, whatever the run's precision, that goes into operations that the
    step needs: linear layers, attention and head (`ModelCost`) for the groups of this rank. A token that rollouts share
    counts once, even if the run repeats it. A backward pass counts as two forward passes, or one for a frozen base with
    an adapter. Recomputed activations, padding, the optimizer and image encoders do not count.

    Attributes:
        total_seconds: Seconds of each part over all steps since `open`, as in `StepTimer`.
    """

    def __init__(self) -> None:
        self.total_seconds: Counter[str] = Counter()
        self._seconds: Counter[str] = Counter()
        self._operations: dict[str, float] = {}
        self._is_whole = False
        self._peak: float | None = None
        self._min_saved_tokens: int | None = None
        self._costs: dict[str, ModelCost] = {}
        self._passes: dict[str, int] = {}

    def open(self, models: Mapping[str, Any], device_name: str | None, min_saved_tokens: int | None) -> None:
        """Begin a fit; prepare to count operations if the GPU's rate is known.

        Args:
            models: The transformers models that read rollouts, by name; one of them is `policy`.
            device_name: The GPU, as CUDA names it; None for another device.
            min_saved_tokens: What rollouts must save to share a segment; see `packing.build_trie`.
        """
        self.total_seconds = Counter()
        known = None if device_name is None else find_device(device_name)
        self._peak = None if known is None else DEVICES[known].operations
        self._min_saved_tokens = min_saved_tokens
        self._costs, self._passes = {}, {}
        for name, model in models.items() if known else ():
            self._costs[name] = ModelCost.of(find_decoder(model), model.get_output_embeddings())
            trained = [weight.requires_grad for weight in model.parameters()]
            self._passes[name] = any(trained) * (3 if all(trained) else 2)

    def start(self) -> None:
        """Begin a rollout."""
        self._seconds, self._operations, self._is_whole = Counter(), {}, True

    def count(self, phase: str, groups: Sequence[RolloutGroup], model: str | None = "policy") -> None:
        """Add a pass over some groups.

        Args:
            phase: `rollout`, `scoring` or `update`; `ahead` for rollouts sampled beside the updates.
            groups: Groups of this rank.
            model: The model that runs them forward; None for forward and backward of every trained model.
        """
        if self._peak is None:
            return
        tries = [
            build_trie([rollout.token_ids for rollout in group.rollouts], self._min_saved_tokens) for group in groups
        ]
        shapes = [(len(group.prompt_ids), trie) for group, trie in zip(groups, tries, strict=True)]
        passes = self._passes if model is None else {model if model in self._costs else "policy": 1}
        added = sum(n * sum(self._costs[name].of_groups(shapes)) for name, n in passes.items() if n)
        self._operations[phase] = self._operations.get(phase, 0.0) + added

    def after_step(
        self, seconds: Mapping[str, float], buffer: RolloutBuffer, updates_per_rollout: int
    ) -> dict[str, float]:
        """Add a step; after the last one of a rollout, return `perf/tokens_per_second` and `perf/mfu`.

        Tokens per second are the rollout's tokens over the time to sample and train them. Nothing is returned for the
        first rollout of a run that was resumed after sampling it.

        Args:
            seconds: Seconds of each part of the step, as in `StepTimer`.
            buffer: The rollouts that it trained.
            updates_per_rollout: Steps per rollout.
        """
        self._seconds.update(seconds)
        self.total_seconds.update(seconds)
        if not self._is_whole or buffer.updates_done < updates_per_rollout:
            return {}
        metrics = {"perf/tokens_per_second": buffer.num_tokens / self._seconds["step"]}
        if self._peak is None:
            return metrics
        spent = {"rollout": self._seconds["rollout"], "update": self._seconds["update"]}
        spent["scoring"] = sum(self._seconds[name] for name in SCORING)
        metrics["perf/mfu"] = sum(self._operations.values()) / self._seconds["step"] / self._peak
        rates = {name: self._operations.get(name, 0.0) / own / self._peak for name, own in spent.items() if own}
        return metrics | {f"perf/mfu/{name}": rate for name, rate in rates.items() if rate}
