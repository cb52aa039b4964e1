"""Samples rollouts of prompts with an engine that has the policy's current weights."""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.functional import pad

from pl_grouprl.chat import ChatFormat, make_chat_format
from pl_grouprl.chat.format import uses_renderers
from pl_grouprl.checks.sampling import can_compare, sampler_difference
from pl_grouprl.data.encoding import ChatOptions
from pl_grouprl.distributed.checksum import SamplerLostError, WeightsMismatchError
from pl_grouprl.episodes.loop import EpisodeLimits, EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.harnesses import Verifiers
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.rewards.base import EnvironmentReward, as_weighted
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.branching import Branching, BranchLoop, PartialRollout
from pl_grouprl.rollout.engine import (
    RolloutEngine,
    StopStrings,
    SyncedRolloutEngine,
    checked_rollouts,
    declares,
    length_limits,
    vocabulary,
)
from pl_grouprl.rollout.weight_sync import WeightSync
from pl_grouprl.training.run import Run
from pl_grouprl.types import Media, Prompt, Rollout, RolloutGroup, SamplingConfig, is_per_token
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, raise_on_all_ranks
from pl_grouprl.utilities.modes import evaluating
from pl_grouprl.utilities.options import ArgumentError, check_options, describe_value
from pl_grouprl.utilities.tolerances import tolerance_of

# Verify, once per run, that a separate sampler computes the policy's log-probabilities.


class SamplerParityCheck:
    """Compares a sampler's log-probabilities with the policy's, once per run, on rank 0's longest first rollouts.

    With top-k or min-p, log-probabilities of single tokens are not comparable, so it waits for rollouts without.

    Attributes:
        is_done: Whether they were compared.
    """

    def __init__(self) -> None:
        self.is_done = False

    def forget(self) -> None:
        """Compare again: another run may have another sampler."""
        self.is_done = False

    def run(
        self,
        module: Run,
        engine: SyncedRolloutEngine,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
    ) -> None:
        """Compare, unless already done. Collective.

        Args:
            module: The run, with the policy.
            engine: The engine that sampled.
            groups: The groups that this rank just sampled from the current weights.
            sampling: The sampling options.

        Raises:
            WeightsMismatchError: On rank 0, if the log-probabilities differ from the policy's.
            RuntimeError: On the other ranks, if rank 0 raises.
        """
        if self.is_done or not can_compare(sampling):
            return
        if not gather_plain(any(map(has_tokens, groups)), module.device)[0]:  # all are empty: next time
            return
        with module.support.whole_weights(module.policy):
            raise_on_all_ranks(
                lambda: None if module.global_rank else _compare(module, engine, groups, sampling), module.device
            )
        self.is_done = True


def has_tokens(group: RolloutGroup) -> bool:
    """Whether a rollout has a sampled token, by which samplers are compared."""
    return any(rollout.num_sampled_tokens for rollout in group.rollouts)


def _compare(
    module: Run, engine: SyncedRolloutEngine, groups: Sequence[RolloutGroup], sampling: SamplingConfig
) -> None:
    def score(group: RolloutGroup) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad(), module.support.forward_context():
            return rollout_logprobs(module.policy, [group], sharing="repeated", temperature=sampling.temperature or 1.0)

    difference = sampler_difference(score, groups, sampling)
    if difference is None:
        return
    name, allowed = type(engine).__name__, tolerance_of(module.policy.dtype).sampler_logprob
    if not difference <= allowed:
        raise WeightsMismatchError(
            f"{name} has the weights of {type(module.policy).__name__}, but its log-probabilities differ from the "
            f"policy's by {difference:.3g} nats on average (rounding explains at most {allowed}): it runs a "
            "different model, or too narrow a dtype. Sample with HFRolloutEngine, or set the engine's dtype."
        )
    rank_zero_info(f"{name} and the policy agree: log-probabilities differ by {difference:.1e} nats on average.")


# Samples rollouts in rounds with an engine: the turns of episodes, the segments of branching rollouts.


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


# Tools, environments and harness of a run: options, setup and teardown.

RewrittenHistory = Literal["refuse", "new_row"]
Rewards = list[Weighted | RewardFunction] | RewardFunction


class Episodes:
    """Multi-turn episodes of a run; without tools, it only renders conversations.

    Args:
        run: Provides the tokenizer.
        tools: Functions that the model may call.
        environment_factory: Makes environments; one, or several by name.
        harness: Plays the episodes in place of this package's loop, without tools and environments.
        limits: Limits on an episode's length.
        chat_template: Used in place of the tokenizer's; see `ChatFormat`.
        tool_timeout: Time limit of a call in seconds; None is no limit.
        tool_workers: Processes per rank that run tools; 0 runs them in threads.
        rewritten_history: What to do with a chat template that changes earlier messages once others follow: `refuse`
            it, or begin a `new_row` of the episode.

    Attributes:
        runner: Runs tools and environments; None if there are none.
        harness: As passed.
        turn_end_ids: Tokens besides EOS with which the chat template ends the model's turns; empty before `set_up`.

    Raises:
        ValueError: If an option is out of range, or has no effect without tools.
    """

    def __init__(
        self,
        run: Run,
        tools: Sequence[Callable[..., Any]] | None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
        limits: EpisodeLimits,
        *,
        harness: Verifiers | None = None,
        chat_template: str | None = None,
        tool_timeout: float | None = None,
        tool_workers: int = 0,
        rewritten_history: RewrittenHistory = "refuse",
    ) -> None:
        known = "'refuse' or 'new_row'"
        check_options(
            {"rewritten_history": (rewritten_history, rewritten_history in get_args(RewrittenHistory), known)}
        )
        self._run, self._limits, self._chat_template = run, limits, chat_template
        self._may_rewrite = rewritten_history == "new_row"
        self.runner: ToolRunner | None = None
        self.harness = harness
        if harness is not None:
            _refuse_with_harness(
                tools=tools or None,
                environment_factory=environment_factory,
                max_tool_calling_iterations=limits.max_tool_calling_iterations,
                tool_timeout=tool_timeout,
                tool_workers=tool_workers or None,
                rewritten_history=rewritten_history if self._may_rewrite else None,
                chat_template=chat_template,
            )
        elif tools or environment_factory is not None:
            self.runner = ToolRunner(tools or (), environment_factory, timeout=tool_timeout, workers=tool_workers)
        else:
            _refuse_without_tools(
                **vars(limits),
                tool_timeout=tool_timeout,
                tool_workers=tool_workers or None,
                rewritten_history=rewritten_history if self._may_rewrite else None,
                chat_template=chat_template if uses_renderers(chat_template) else None,
            )
        self._template_kwargs: Mapping[str, Any] = {}
        self._split_special_tokens = True
        self.turn_end_ids: list[int] = []
        self._format: ChatFormat | None = None
        self._formats: list[ChatFormat] = []
        self._loop: EpisodeLoop | None = None

    def with_rewards(self, rewards: Rewards | None) -> Rewards:
        """Add the rewards of environments that have them, and of the harness, each with weight 1.

        Raises:
            ValueError: If there is no reward at all.
        """
        if self.harness is not None:
            return [*([] if rewards is None else as_weighted(rewards)), self.harness.reward()]
        names = [] if self.runner is None else self.runner.reward_names
        if not names:
            if rewards is None:
                raise ValueError("rewards is None; pass a reward function, or an environment that has get_reward.")
            return rewards
        return [*([] if rewards is None else as_weighted(rewards)), *map(EnvironmentReward, names)]

    @property
    def exposes_environments(self) -> bool:
        """Whether reward functions can receive environments: only those that live in this process."""
        return self.runner is not None and self.runner.has_environments and self.runner.workers == 0

    def check_branching(self, branching: Branching) -> None:
        """Check that the branch points suit the tools of this run.

        Raises:
            ValueError: Says what to change.
        """
        at_turns, runner = branching.points == "turn", self.runner
        if self.harness is not None:
            raise ValueError(
                "branching is set together with harness, whose episodes cannot be copied at a branch point; leave out "
                "branching."
            )
        if at_turns and runner is None:
            raise ValueError(
                "Branching.points is 'turn', but without tools a rollout has one turn; pass tools, or use 'every_n' or "
                "'entropy'."
            )
        if runner is not None and not at_turns:
            raise ValueError(
                f"Branching.points is {branching.points!r}, but with tools or environments rollouts can branch only "
                "between turns; use 'turn'."
            )
        if runner is not None and runner.has_environments:
            raise ValueError(
                "branching is set together with environment_factory, but an environment cannot be copied at a branch "
                "point; use stateless tools, or leave out branching."
            )
        if self._may_rewrite:
            raise ValueError(
                "branching is set together with rewritten_history='new_row', but branch points are indices into a "
                "single row; use a chat template that does not rewrite the history, or leave out branching."
            )

    @property
    def chat_options(self) -> ChatOptions:
        """How the data module renders conversations."""
        runner = self.runner
        if runner is None:
            return ChatOptions(self._template_options)
        return ChatOptions(
            self._template_options,
            needs_messages="tools and environments need a conversation",
            may_be_empty=runner.has_environments,
            writes_data=runner.has_environments and runner.environment_names is None,
        )

    def longest_completion(self, max_new_tokens: int, budget: int | None) -> int:
        """The most tokens that may follow a prompt.

        Args:
            max_new_tokens: Most tokens that the model writes.
            budget: `max_tokens_per_micro_batch`.

        Raises:
            ValueError: If there is a budget, but no limit on tool results.
        """
        if self.runner is None and self.harness is None:
            return max_new_tokens
        if self._limits.max_episode_tokens is None and budget is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch is {budget}, but tool results may have any number of tokens; set "
                "max_episode_tokens."
            )
        return self._limits.max_episode_tokens or max_new_tokens

    def set_up(self, template_kwargs: Mapping[str, Any], split_special_tokens: bool = True) -> None:
        """Refuse a chat template that cannot work, find the end of its turns, and start the workers.

        Args:
            template_kwargs: What the data passes to the chat template.
            split_special_tokens: Whether control tokens in messages are text.

        Raises:
            ValueError: Says what to change.
        """
        self._template_kwargs, self._format, self._loop = template_kwargs, None, None
        self._split_special_tokens = split_special_tokens
        tokenizer = self._run.tokenizer
        chat = self._chat_format()
        self.turn_end_ids = [end for end in chat.turn_end_ids if end != tokenizer.eos_token_id]
        if chat.source and not chat.turn_end_ids:
            rank_zero_warn(
                "The chat template ends the model's turns without an end token: answers to messages may run past "
                f"the end of the turn, up to the EOS token {tokenizer.eos_token!r}; set sampling.stop, or use another "
                "template."
            )
        if self.turn_end_ids:
            rank_zero_info(
                f"The chat template ends the model's turns with {tokenizer.decode(self.turn_end_ids)!r}; "
                f"completions end there, as at the EOS token {tokenizer.eos_token!r}."
            )
        if self.runner is None:
            return
        if self.runner.has_tools:
            self._chat_format().check_tools(may_rewrite=self._may_rewrite)
        self.runner.open()

    def close(self) -> None:
        """Stop the workers and the harness, and drop the environments."""
        while self._formats:
            self._formats.pop().close()
        if self.runner is not None:
            self.runner.close()
        if self.harness is not None:
            self.harness.close()

    def loop(self) -> EpisodeLoop | None:
        """The loop that samples episodes; None without tools."""
        if self.runner is None:
            return None
        if self._loop is None:
            self._loop = EpisodeLoop(self._chat_format(), self.runner, self._limits, may_rewrite=self._may_rewrite)
        return self._loop

    def loop_for_threads(self) -> EpisodeLoop | None:
        """A loop for other threads than the main one, with its own tokenizer, which one of them uses at a time."""
        if self.runner is None:
            return None
        chat = self._make_format(copy.deepcopy(self._run.tokenizer))
        return EpisodeLoop(chat, self.runner, self._limits, may_rewrite=self._may_rewrite, lock=threading.Lock())

    def _template_options(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template for a row, besides the messages."""
        options: dict[str, Any] = {}
        if self._chat_template is not None:
            options["chat_template"] = self._chat_format().chat_template
        if self.runner is not None:
            options["tools"] = self.runner.schemas(self.runner.kind_of(columns)) or None  # Llama's template renders []
        return options

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = self._make_format(self._run.tokenizer)
        return self._format

    def _make_format(self, tokenizer: Any) -> ChatFormat:
        chat = make_chat_format(tokenizer, self._chat_template, self._template_kwargs, self._split_special_tokens)
        self._formats.append(chat)
        return chat


def _refuse_with_harness(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is set together with harness, whose library has options of its own for it (Verifiers.config "
                "and Verifiers.renderer); leave it out."
            )


def _refuse_without_tools(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value}, which has no effect without tools; pass tools or environment_factory, or leave "
                "it out."
            )


# Samples rollouts of prompts with an engine that has the policy's current weights.

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
                "engine with a copy of the weights has all of pl_grouprl.distributed.checksum.SyncedSampler."
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
