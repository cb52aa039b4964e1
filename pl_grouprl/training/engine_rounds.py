"""Samples rollouts in rounds with an engine: the turns of episodes, the segments of branching rollouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from torch.nn.functional import pad

from pl_grouprl.rollout.branch_loop import PartialRollout
from pl_grouprl.rollout.engine import RolloutEngine, SyncedRolloutEngine, checked_rollouts, declares
from pl_grouprl.rollout.limits import length_limits, vocabulary
from pl_grouprl.sync.sampler import SamplerLostError
from pl_grouprl.training.run import Run
from pl_grouprl.types import Media, Rollout, SamplingConfig, is_per_token
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, raise_on_all_ranks


class EngineRounds:
    """Adapts a rollout engine to `RoundSampler`. Random numbers are identified by round and stream.

    Args:
        run: Provides the policy and the rank.
        engine: Bound to the policy or to a copy of it.
        sampling: How to sample.
        num_generations: Rollouts per prompt.
        seed: Identifies this call's random numbers.
        base_seed: The run's seed.
        one_prompt: Whether all rollouts of a group start from the same prompt, as they do without environments. The
            first round then samples the same tokens as a run without rounds, unless rollouts advance alone.
        may_advance_alone: Whether rollouts do not depend on each other, so that each may have its own thread, if the
            engine allows.

    Attributes:
        max_length: Longest sequence of model and engine, prompt included; None if unknown.
        is_concurrent: Whether several threads may call `sample` at once, each with other rollouts.
    """

    def __init__(
        self,
        run: Run,
        engine: RolloutEngine,
        sampling: SamplingConfig,
        num_generations: int,
        seed: Sequence[int | str],
        *,
        base_seed: int,
        one_prompt: bool,
        may_advance_alone: bool = False,
    ) -> None:
        self._run, self._engine, self._sampling = run, engine, sampling
        self._seed, self._base_seed = seed, base_seed
        self._is_collective = isinstance(engine, SyncedRolloutEngine)
        takes_threads = declares(engine, "updates_in_flight") and not self._is_collective
        self.is_concurrent = may_advance_alone and takes_threads
        self._num_generations, self._one_prompt = num_generations, one_prompt and not self.is_concurrent
        lengths = [*length_limits(run.policy).values(), getattr(engine, "max_model_len", None)]
        self.max_length: int | None = min((length for length in lengths if length is not None), default=None)

    def keeping_caches(self) -> AbstractContextManager[Any]:
        """Let the engine, if it can, keep its key/value caches until the last round."""
        engine: Any = self._engine
        return engine.keep_caches() if declares(engine, "keeps_caches") else nullcontext()

    def sample(self, number: int, rollouts: Sequence[PartialRollout], limits: Sequence[int]) -> list[Rollout]:
        """Continue each rollout by at most its limit; in the first round, they come prompt by prompt."""
        count = self._num_generations
        if number == 0 and self._one_prompt:
            firsts = rollouts[::count]
            groups = self._generate(number, firsts, [first.prompt_index for first in firsts], limits[::count], count)
        else:
            count = 1
            groups = self._generate(number, rollouts, [rollout.stream for rollout in rollouts], limits, count)
        for group in groups:
            _check_completions(group)
        sampled = [rollout for group in groups for rollout in group]
        return [_truncate(rollout, limit) for rollout, limit in zip(sampled, limits, strict=True)]

    def _generate(
        self, number: int, rollouts: Sequence[PartialRollout], indices: list[int], limits: Sequence[int], count: int
    ) -> list[list[Rollout]]:
        if not rollouts and not self._is_collective:
            return []
        prompts = [rollout.next_prompt() for rollout in rollouts]
        media = [_pad_media(rollout.media, len(prompt)) for rollout, prompt in zip(rollouts, prompts, strict=True)]
        options: dict[str, Any] = {"media": media} if any(media) else {}
        if declares(self._engine, "takes_limits"):
            options["max_new_tokens"] = list(limits)
        takes_indices = declares(self._engine, "takes_prompt_indices")
        if takes_indices:
            options["prompt_indices"] = indices
        stream = self._seed if number == 0 else (*self._seed, "turn", number)
        return checked_rollouts(
            self._engine,
            prompts,
            replace(self._sampling, max_new_tokens=max(limits, default=1)),
            num_generations=count,
            vocab_size=vocabulary(self._run.policy),
            # Without indices, an engine numbers prompts from 0 on every rank, so seeds must differ by rank.
            seed=derive_seed(*stream, self._base_seed, 0 if takes_indices else self._run.global_rank),
            **options,
        )

    def raise_together(self, run: Callable[[], None]) -> None:
        """Run a step; if the engine is collective, an error on one rank is raised on all."""
        if self._is_collective:
            raise_on_all_ranks(run, self._run.device, shared=SamplerLostError)
        else:
            run()

    def any_open(self, is_open: bool) -> bool:
        """Whether a rollout is unfinished, on any rank if the engine is collective."""
        return any(gather_plain(is_open, self._run.device)) if self._is_collective else is_open


def _check_completions(rollouts: Sequence[Rollout]) -> None:
    """Refuse what cannot be continued: other things than completions that the model wrote."""
    has_rows = any(rollout.episode is not None for rollout in rollouts)
    if has_rows or any(not all(rollout.loss_mask or ()) for rollout in rollouts):
        what = "Rollout.episode" if has_rows else "zeros in Rollout.loss_mask"
        raise ValueError(
            f"the rollout engine returned rollouts with {what}, but with branching or tools it has to sample "
            "completions of the model, which are continued; leave both options out, or use another engine."
        )


def _truncate(rollout: Rollout, limit: int) -> Rollout:
    """Truncate a rollout; needed for engines without a limit per prompt."""
    if len(rollout.token_ids) <= limit:
        return rollout
    logprobs = None if rollout.logprobs is None else rollout.logprobs[:limit]
    versions = None if rollout.weight_versions is None else rollout.weight_versions[:limit]
    return Rollout(rollout.token_ids[:limit], logprobs, finish_reason="length", weight_versions=versions)


def _pad_media(media: Media, num_tokens: int) -> Media:
    """Pad a prompt's per-token media to a longer history; all added tokens are text."""
    return {
        name: pad(value, (0, num_tokens - len(value))) if is_per_token(name) else value for name, value in media.items()
    }
