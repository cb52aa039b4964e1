"""Samples rollouts of prompts with an engine that has the policy's current weights.

`Sampler` makes one engine call per batch of plain completions. For episodes and branching rollouts it runs a loop of
rounds, each of which `EngineRounds` turns into an engine call. `Tooling` holds the tools, environments and chat
template of a run.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, get_args

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from pl_grouprl.chat import ChatFormat, make_chat_format
from pl_grouprl.chat.format import uses_renderers
from pl_grouprl.checks.sampling import can_compare, sampler_difference
from pl_grouprl.data.encoding import ChatOptions
from pl_grouprl.distributed.checksum import WeightsMismatchError
from pl_grouprl.episodes.loop import EpisodeLimits, EpisodeLoop
from pl_grouprl.episodes.runner import ToolRunner
from pl_grouprl.harnesses import Verifiers
from pl_grouprl.models.score import rollout_logprobs
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.rewards.base import EnvironmentReward, EnvironmentStepReward, as_weighted
from pl_grouprl.rollout import HFRolloutEngine
from pl_grouprl.rollout.branching import Branching, BranchLoop, PartialRollout
from pl_grouprl.rollout.engine import (
    RolloutEngine,
    SampleRequest,
    SamplerLostError,
    StopStrings,
    SyncedRolloutEngine,
    checked_rollouts,
    declares,
    length_limits,
    vocabulary,
)
from pl_grouprl.rollout.weight_sync import WeightSync
from pl_grouprl.training.run import Run
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.describe import private_copy
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks, raise_on_all_ranks
from pl_grouprl.utilities.modes import evaluating
from pl_grouprl.utilities.options import as_options, check_options, drop_none
from pl_grouprl.utilities.tolerances import tolerance_of

T = TypeVar("T")

RewrittenHistory = Literal["refuse", "new_row"]
Rewards = list[Weighted | RewardFunction] | RewardFunction


@dataclass(frozen=True)
class EpisodeOptions(EpisodeLimits):
    """The limits of an episode, how episodes are played, and how rollouts branch.

    Attributes:
        tool_timeout: Seconds that a call of a tool may take; no limit if None.
        tool_workers: Processes per rank that run tools and environments, killed if a call takes too long; 0 runs them
            in threads, which cannot be stopped.
        chat_template: Used in place of the tokenizer's: `qwen3`, `llama3`, a path, or the template itself.
        rewritten_history: What to do with a chat template that changes earlier turns once others follow, such as by
            dropping their thinking: `refuse` it, or re-render the conversation before each turn and begin a `new_row`
            of the episode where the history has changed (`Rollout.episode`).
        harness: Plays the episodes with an external library, on the servers of `engine`; see
            `pl_grouprl.harnesses.Verifiers`. Its reward is added to `rewards`.
        branching: Continue training rollouts several times at branch points; `num_generations` then counts the roots
            of a group's tree, and its rollouts are the leaves. See `pl_grouprl.rollout.Branching`.

    Raises:
        ValueError: If an option is out of range.
    """

    tool_timeout: float | None = None
    tool_workers: int = 0
    chat_template: str | None = None
    rewritten_history: RewrittenHistory = "refuse"
    harness: Verifiers | None = None
    branching: Branching | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        history, timeout, workers = self.rewritten_history, self.tool_timeout, self.tool_workers
        check_options(
            {
                "episodes.tool_timeout": (timeout, timeout is None or timeout > 0, "larger than 0, or None"),
                "episodes.tool_workers": (workers, workers >= 0, "at least 1, or 0 to run tools in threads"),
                "episodes.rewritten_history": (history, history in get_args(RewrittenHistory), "'refuse' or 'new_row'"),
            }
        )
        if self.branching is not None:
            object.__setattr__(self, "branching", as_options(Branching, self.branching, "episodes.branching"))


NO_OPTIONS = EpisodeOptions()


class Sampler:
    """Samples on all ranks; synchronizes the weights first if the engine has a copy of them.

    Args:
        run: Provides the policy and its tokenizer.
        engine: The rollout engine; defaults to `HFRolloutEngine()`.
        seed: The run's seed, combined with the seed of each call.
        timed: Makes a context that times its body under a name.
        tooling: The tools of the run; plain completions if None.

    Attributes:
        tooling: As passed.
        turn_end_ids: Tokens that end completions besides those of the engine and of `sampling`.

    Raises:
        TypeError: If the engine is not an engine.
    """

    def __init__(
        self,
        run: Run,
        engine: RolloutEngine | None = None,
        seed: int = 0,
        timed: Callable[[str], AbstractContextManager[Any]] = nullcontext,
        tooling: Tooling | None = None,
    ) -> None:
        kind = SyncedRolloutEngine if hasattr(engine, "update_weights") else RolloutEngine
        if engine is not None and not isinstance(engine, kind):
            raise TypeError(
                f"engine is a {type(engine).__name__}, which lacks a method of {kind.__name__}; pass an engine of "
                "pl_grouprl.rollout, or one of your own."
            )
        self.engine: RolloutEngine = HFRolloutEngine() if engine is None else engine
        self.turn_end_ids: Sequence[int] = ()
        self.tooling = tooling
        self._run, self._seed = run, seed
        self._weight_sync = WeightSync(timed)
        self._is_compared = False
        self._stop: StopStrings | None = None

    def reset(self) -> None:
        """Forget what the engine has: another run may have used or closed it. Tell it the precision of this run."""
        self._weight_sync.forget()
        self._is_compared = False
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
        engine, policy = self.engine, self._run.policy

        def sample() -> list[RolloutGroup]:
            engine.bind(policy, self._run.tokenizer)
            episodes = None if self.tooling is None else self.tooling.loop()
            how: dict[str, Any] = {"seed": seed, "episodes": episodes, "branching": branching}
            with evaluating(policy):
                return self.sample_with(engine, prompts, sampling, num_generations, **how)

        if isinstance(engine, SyncedRolloutEngine):
            groups = self.synced(sample)
            self.compare(groups, sampling)
            return groups
        with self._run.support.whole_weights(policy):
            return sample() if prompts else []

    def synced(self, run: Callable[[], T]) -> T:
        """Run something on all ranks once an engine has the policy's weights; again if it loses them. Collective."""
        assert isinstance(self.engine, SyncedRolloutEngine)
        return self._weight_sync.sample(self._run, self.engine, run)

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
            episodes: Samples episodes; plain completions if None.
            branching: How rollouts branch; not at all if None.
            indices: Index of each prompt in the batch of all ranks; None if they are all that this rank has of it.
            stop: Finds stop strings at branch points, in threads; made here, in the main thread, if None.
        """
        run, rank = self._run, self._run.global_rank
        prompts = [prompt.open() for prompt in prompts]
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *self.turn_end_ids))
        if indices is None:
            indices = range(rank, rank + num_ranks() * len(prompts), num_ranks())
        options = NO_OPTIONS if self.tooling is None else self.tooling.options
        if options.harness is not None:  # may shorten what the prompts share
            prompts, rollouts = options.harness.play(
                engine,
                run.policy,
                run.tokenizer,
                prompts,
                sampling,
                num_generations,
                seed=derive_seed(*seed, self._seed),
                prompt_indices=list(indices),
                limits=options,
            )
        elif episodes is not None or branching is not None:
            one_prompt = episodes is None or not episodes.runner.has_environments
            rounds = EngineRounds(
                run, engine, sampling, num_generations, seed,
                base_seed=self._seed, one_prompt=one_prompt, may_advance_alone=branching is None,
            )  # fmt: skip
            limit = sampling.max_new_tokens
            with rounds.keeping_caches():
                if episodes is not None:  # observations may shorten what a group's prompts share
                    prompts, rollouts = episodes.run(rounds, prompts, list(indices), limit, num_generations, branching)
                else:
                    assert branching is not None
                    loop = BranchLoop(branching, limit, stop or self.stop_strings(sampling))
                    rollouts = loop.run(rounds, prompts, list(indices), num_generations)
        else:
            requests = [
                SampleRequest(list(prompt.token_ids), num_generations, index, sampling.max_new_tokens, prompt.media)
                for prompt, index in zip(prompts, indices, strict=True)
            ]
            # Without indices, an engine numbers prompts from 0 on every rank, so seeds must differ by rank.
            place = 0 if declares(engine, "takes_prompt_indices") else rank
            call_seed, vocab_size = derive_seed(*seed, self._seed, place), vocabulary(run.policy)
            rollouts = checked_rollouts(engine, requests, sampling, seed=call_seed, vocab_size=vocab_size)
        return self.group(prompts, rollouts, indices)

    def stop_strings(self, sampling: SamplingConfig) -> StopStrings | None:
        """Stop strings for branch points, which threads may share; None if there are none. For the main thread."""
        if not sampling.stop:
            return None
        if self._stop is None or self._stop.stop != sampling.stop:
            self._stop = StopStrings(copy.deepcopy(self._run.tokenizer), sampling.stop, threading.Lock())
        return self._stop

    def group(
        self, prompts: Sequence[Prompt], rollouts: Sequence[list[Rollout]], indices: Sequence[int]
    ) -> list[RolloutGroup]:
        """Join rollouts with their prompts, which are open."""
        for rollout in (rollout for of_prompt in rollouts for rollout in of_prompt):
            if rollout.episode is not None and not isinstance(rollout.episode, str):
                rollout.episode = operator.index(rollout.episode)  # also of a NumPy integer
            has_none = rollout.routed_experts is None and rollout.num_sampled_tokens
            if has_none and declares(self.engine, "router_replay"):
                raise ValueError(
                    f"router_replay is on, but {type(self.engine).__name__} returned a rollout without routed_experts; "
                    "switch it off."
                )
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

    def compare(
        self,
        groups: Sequence[RolloutGroup],
        sampling: SamplingConfig,
        *,
        engine: RolloutEngine | None = None,
        prompts: Sequence[Prompt] = (),
    ) -> None:
        """Verify, once per run, that a separate sampler computes the policy's log-probabilities. Collective.

        Compares rank 0's longest first rollouts. With top-k or min-p, log-probabilities of single tokens are not
        comparable, so this waits for rollouts without.

        Args:
            groups: This rank's groups from the current weights.
            sampling: How they were sampled.
            engine: Samples a completion of rank 0's first prompt if its groups have no tokens, as after a resume, when
                all groups may be from older weights. If None, the next call compares.
            prompts: This rank's.

        Raises:
            WeightsMismatchError: On rank 0, if the log-probabilities differ from the policy's.
            RuntimeError: On the other ranks, if rank 0 raises.
        """
        run = self._run

        def has_tokens() -> bool:
            found = any(rollout.num_sampled_tokens for group in groups for rollout in group.rollouts)
            return bool(gather_plain(found, run.device)[0])

        def sample_one() -> list[RolloutGroup]:
            assert engine is not None
            opened = [prompt.open() for prompt in prompts[:1] if run.global_rank == 0]
            if not opened:
                return []
            limit, vocab_size = sampling.max_new_tokens, vocabulary(run.policy)
            requests = [SampleRequest(list(one.token_ids), 1, 0, limit, one.media) for one in opened]
            seed = derive_seed("compare", self._seed)
            rollouts = checked_rollouts(engine, requests, sampling, seed=seed, vocab_size=vocab_size)
            return self.group(opened, rollouts, range(len(opened)))

        def compare() -> None:
            def score(group: RolloutGroup) -> list[Tensor]:
                temperature = sampling.temperature or 1.0
                with torch.inference_mode(False), torch.no_grad(), run.support.forward_context():
                    return rollout_logprobs(run.policy, [group], sharing="repeated", temperature=temperature)

            difference = None if run.global_rank else sampler_difference(score, groups, sampling)
            if difference is None:
                return
            name, allowed = type(self.engine).__name__, tolerance_of(run.policy.dtype).sampler_logprob
            if not difference <= allowed:
                raise WeightsMismatchError(
                    f"{name} has the weights of {type(run.policy).__name__}, but its log-probabilities differ from the "
                    f"policy's by {difference:.3g} nats on average (rounding explains at most {allowed}): it runs a "
                    "different model, or too narrow a dtype. Sample with HFRolloutEngine, or set the engine's dtype."
                )
            rank_zero_info(
                f"{name} and the policy agree: log-probabilities differ by {difference:.1e} nats on average."
            )

        if self._is_compared or not can_compare(sampling):
            return
        comparable = has_tokens()
        if not comparable and engine is not None:
            groups = self.synced(sample_one)
            comparable = has_tokens()
        if comparable:
            with run.support.whole_weights(run.policy):
                raise_on_all_ranks(compare, run.device)
            self._is_compared = True


class EngineRounds:
    """Samples in rounds: the turns of episodes, the segments of branching rollouts. Implements `RoundSampler`.

    Random numbers are identified by round and stream.

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
        is_first = number == 0 and self._one_prompt
        count = self._num_generations if is_first else 1
        requests = []
        for one, limit in zip(rollouts[::count], limits[::count], strict=True):
            index = one.prompt_index if is_first else one.stream
            requests.append(SampleRequest(one.next_prompt(), count, index, limit, one.media))
        if not requests and not self._is_collective:
            return []
        stream = self._seed if number == 0 else (*self._seed, "turn", number)
        # Without indices, an engine numbers prompts from 0 on every rank, so seeds must differ by rank.
        place = 0 if declares(self._engine, "takes_prompt_indices") else self._run.global_rank
        seed, vocab_size = derive_seed(*stream, self._base_seed, place), vocabulary(self._run.policy)
        groups = checked_rollouts(self._engine, requests, self._sampling, seed=seed, vocab_size=vocab_size)
        sampled = [rollout for group in groups for rollout in group]
        for rollout in sampled:
            if rollout.episode is not None or not all(rollout.loss_mask or ()):
                raise ValueError(
                    f"{type(self._engine).__name__} returned rollouts with Rollout.episode or zeros in "
                    "Rollout.loss_mask, which cannot be continued; omit branching and tools, or use another engine."
                )
        return [
            rollout  # an engine without a limit per prompt may have sampled more
            if len(rollout.token_ids) <= limit
            else Rollout(
                rollout.token_ids[:limit],
                None if rollout.logprobs is None else rollout.logprobs[:limit],
                finish_reason="length",
                weight_versions=None if rollout.weight_versions is None else rollout.weight_versions[:limit],
                routed_experts=None
                if rollout.routed_experts is None
                else rollout.routed_experts[: limit - len(rollout.token_ids)],
            )
            for rollout, limit in zip(sampled, limits, strict=True)
        ]

    def raise_together(self, run: Callable[[], None]) -> None:
        """Run a step; if the engine is collective, an error on one rank is raised on all."""
        if self._is_collective:
            raise_on_all_ranks(run, self._run.device, shared=SamplerLostError)
        else:
            run()

    def any_open(self, is_open: bool) -> bool:
        """Whether a rollout is unfinished, on any rank if the engine is collective."""
        return any(gather_plain(is_open, self._run.device)) if self._is_collective else is_open


class Tooling:
    """Tools, environments and chat template of a run; without tools, it only renders conversations.

    Args:
        run: Provides the tokenizer.
        tools: Functions that the model may call.
        environment_factory: Makes environments; one, or several by name.
        options: How episodes are played.

    Attributes:
        options: As passed.
        runner: Runs tools and environments; None if there are none.
        turn_end_ids: Tokens besides EOS with which the chat template ends the model's turns; empty before `set_up`.

    Raises:
        ValueError: If an option has no effect without tools, or with a harness.
    """

    def __init__(
        self,
        run: Run,
        tools: Sequence[Callable[..., Any]] | None,
        environment_factory: Callable[[], Any] | Mapping[str, Callable[[], Any]] | None,
        options: EpisodeOptions = NO_OPTIONS,
    ) -> None:
        self.options = options
        self._run, self._may_rewrite = run, options.rewritten_history == "new_row"
        self.runner: ToolRunner | None = None
        if options.harness is None and (tools or environment_factory is not None):
            timeout, workers = options.tool_timeout, options.tool_workers
            self.runner = ToolRunner(tools or (), environment_factory, timeout=timeout, workers=workers)
        else:
            ignored = ["tool_timeout", "tool_workers", "rewritten_history", "max_tool_calling_iterations"]
            given = {}
            if options.harness is not None:
                reason = "harness, whose library has options of its own for it (Verifiers.config, Verifiers.renderer)"
                given = drop_none(tools=tools or None, environment_factory=environment_factory)
                ignored += ["chat_template"]
            else:
                reason = "neither tools nor environment_factory, without which it has no effect"
                ignored += ["max_turn_tokens", "max_tokens"]
                ignored += ["chat_template"] if uses_renderers(options.chat_template) else []
            given |= {
                f"episodes.{name}": getattr(options, name)
                for name in ignored
                if getattr(options, name) != getattr(NO_OPTIONS, name)
            }
            if given:
                name, value = next(iter(given.items()))
                raise ValueError(f"{name} is {value!r} with {reason}; omit it.")
        self._template_kwargs: Mapping[str, Any] = {}
        self._split_special_tokens = True
        self._data: Any = None
        self.turn_end_ids: list[int] = []
        self._format: ChatFormat | None = None
        self._formats: list[ChatFormat] = []
        self._loop: EpisodeLoop | None = None

    def with_rewards(self, rewards: Rewards | None) -> Rewards:
        """Add the rewards of environments that have them, and of the harness, each with weight 1.

        Raises:
            ValueError: If there is no reward at all.
        """
        own: list[Any] = []
        if self.options.harness is not None:
            own = [self.options.harness.reward()]
        elif self.runner is not None:
            own = [*map(EnvironmentReward, self.runner.reward_names)]
            own += map(EnvironmentStepReward, self.runner.step_reward_names)
        if own:
            return [*([] if rewards is None else as_weighted(rewards)), *own]
        if rewards is None:
            raise ValueError("rewards is None; pass a reward function, or an environment that has get_reward.")
        return rewards

    @property
    def is_used(self) -> bool:
        """Whether rollouts are episodes: with tools, environments or a harness."""
        return self.runner is not None or self.options.harness is not None

    @property
    def exposes_environments(self) -> bool:
        """Whether reward functions can receive environments: only environments that live in this process."""
        return self.runner is not None and self.runner.has_environments and self.runner.workers == 0

    def check_branching(self, branching: Branching) -> None:
        """Check that the branch points suit the tools of this run.

        Raises:
            ValueError: Says what to change.
        """
        runner, points = self.runner, branching.points
        reason = None
        if self.options.harness is not None:
            reason = "with harness, whose episodes cannot be copied at a branch point; omit branching"
        elif points == "turn" and runner is None:
            reason = "without tools, where a rollout has one turn; use 'every_n' or 'entropy'"
        elif points != "turn" and runner is not None:
            reason = "with tools or environments, where rollouts branch only between turns; use 'turn'"
        elif runner is not None and runner.has_environments:
            reason = "with environment_factory, but an environment cannot be copied at a branch point; use tools"
        elif self._may_rewrite:
            reason = "with episodes.rewritten_history='new_row', but branch points are indices into one row; omit one"
        if reason is not None:
            raise ValueError(f"episodes.branching is set, with points={points!r}, {reason}.")

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
            max_new_tokens: Maximum tokens that the model writes.
            budget: `max_tokens_per_micro_batch`.

        Raises:
            ValueError: If there is a budget, but no limit on tool results.
        """
        if not self.is_used:
            return max_new_tokens
        if self.options.max_tokens is None and budget is not None:
            raise ValueError(
                f"max_tokens_per_micro_batch is {budget}, but tool results may have any number of tokens; set "
                "episodes.max_tokens."
            )
        return self.options.max_tokens or max_new_tokens

    def set_up(self, template_kwargs: Mapping[str, Any], split_special_tokens: bool = True, data: Any = None) -> None:
        """Check the chat template, find the end of its turns, and start the workers.

        Args:
            template_kwargs: What the data passes to the chat template.
            split_special_tokens: Whether control tokens in messages are text.
            data: The data module, whose `image_encoder`, if it has one, encodes images that tools return.

        Raises:
            ValueError: Says what to change.
        """
        self._template_kwargs, self._format, self._loop = template_kwargs, None, None
        self._split_special_tokens, self._data = split_special_tokens, data
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
        if self.runner is not None:
            if self.runner.has_tools:
                chat.check_tools(may_rewrite=self._may_rewrite)
            self.runner.open()

    def close(self) -> None:
        """Stop the workers and the harness, and drop the environments."""
        while self._formats:
            self._formats.pop().close()
        for part in (self.runner, self.options.harness):
            if part is not None:
                part.close()

    def loop(self) -> EpisodeLoop | None:
        """The loop that samples episodes; None without tools."""
        if self._loop is None and self.runner is not None:
            self._loop = EpisodeLoop(self._chat_format(), self.runner, self.options, may_rewrite=self._may_rewrite)
        return self._loop

    def loop_for_threads(self) -> EpisodeLoop | None:
        """A loop for other threads than the main one, with its own tokenizer, which one of them uses at a time."""
        if self.runner is None:
            return None
        chat = self._make_format(copy.deepcopy(self._run.tokenizer))
        return EpisodeLoop(chat, self.runner, self.options, may_rewrite=self._may_rewrite, lock=threading.Lock())

    def _template_options(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of the chat template for a row, besides the messages."""
        options: dict[str, Any] = {}
        if self.options.chat_template is not None:
            options["chat_template"] = self._chat_format().chat_template
        if self.runner is not None:
            options["tools"] = self.runner.schemas(self.runner.kind_of(columns)) or None  # Llama's template renders []
        return options

    def _chat_format(self) -> ChatFormat:
        if self._format is None:
            self._format = self._make_format(self._run.tokenizer)
        return self._format

    def _make_format(self, tokenizer: Any) -> ChatFormat:
        template, kwargs = self.options.chat_template, self._template_kwargs
        encode_images = getattr(self._data, "image_encoder", lambda: None)()  # of its own for each format: for a thread
        chat = make_chat_format(tokenizer, template, kwargs, self._split_special_tokens, encode_images)
        self._formats.append(chat)
        return chat
