"""Samples rollouts of prompts with an engine that has the policy's current weights."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from pl_grouprl.checks.sampler_parity import can_compare
from pl_grouprl.episodes.limits import EpisodeLimits
from pl_grouprl.episodes.loop import EpisodeLoop
from pl_grouprl.harnesses import Verifiers
from pl_grouprl.rollout import HFRolloutEngine, RolloutEngine
from pl_grouprl.rollout.branch_loop import BranchLoop
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import SyncedRolloutEngine, checked_rollouts, declares
from pl_grouprl.rollout.limits import vocabulary
from pl_grouprl.rollout.stopping import StopStrings
from pl_grouprl.sync.weight_sync import WeightSync
from pl_grouprl.training.engine_rounds import EngineRounds
from pl_grouprl.training.run import Run
from pl_grouprl.training.sampler_parity_check import SamplerParityCheck, has_tokens
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.annotations import ArgumentError, describe_value
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks
from pl_grouprl.utilities.modes import evaluating

T = TypeVar("T")

NO_LIMITS = EpisodeLimits()


def _untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class Sampler:
    """Samples on all ranks; synchronizes the weights first if the engine has a copy of them.

    Args:
        run: Provides the policy and its tokenizer.
        engine: The rollout engine; None is `HFRolloutEngine()`.
        seed: The run's seed, combined with the seed of each call.
        timed: Makes a context that times its body under a name.
        episodes: Returns the episode loop, or None for plain completions.
        harness: Plays the episodes in place of that loop.
        limits: Limits on an episode of the harness.

    Attributes:
        turn_end_ids: Tokens that end completions besides those of the engine and of `sampling`.

    Raises:
        ArgumentError: If the engine is not an engine.
    """

    def __init__(
        self,
        run: Run,
        engine: RolloutEngine | None = None,
        seed: int = 0,
        timed: Callable[[str], AbstractContextManager[None]] = _untimed,
        episodes: Callable[[], EpisodeLoop | None] = lambda: None,
        harness: Verifiers | None = None,
        limits: EpisodeLimits = NO_LIMITS,
    ) -> None:
        if engine is not None and not isinstance(engine, RolloutEngine):
            raise ArgumentError(
                f"engine is {describe_value(engine)}; pass an engine of pl_grouprl.rollout, an object with bind() and "
                "generate(), or None for HFRolloutEngine()."
            )
        if hasattr(engine, "update_weights") and not isinstance(engine, SyncedRolloutEngine):
            missing = [name for name in ("adapter", "version", "update_weights", "close") if not hasattr(engine, name)]
            raise ArgumentError(
                f"engine is {describe_value(engine)}, which has update_weights but lacks {', '.join(missing)}; an "
                "engine with a copy of the weights has all of pl_grouprl.sync.sampler.SyncedSampler."
            )
        self._run, self._harness, self._limits = run, harness, limits
        self.engine: RolloutEngine = HFRolloutEngine() if engine is None else engine
        self._seed = seed
        self._weight_sync = WeightSync(timed)
        self._check = SamplerParityCheck()
        self._episodes = episodes
        self._stop: StopStrings | None = None
        self.turn_end_ids: Sequence[int] = ()

    def reset(self) -> None:
        """Forget what the engine has: another run may have used or closed it. Tell it the precision of this run."""
        self._weight_sync.forget()
        self._check.forget()
        if hasattr(self.engine, "autocast_dtype"):
            support = self._run.support
            kind = support.trainer.strategy.root_device.type
            # On a CPU, bfloat16 is slower than float32 on packed weights.
            self.engine.autocast_dtype = support.autocast_dtype(kind) if kind == "cuda" else None

    def close(self) -> None:
        """Release an engine that has a copy of the weights."""
        if isinstance(self.engine, SyncedRolloutEngine):
            self.engine.close()

    def take_metrics(self) -> dict[str, float]:
        """`sync/...` since the last call; none for engines without a copy of the weights."""
        return self._weight_sync.take_metrics() if isinstance(self.engine, SyncedRolloutEngine) else {}

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
        branching: Branching | None = None,
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt in evaluation mode; see `RLModule.generate`."""
        run = partial(self._generate, prompts, sampling, num_generations, seed, branching)
        if isinstance(self.engine, SyncedRolloutEngine):
            groups = self._weight_sync.sample(self._run, self.engine, run)
            self._check.run(self._run, self.engine, groups, sampling)
            return groups
        with self._run.support.whole_weights(self._run.policy):
            return run() if prompts else []

    def synced(self, run: Callable[[], T]) -> T:
        """Run something on all ranks once an engine has the policy's weights; again if it loses them. Collective."""
        assert isinstance(self.engine, SyncedRolloutEngine)
        return self._weight_sync.sample(self._run, self.engine, run)

    def compare(
        self,
        engine: RolloutEngine,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
        prompts: Sequence[Prompt],
    ) -> None:
        """Compare the engine with the policy, if that was not done. Collective.

        Args:
            engine: The engine, for calls that are not collective.
            groups: This rank's groups from the current weights.
            sampling: How they were sampled.
            prompts: This rank's. If rank 0 has no tokens to compare, it samples a completion of its first prompt:
                after a resume, for example, all groups may be from older weights.
        """
        assert isinstance(self.engine, SyncedRolloutEngine)
        if self._check.is_done or not can_compare(sampling):
            return
        if not gather_plain(any(map(has_tokens, groups)), self._run.device)[0]:
            own = [] if self._run.global_rank else prompts[:1]
            groups = self.synced(lambda: [self._sample_once(engine, sampling, prompt) for prompt in own])
        self._check.run(self._run, self.engine, groups, sampling)

    def _sample_once(self, engine: RolloutEngine, sampling: SamplingConfig, prompt: Prompt) -> RolloutGroup:
        opened = prompt.open()
        options: dict[str, Any] = {"media": [dict(opened.media)]} if opened.media else {}
        options |= {"seed": derive_seed("compare", self._seed), "vocab_size": vocabulary(self._run.policy)}
        rollouts = checked_rollouts(engine, [list(opened.token_ids)], sampling, num_generations=1, **options)
        return self.group([opened], rollouts)[0]

    def _generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        seed: Sequence[int | str],
        branching: Branching | None,
    ) -> list[RolloutGroup]:
        self.engine.bind(self._run.policy, self._run.tokenizer)
        options = self.engine, prompts, sampling, num_generations
        with evaluating(self._run.policy):
            return self.sample_with(*options, seed=seed, episodes=self._episodes(), branching=branching)

    def sample_with(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
        episodes: EpisodeLoop | None = None,
        branching: Branching | None = None,
        indices: Sequence[int] | None = None,
        stop: StopStrings | None = None,
    ) -> list[RolloutGroup]:
        """Sample with an engine that is bound to some policy. Reads nothing that training changes.

        Args:
            engine: The engine.
            prompts: The prompts.
            sampling: How to sample.
            num_generations: Rollouts of each prompt.
            seed: Names the random numbers.
            episodes: Samples episodes; None for plain completions.
            branching: How rollouts branch; None for not at all.
            indices: Index of each prompt in the batch of all ranks; None if they are all that this rank has of it.
            stop: Finds stop strings at branch points, in threads; None makes it, in the main thread.
        """
        prompts = [prompt.open() for prompt in prompts]
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.turn_end_ids))
        by_prompt = (num_ranks() > 1 or indices is not None) and declares(engine, "takes_prompt_indices")
        indices = self._indices(prompts) if indices is None else list(indices)
        if self._harness is not None:
            return self._play(self._harness, engine, prompts, indices, sampling, num_generations, seed)
        if episodes is not None or branching is not None:
            stop = stop or self.stop_strings(sampling)
            loops = episodes, branching, stop
            return self._sample_in_rounds(loops, engine, prompts, indices, sampling, num_generations, seed)
        media = [dict(prompt.media) for prompt in prompts]
        options: dict[str, Any] = {"media": media} if any(media) else {}  # text-only engines need not accept it
        if by_prompt:
            options["prompt_indices"] = indices
        rollouts = checked_rollouts(
            engine,
            [list(prompt.token_ids) for prompt in prompts],
            sampling,
            num_generations=num_generations,
            vocab_size=vocabulary(self._run.policy),
            # Without indices, an engine numbers prompts from 0 on every rank, so seeds must differ by rank.
            seed=derive_seed(*seed, self._seed, 0 if by_prompt else self._run.global_rank),
            **options,
        )
        return self.group(prompts, rollouts, indices)

    def _play(
        self,
        harness: Verifiers,
        engine: RolloutEngine,
        prompts: list[Prompt],
        indices: list[int],
        sampling: SamplingConfig,
        num_generations: int,
        seed: Sequence[int | str],
    ) -> list[RolloutGroup]:
        """Let the harness play the episodes; what the prompts share may become shorter."""
        prompts, rollouts = harness.play(
            engine,
            self._run.policy,
            self._run.tokenizer,
            prompts,
            sampling,
            num_generations,
            seed=derive_seed(*seed, self._seed),
            prompt_indices=indices,
            limits=self._limits,
        )
        return self.group(prompts, rollouts, indices)

    def _sample_in_rounds(
        self,
        loops: tuple[EpisodeLoop | None, Branching | None, StopStrings | None],
        engine: RolloutEngine,
        prompts: list[Prompt],
        indices: list[int],
        sampling: SamplingConfig,
        num_generations: int,
        seed: Sequence[int | str],
    ) -> list[RolloutGroup]:
        """Sample episodes, or branching rollouts."""
        episodes, branching, stop = loops
        rounds = EngineRounds(
            self._run,
            engine,
            sampling,
            num_generations,
            seed,
            base_seed=self._seed,
            one_prompt=episodes is None or not episodes.runner.has_environments,
            may_advance_alone=branching is None,
        )
        max_new_tokens = sampling.max_new_tokens
        with rounds.keeping_caches():
            if episodes is not None:  # observations may shorten what a group's prompts share
                prompts, rollouts = episodes.run(rounds, prompts, indices, max_new_tokens, num_generations, branching)
            else:
                assert branching is not None
                loop = BranchLoop(branching, max_new_tokens, stop)
                rollouts = loop.run(rounds, prompts, indices, num_generations)
        return self.group(prompts, rollouts, indices)

    def stop_strings(self, sampling: SamplingConfig) -> StopStrings | None:
        """Stop strings for branch points, which threads may share; None if there are none. For the main thread."""
        if not sampling.stop:
            return None
        if self._stop is None or self._stop.stop != sampling.stop:
            self._stop = StopStrings(copy.deepcopy(self._run.tokenizer), sampling.stop, threading.Lock())
        return self._stop

    def group(
        self, prompts: Sequence[Prompt], rollouts: Sequence[list[Rollout]], indices: Sequence[int] | None = None
    ) -> list[RolloutGroup]:
        """Join rollouts with their prompts, which are open."""
        indices = self._indices(prompts) if indices is None else indices
        for rollout in (rollout for of_prompt in rollouts for rollout in of_prompt):
            rollout.episode = _episode_name(rollout.episode)
        return [
            RolloutGroup(
                list(prompt.token_ids),
                of_prompt,
                index,
                private_copy(prompt.columns),
                private_copy(prompt.prompt),
                prompt.data_source,
                private_copy(prompt.media),
            )
            for index, prompt, of_prompt in zip(indices, prompts, rollouts, strict=True)
        ]

    def _indices(self, prompts: Sequence[Prompt]) -> list[int]:
        """Indices of this rank's prompts in the batch of all ranks."""
        rank = self._run.global_rank
        return list(range(rank, rank + num_ranks() * len(prompts), num_ranks()))


def _episode_name(name: Any) -> int | str | None:
    """`Rollout.episode` as a plain value."""
    if name is None or isinstance(name, str):
        return name
    try:
        return operator.index(name)
    except TypeError:
        raise ValueError(f"Rollout.episode is {name!r}; pass an integer or a string, or None.") from None
