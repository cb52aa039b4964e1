"""Samples episodes as a run does, without a Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pl_grouprl.data.encoding import EncodingOptions, encode_rows
from pl_grouprl.data.rows import SourceRow
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.training.run import PlainRun
from pl_grouprl.training.sampler import EpisodeOptions, Sampler, Tooling
from pl_grouprl.types import Rollout, RolloutGroup, SamplingConfig

Rows = Sequence[dict[str, Any]]
SampleRows = Callable[..., list[RolloutGroup]]


@contextmanager
def open_episodes(
    policy: Any,
    tokenizer: Any,
    engine: Any = None,
    *,
    tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    split_special_tokens: bool = True,
    **options: Any,
) -> Iterator[SampleRows]:
    """A function that samples: rows, `SamplingConfig`, number of generations and seed -> groups.

    Args:
        policy: A transformers model.
        tokenizer: Its tokenizer.
        engine: None is an `HFRolloutEngine`.
        options: Fields of `EpisodeOptions`.

    The other arguments are those of modules; `template_kwargs`, the data's `chat_template_kwargs`, and
    `split_special_tokens` are the data's.
    """
    run = PlainRun(policy, tokenizer)
    tooling = Tooling(run, list(tools), environment_factory, EpisodeOptions(**options))
    sampler = Sampler(run, engine or HFRolloutEngine(), tooling=tooling)
    tooling.set_up(template_kwargs or {}, split_special_tokens)

    def sample(rows: Rows, sampling: SamplingConfig, num_generations: int, seed: int = 0) -> list[RolloutGroup]:
        numbered = [SourceRow(f"row {number}", dict(row)) for number, row in enumerate(rows)]
        encoding = EncodingOptions(
            chat_template_kwargs=template_kwargs or {}, split_special_tokens=split_special_tokens
        )
        prompts = encode_rows(numbered, tokenizer, encoding, chat=tooling.chat_options)
        return sampler.generate(prompts, sampling, num_generations, seed=("test", seed))

    try:
        yield sample
    finally:
        tooling.close()


def prompt_of(group: RolloutGroup, rollout: Rollout) -> list[int]:
    """The prompt as the rollout reads it."""
    return group.prompt_ids + rollout.token_ids[: rollout.num_observation_tokens]


def mask_of(rollout: Rollout) -> list[int]:
    """The loss mask of what follows the rollout's prompt."""
    mask = [1] * len(rollout.token_ids) if rollout.loss_mask is None else rollout.loss_mask
    return mask[rollout.num_observation_tokens :]


def without_seconds(group: RolloutGroup) -> RolloutGroup:
    """The group without what the clock decides."""
    return replace(
        group, rollouts=[replace(own, tool_counts={**own.tool_counts, "seconds": 0.0}) for own in group.rollouts]
    )
