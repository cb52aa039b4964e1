"""Metrics of validation and test: mean@k, best@k, maj@k and pass@k of each data source."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from pl_grouprl.functional.validation import best_at_k, majority_at_k, mean_at_k, pass_at_k
from pl_grouprl.rewards.base import PreparedReward, completion_text, hook_of, reward_metrics
from pl_grouprl.training.metrics import Record, episode_metrics, summarize
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import gather_plain
from pl_grouprl.utilities.options import as_options, check_options
from pl_grouprl.utilities.text import metric_name

Answers = list[str | None]
"""The answer of each episode of a group; None for no answer, which is a vote like any other."""


@dataclass(frozen=True)
class EvaluationOptions:
    """How validation, test and predict sample, and what passes.

    Attributes:
        num_generations: Rollouts per prompt: the k of mean@k, and the largest of pass@k.
        sampling: Options of `SamplingConfig` that differ from the training's.
        pass_threshold: A rollout passes, for pass@k, if its reward is at least this, up to rounding.

    Raises:
        ValueError: If an option is out of range.
    """

    num_generations: int = 1
    sampling: dict[str, Any] | None = None
    pass_threshold: float = 1.0

    def __post_init__(self) -> None:
        check_options({"evaluation.num_generations": (self.num_generations, self.num_generations >= 1, "at least 1")})
        check_options({"evaluation.pass_threshold": (self.pass_threshold, True, "a finite number")})
        self.sampling_after(SamplingConfig())  # checks it

    def sampling_after(self, training: SamplingConfig) -> SamplingConfig:
        """How they are sampled if training samples like this."""
        own = vars(self.sampling) if isinstance(self.sampling, SamplingConfig) else self.sampling or {}
        return as_options(SamplingConfig, vars(training) | own, "evaluation.sampling")


_EVALUATION = EvaluationOptions()


class AnswerExtractor:
    """Extracts answers with a reward function's method; without one, the whole text is the answer.

    For an episode, the text is the content of the last assistant message.

    Args:
        rewards: The first one with a method `extract_answer(text)`, or `extract_answer(text, columns)` with the row's
            columns, is used. Without one, answers are the stripped texts.
    """

    def __init__(self, rewards: Sequence[PreparedReward] = ()) -> None:
        self._hook: Callable[..., Any] | None = None
        self._takes_columns = self._warned = False
        for reward in rewards:
            if hook := hook_of(reward.function, "extract_answer"):
                self._name, self._hook = reward.name, hook
                self._takes_columns = "columns" in inspect.signature(hook).parameters
                break

    def answers(self, group: RolloutGroup) -> Answers:
        """The answer of each episode; None, with a warning the first time, where the method raises."""
        return [self._answer(episode.last, group.columns) for episode in group.episodes]

    def _answer(self, row: Rollout, columns: Mapping[str, Any]) -> str | None:
        text = (row.text or "") if row.messages is None else completion_text(row.messages)
        if self._hook is None:
            return text.strip()
        try:
            answer = self._hook(text, columns=columns) if self._takes_columns else self._hook(text)
        except Exception as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(
                    f"extract_answer of the reward function {self._name!r} raised {type(error).__name__}: {error}. "
                    "Completions for which it raises count as having no answer in maj@k."
                )
            return None
        return None if answer is None else str(answer)


def evaluation_metrics(records: Sequence[Record], prefix: str, pass_threshold: float = 1.0) -> dict[str, float]:
    """Evaluate the rollouts of a whole validation or test run.

    Args:
        records: Records of all groups of all ranks, with `answers`. Rollouts without a reward do not count.
        prefix: `val` or `test`.
        pass_threshold: A rollout passes if its reward is at least this, up to rounding.

    Returns:
        `{prefix}/reward` over all prompts, to select checkpoints by; `{prefix}/rewards/{name}/mean` of each reward
        function and `{prefix}/rewards/{name}/{key}` of each further number; for each data source
        `{prefix}/{data_source}/mean@k`, and for k > 1 `best@k` and `maj@k`, where completions with the same answer vote
        together; `pass@1`, `pass@2`, `pass@4` and so on up to k, each over the prompts with that many rewarded
        rollouts; for episodes, `{prefix}/` and the names of `episode_metrics`.
    """
    scored = []
    for record in records:
        kept = [i for i, reward in enumerate(record["rewards"]) if math.isfinite(reward)]
        if kept:
            rewards, answers = [record["rewards"][i] for i in kept], [record["answers"][i] for i in kept]
            scored.append({"data_source": record["data_source"], "rewards": rewards, "answers": answers})
    metrics = {f"{prefix}/reward": mean_at_k([record["rewards"] for record in scored]) if scored else math.nan}
    of_rewards = reward_metrics([row for record in records for row in record["reward_rows"]], statistics=("mean",))
    metrics |= {f"{prefix}/{name}": value for name, value in of_rewards.items() if not math.isnan(value)}
    for source in sorted({record["data_source"] for record in scored}):
        of_source = [record for record in scored if record["data_source"] == source]
        source_metrics = _source_metrics(of_source, pass_threshold)
        metrics |= {f"{prefix}/{metric_name(source)}/{name}": value for name, value in source_metrics.items()}
    return metrics | episode_metrics(records, f"{prefix}/")


def _source_metrics(records: Sequence[Record], threshold: float) -> dict[str, float]:
    rewards = [record["rewards"] for record in records]
    most = max(map(len, rewards))
    metrics = {f"mean@{most}": mean_at_k(rewards)}
    if most > 1:
        metrics[f"best@{most}"] = best_at_k(rewards)
        metrics[f"maj@{most}"] = majority_at_k(rewards, [record["answers"] for record in records])
    passes = [
        [reward >= threshold or math.isclose(reward, threshold, rel_tol=1e-6) for reward in row] for row in rewards
    ]
    for k in (2**power for power in range(most.bit_length())):
        metrics[f"pass@{k}"] = pass_at_k([row for row in passes if len(row) >= k], k)
    return metrics


class Evaluator:
    """Collects the rollouts of a validation or test run.

    Args:
        rewards: The reward functions; one of them may extract answers, see `AnswerExtractor`.
        options: Its `pass_threshold` decides which rollouts pass.

    Attributes:
        groups: Rollouts of the current batch.
    """

    def __init__(self, rewards: Sequence[PreparedReward] = (), options: EvaluationOptions = _EVALUATION) -> None:
        self.groups: list[RolloutGroup] = []
        self._extractor = AnswerExtractor(rewards)
        self._options = options
        self._records: list[Record] = []

    def record(self) -> list[Answers]:
        """Add the current batch, with its rewards.

        Returns:
            The answers of each group's rollouts.
        """
        answers = [self._extractor.answers(group) for group in self.groups]
        pairs = zip(summarize(self.groups), answers, strict=True)
        self._records += [record | {"answers": answers_of_group} for record, answers_of_group in pairs]
        return answers

    def metrics(self, prefix: str, device: torch.device) -> dict[str, float]:
        """Compute `evaluation_metrics` of all ranks, and start over. Collective."""
        records = [record for of_rank in gather_plain(self._records, device) for record in of_rank]
        self._records = []
        return evaluation_metrics(records, prefix, self._options.pass_threshold)
