"""Samples a few tokens from a model to check that decoding with its cache is exact."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from pl_grouprl.checks.decoding_check import LONGEST, LONGEST_CONTINUED, check_decoding, continues_exactly
from pl_grouprl.media.inputs import placeholder_ids
from pl_grouprl.rollout.batches import BatchedSampler
from pl_grouprl.rollout.kept_caches import KeptCaches
from pl_grouprl.rollout.limits import length_limits
from pl_grouprl.rollout.packed_linear import original_weights
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.types import Prompt, Rollout, SamplingConfig

COPIED, SHARED = math.inf, 0.0
"""Values of `min_saved_tokens`: never share prompts, and always share them if the model can."""


def probe_decoding(model: Any, sampler: BatchedSampler, kept: KeptCaches | None) -> KeptCaches | None:
    """Check a model's decoding, once per model.

    Args:
        model: A transformers decoder, in evaluation mode.
        sampler: Samples from it.
        kept: The caches that its next rollouts would continue.

    Returns:
        `kept`, or None if the model cannot continue caches, or cannot take the `LONGEST_CONTINUED` tokens of the check.

    Raises:
        ValueError: If decoding differs from scoring.
    """
    limit = min(length_limits(model).values(), default=None)
    options: dict[str, Any] = {
        "placeholders": placeholder_ids(model).values(),
        "scoring": partial(original_weights, model),
    }
    if limit is None or limit >= LONGEST:
        check_decoding(model, partial(_sample, sampler), limit=limit, **options)
    if kept is None or (limit is not None and limit < LONGEST_CONTINUED):
        return None
    return kept if continues_exactly(model, partial(_sample_turns, sampler), **options) else None


def _sample(sampler: BatchedSampler, prompts: list[Prompt], sampling: SamplingConfig) -> list[list[Rollout]]:
    """Sample two rollouts of each prompt: one after a copy of it, one after the shared prompt if possible."""
    groups = [_sample_without_end(sampler, prompts, sampling, min_saved) for min_saved in (COPIED, SHARED)]
    return [copied + shared for copied, shared in zip(*groups, strict=True)]


def _sample_turns(
    sampler: BatchedSampler, prompts: list[Prompt], results: list[list[int]], sampling: SamplingConfig
) -> list[tuple[list[int], Rollout]]:
    """Sample two rollouts of each prompt, and a turn that continues each, with copied and with shared prompts."""
    turns = []
    for min_saved in (COPIED, SHARED):
        kept = KeptCaches()
        groups = _sample_without_end(sampler, prompts, sampling, min_saved, num_generations=2, kept=kept)
        continued = [
            Prompt([*prompt.token_ids, *rollout.token_ids, *result])
            for prompt, group, result in zip(prompts, groups, results, strict=True)
            for rollout in group
        ]
        again = _sample_without_end(sampler, continued, sampling, min_saved, kept=kept)
        turns += [(prompt.token_ids, rollout) for prompt, (rollout,) in zip(continued, again, strict=True)]
    return turns


def _sample_without_end(
    sampler: BatchedSampler,
    prompts: list[Prompt],
    sampling: SamplingConfig,
    min_saved_tokens: float,
    *,
    num_generations: int = 1,
    kept: KeptCaches | None = None,
) -> list[list[Rollout]]:
    """Sample without end tokens."""
    return sampler.sample(
        prompts,
        sampling,
        num_generations,
        0,
        max_new_tokens=[sampling.max_new_tokens] * len(prompts),
        end_ids=[],
        stop=StopStrings(None, ()),
        kept=kept,
        min_saved_tokens=min_saved_tokens,
    )
