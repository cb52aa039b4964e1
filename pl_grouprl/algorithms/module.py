"""A run from top to bottom: Lightning's hooks, about in the order in which they run; each calls into a part.

`RLModule` begins with its options, the parts made from them, and what an algorithm fills in; the hooks follow, `setup`
first. A training batch:

1. `on_train_batch_start`, if a new prompt batch begins, calls `collect_rollouts`: sample, start the rewards, score (old
   and reference log-probabilities), wait for the rewards, compute advantages (`compute_targets` of the algorithm).
2. `optimizer_step` runs all of this (while gradients accumulate, Lightning runs only a, without it):
   a. `training_step` trains one mini-batch: for each micro-batch `compute_loss`, then backward, the last by Lightning.
   b. `on_before_optimizer_step` finishes the gradients, `configure_gradient_clipping` clips them.
   c. The optimizer steps, and `check_weights` looks at the result.
3. `on_train_batch_end` logs where the time went.

Legend: N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

import contextlib
import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from pl_grouprl.callbacks.checkpoints import stop_together
from pl_grouprl.callbacks.defaults import LoadModels, callbacks_of_module, replace_earlier
from pl_grouprl.checks import ParityReport, check_parity
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.distributed.lost_ranks import RankWatchdog
from pl_grouprl.distributed.strategies import StrategySupport, support_of
from pl_grouprl.episodes.tools import EnvironmentFactory
from pl_grouprl.functional.entropy import EntropyOptions, high_entropy_mask
from pl_grouprl.functional.importance import ImportanceSampling
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.models.adapters import (
    adapters_off,
    check_adapters,
    has_adapters,
    leave_frozen_parameters_out_of_checkpoints,
)
from pl_grouprl.models.policy import (
    PolicySource,
    as_policy_source,
    fingerprint,
    frozen_copy,
    leave_out_of_checkpoints,
    mix_into_reference,
)
from pl_grouprl.models.score import check_balanced, score
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.rewards.apply import decode_completions
from pl_grouprl.rollout import RolloutEngine
from pl_grouprl.rollout.branching import Branching
from pl_grouprl.rollout.engine import SyncedRolloutEngine, declares
from pl_grouprl.rollout.weight_sync import CloseEngine, check_adapter
from pl_grouprl.training.ahead import CloseRolloutsAhead
from pl_grouprl.training.buffer import RolloutBuffer
from pl_grouprl.training.checkpoint import (
    FREE_OPTIONS,
    PASSED_ON,
    RandomNumbers,
    RunCheckpoint,
    Stateful,
    module_from_checkpoint,
    record_options,
    recorded_options,
)
from pl_grouprl.training.checks import (
    GuardOptions,
    PrefixSharing,
    check_batch,
    check_before_loading,
    check_groups_fit,
    check_prompts_of_model,
    is_custom,
    refuse_compiled,
    refuse_dropout,
    refuse_stop_iteration,
)
from pl_grouprl.training.collector import Collector
from pl_grouprl.training.device_choices import DeviceChoices
from pl_grouprl.training.evaluation import EvaluationOptions, Evaluator
from pl_grouprl.training.metrics import StepTimer, Throughput
from pl_grouprl.training.micro_batches import MicroBatch, MicroBatcher, SharingOptions
from pl_grouprl.training.mismatch import Mismatch
from pl_grouprl.training.objective import KLOptions, KLPenalty, LossSums, PolicyObjective
from pl_grouprl.training.optimizer import OptimizerConfig, build_optimizer, parameters_by_part
from pl_grouprl.training.rewarder import RewardCallOptions, Rewarder, rewards_per_token
from pl_grouprl.training.run import Accumulation
from pl_grouprl.training.sampler import EpisodeOptions, Sampler, Tooling
from pl_grouprl.training.update import Optimization, Scorer, Updater, check_weights, clip_gradients
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.checkpoint_files import find_last, verify_loads
from pl_grouprl.utilities.describe import lineage, private_copy
from pl_grouprl.utilities.distributed import derive_seed, gather_plain
from pl_grouprl.utilities.loggers import forget_numbers, log_every_step, place_default_logger, prepare_loggers
from pl_grouprl.utilities.modes import naming_memory, seed_torch
from pl_grouprl.utilities.options import check_options, drop_none, join_options
from pl_grouprl.utilities.progress import PROGRESS

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from typing_extensions import Self

T = TypeVar("T")


DEFAULT_OPTIMIZER = OptimizerConfig()
DEFAULT_SAMPLING = SamplingConfig()
_SHARING, _EPISODES, _EVALUATION = SharingOptions(), EpisodeOptions(), EvaluationOptions()
_REWARD_CALLS, _KL, _GUARDS = RewardCallOptions(), KLOptions(), GuardOptions()
_IMPORTANCE_SAMPLING = ImportanceSampling()


class RLModule(pl.LightningModule, ABC):
    """Trains a policy on its rollouts. A subclass computes the targets of the updates, such as advantages.

    Each prompt batch arrives `updates_per_rollout` times in a row. The first time, rollouts are sampled, rewarded and
    scored; every time, one mini-batch of them is trained. Optimization is automatic, as in Lightning: clipping,
    accumulation and precision are options of the Trainer.

    A Trainer with a logger also gets a `RunSummary`, if it has none, and logs every step instead of Lightning's default
    of every 50th; any other `log_every_n_steps` stays. `pl_grouprl.default_callbacks()` returns the callbacks that the
    configurations use.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`. Optional
            if the environment computes the reward (`get_reward`).
        optimizer: AdamW or another optimizer, and its schedule.
        sharing: How common prefixes of rollouts are encoded once.
        sampling: How training rollouts are sampled. Log-probabilities are trained at its temperature.
        engine: Samples the rollouts; defaults to `HFRolloutEngine()`, which needs only PyTorch. An engine with a copy
            of the weights (`SyncedRolloutEngine`) receives them when they have changed, and is closed at the end of
            each run (`fit`, `validate`, `test`) and after an exception; another run starts it again.
        tools: Functions that the model may call in a turn, sync or async, with type hints and a Google docstring (TRL's
            contract). They run with your permissions; see `pl_grouprl.episodes.tools`.
        environment_factory: Makes an environment per rollout; later rollouts reuse it. Or a dictionary of factories:
            the row's column `environment` chooses one. See `pl_grouprl.episodes.tools`.
        episodes: Limits of tool use and conversations, how they are played, and how rollouts branch.
        evaluation: How validation, test and predict sample, and which reward counts as a pass.
        reward_calls: How reward functions are called: workers, limits, failures.
        seed: Determines rollouts, the order of mini-batches and random draws of a loss, together with the position in
            the run, so that a resumed run continues exactly.
        num_generations: Rollouts per prompt; with `episodes.branching`, the roots of a group's tree.
        num_iterations: Passes over each batch of rollouts.
        num_mini_batches: Updates in each pass. Groups stay whole, so it is at most the number of prompts of a batch.
        mask_truncated_completions: Do not train on rollouts that were cut at `max_new_tokens`. Their rewards still
            count in the statistics of their group.
        dynamic_sampling: Train only on groups whose rewards, or step rewards, differ (DAPO, arXiv:2503.14476, section
            3.2). Prompts that give nothing to learn are replaced by others from the training data.
        max_staleness: Rollouts are sampled up to this many batches of prompts ahead, while earlier ones are trained. It
            bounds the staleness of each token: the version of the weights that is trained minus the version that
            sampled the token, counted in batches. 0 samples each batch when it is trained, from the current weights.
        max_tokens_per_micro_batch: Maximum tokens that go through the model at once on a rank. The groups of an update
            are packed into as many rows as that takes; a larger group is split: its prompt is encoded once, and its
            rollouts follow in slices of this many tokens. The result is the same, unless a loss compares the tokens
            of one micro-batch (`clip_cov`, `kl_cov`, the routers' loss). Defaults to all at once; on a GPU, to as many
            as its free memory allows.
        policy_loss: A name in `pl_grouprl.functional.policy_loss`: `ppo`, `gspo`, `gspo_token`, `cispo`, `sapo`,
            `gmpo`, `vespo`, `gpg`, `dro`, `clip_cov`, `kl_cov`, `dppo_tv`, `dppo_kl`, or your own
            (`register_policy_loss`). Or a mapping with its `name` and options: `{name: ppo, delta: 3}`.
        loss_agg_mode: How token losses are aggregated, by verl's names. The norm of `seq-mean-token-sum-norm` is
            `sampling.max_new_tokens`.
        epsilon: How far the ratio may fall below 1 before it is clipped; defaults to the loss's own (`ppo`: 0.2).
        epsilon_high: How far it may rise above 1; defaults to `epsilon`.
        beta: Coefficient of the KL penalty. 0 needs no reference policy, and none is loaded.
        kl: The penalty's estimator and place, and how its coefficient adapts.
        entropy_coef: Weight of the entropy bonus, or a mapping of all its options, such as a target that it adapts to,
            or the fraction of tokens to train, highest entropy first.
        router_aux_loss_coef: Weight of the load-balancing loss of a mixture of experts, over all tokens of a
            micro-batch (a mini-batch on one rank, if no budget cuts it), prompts included, each counted once per
            rollout that holds it. Micro-batches and ranks are averaged by their share of the loss denominator.
        importance_sampling: Correction where sampler and trainer disagree about log-probabilities.
        guards: When to end a run that learns nothing or hangs, and what a resumed run may change.

    Attributes:
        policy: The model, once `configure_model` has run.
        reference: A frozen copy of the initial policy if `beta > 0`. It is rebuilt from the source at every start,
            and part of a checkpoint only if `kl.ref_model_sync_steps` moves it. A policy with an adapter needs none,
            see `reference_policy`; its frozen weights are not part of a checkpoint either.
        last_rollouts: The latest training rollouts with their rewards and advantages; None while others are collected.
        is_stepping: Whether the gradients of this batch are finished, so that its optimizer step may have begun.
        starts_over: Maps parts of the saved state to the option with their initial value: if a resumed run changes the
            option on purpose, the part starts over.
        free_options: Options that may differ when a run is resumed. A subclass may add to them.

    Raises:
        ValueError: If an option is out of range, unknown, or has no effect together with another.
    """

    starts_over: ClassVar[dict[str, str]] = {"kl_controller": "beta", "entropy_controller": "entropy_coef.coef"}
    free_options: ClassVar[frozenset[str]] = FREE_OPTIONS

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in cls.__dict__:
            cls.__init__ = record_options(cls.__init__)  # type: ignore[method-assign]

    @record_options
    def __init__(
        self,
        policy: str | PolicySource,
        rewards: None | list[Weighted | RewardFunction] | RewardFunction = None,  # noqa: RUF036 (the callable last)
        *,
        optimizer: OptimizerConfig = DEFAULT_OPTIMIZER,
        sharing: SharingOptions = _SHARING,
        sampling: SamplingConfig = DEFAULT_SAMPLING,
        engine: RolloutEngine | None = None,
        tools: list[Callable[..., Any]] | None = None,
        environment_factory: EnvironmentFactory | dict[str, EnvironmentFactory] | None = None,
        episodes: EpisodeOptions = _EPISODES,
        evaluation: EvaluationOptions = _EVALUATION,
        reward_calls: RewardCallOptions = _REWARD_CALLS,
        seed: int = 0,
        num_generations: int = 8,
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        mask_truncated_completions: bool = False,
        dynamic_sampling: bool = False,
        max_staleness: int = 0,
        max_tokens_per_micro_batch: int | None = None,
        policy_loss: str | dict[str, Any] = "ppo",
        loss_agg_mode: str = "token-mean",
        epsilon: float | None = None,
        epsilon_high: float | None = None,
        beta: float = 0.0,
        kl: KLOptions = _KL,
        entropy_coef: float | EntropyOptions = 0.0,
        router_aux_loss_coef: float = 0.0,
        importance_sampling: ImportanceSampling = _IMPORTANCE_SAMPLING,
        guards: GuardOptions = _GUARDS,
    ) -> None:
        super().__init__()
        counts = {"num_iterations": num_iterations, "num_mini_batches": num_mini_batches}
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        self.policy_source: PolicySource = as_policy_source(policy)
        self.rewards, self.optimizer_config, self.seed = rewards, optimizer, seed
        self.sampling, self.num_generations = sampling, num_generations
        self.num_iterations, self.num_mini_batches = num_iterations, num_mini_batches
        self.sharing, self.episodes, self.evaluation, self.reward_calls = sharing, episodes, evaluation, reward_calls
        self.kl, self.importance_sampling, self.guards = kl, importance_sampling, guards
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.mask_truncated_completions, self.dynamic_sampling = mask_truncated_completions, dynamic_sampling
        self.max_staleness = max_staleness
        self.policy: Any = None
        self.reference: Any = None
        if kl.ref_model_sync_steps is None:
            leave_out_of_checkpoints(self, "reference")
        self.last_rollouts: RolloutBuffer | None = None
        self.is_stepping = False
        self.num_tokens = 0

        self.timer, self.throughput = StepTimer(), Throughput()
        self.random_numbers = RandomNumbers(self)
        self.device_choices = DeviceChoices(self)
        self.prefix_sharing = PrefixSharing(self, sharing)
        self.tooling = Tooling(self, tools, environment_factory, episodes)
        if episodes.branching is not None:
            episodes.branching.check(num_generations, sampling)
            self.tooling.check_branching(episodes.branching)
        self.rewarder = Rewarder(
            self.tooling.with_rewards(rewards),
            self,
            reward_calls,
            max_unrewarded_batches=guards.max_unrewarded_batches,
            environments=self.tooling.exposes_environments and not max_staleness,  # ahead resets them too early
        )
        self.evaluator = Evaluator(self.rewarder.functions, evaluation)
        self.collector = Collector(
            self,
            Sampler(self, engine, seed, self.timer.part, self.tooling),
            self.rewarder,
            self.timer,
            sampling=sampling,
            num_generations=num_generations,
            branching=episodes.branching,
            num_mini_batches=num_mini_batches,
            sharing=sharing.mode,
            seed=seed,
            mask_truncated_completions=mask_truncated_completions,
            dynamic_sampling=dynamic_sampling,
            max_generation_batches=guards.max_generation_batches,
            max_staleness=max_staleness,
            load_policy=self.policy_source.load,
        )
        self.engine = self.sampler.engine
        if episodes.harness is not None:
            episodes.harness.check(self.engine, [sampling, self.evaluation_sampling], max_staleness)
        self.micro_batcher = MicroBatcher(
            self, sharing, max_tokens_per_micro_batch, choose_max_tokens=self.device_choices.micro_batch_tokens
        )
        self.scorer = Scorer(self, self.micro_batcher)
        if sampling.temperature == 0:
            raise ValueError(
                "sampling.temperature is 0, which gives every rollout of a prompt the same tokens; pass a positive one."
            )
        self.kl_penalty = KLPenalty(beta, kl)
        loss = {"name": policy_loss} if isinstance(policy_loss, str) else dict(policy_loss)
        if "name" not in loss:  # a command line that sets one option of a mapping drops a name given as a string
            raise ValueError(f"policy_loss is {loss}, without a name; pass {{'name': 'ppo', ...}}, as one value.")
        self.objective = PolicyObjective(
            loss.pop("name"),
            join_options(drop_none(epsilon=epsilon, epsilon_high=epsilon_high), loss, "policy_loss"),
            loss_agg_mode=loss_agg_mode,
            kl=self.kl_penalty,
            max_new_tokens=sampling.max_new_tokens,
            entropy_coef=entropy_coef,
            router_aux_loss_coef=router_aux_loss_coef,
            importance_sampling=importance_sampling,
        )
        self.mismatch = Mismatch(self, sampling)
        self.optimization = Optimization(guards.max_nonfinite_steps)
        count_update = partial(self.throughput.count, "update", model=None)
        self.updater = Updater(self, self.micro_batcher, self.optimization, count_update)
        self.run_checkpoint = RunCheckpoint(self, num_mini_batches)
        self._logged_names: set[str] = set()  # by the last `training_step`
        self._tokenizer: Any = None
        self._support: StrategySupport | None = None
        self._fixed_options = frozenset(vars(self)) & PASSED_ON  # last: from here on they cannot be set

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_fixed_options", ()):
            raise AttributeError(
                f"{name} cannot be set on a {type(self).__name__}: the parts of the run have received it; pass it to "
                "the constructor."
            )
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Copy the module outside its run, for callbacks that average weights: without Trainer, data and threads."""
        trainer, ahead = self._trainer, self.collector.ahead
        run = [trainer, getattr(trainer, "datamodule", None), self._support, self.rewarder._workers, self.sampler._stop]
        run += [] if ahead is None else [ahead.data, ahead._queue, ahead._copy, ahead._threads, ahead._options]
        memo.update((id(part), None) for part in run)
        if isinstance(self.engine, SyncedRolloutEngine):  # its sampler is in other processes
            memo[id(self.engine)] = self.engine
        copied: Self = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    # What an algorithm fills in.

    @abstractmethod
    def compute_targets(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Put `advantages` into the buffer, and whatever else the loss needs.

        Args:
            buffer: Rollouts with `token_rewards`: rewards per token where functions return them, the rest of the reward
                at the last trained token, minus the KL penalty of each token if that is part of the reward.
            scores: The policy's scores, shape [N], if `needs_old_scores`.
        """

    def compute_loss(self, batch: MicroBatch) -> LossSums:
        """Compute loss and metrics of one micro-batch, each as a sum and a count.

        The step divides the total of the sums, over all micro-batches and ranks, by the total of the counts.
        """
        with self.objective.recorded_routers(self.policy) as routers:
            scores = self.score(self.policy, batch.scoring, **self.objective.score_options)
        return self.objective.loss(batch, scores, self.policy, routers)

    def loss_denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """The denominators of `compute_loss`, known before it is called; override both or neither.

        Args:
            tokens: Per-token quantities of some rollouts, by name, shape [N].
            rollouts: `rollout_index_N` and `num_rollouts`, as losses take them.

        Returns:
            By the name of each part in `LossSums.losses`, the sum of the denominators that `compute_loss` returns.
        """
        return self.objective.denominators(tokens, rollouts)

    @property
    def skips_zero_advantages(self) -> bool:
        """Whether training should skip rollouts whose advantages are all 0."""
        return False

    @property
    def needs_old_scores(self) -> bool:
        """Whether the policy scores the rollouts before the updates, which costs a forward pass.

        Not needed if the policy does not change between the updates of a batch of rollouts.
        """
        steps_between_updates = self.trainer.accumulate_grad_batches % self.updates_per_rollout != 0
        return steps_between_updates or self.kl_penalty.needs_old_logprobs or self.objective.selects_tokens

    def old_score_options(self) -> dict[str, Any]:
        """Keyword arguments of `score` for what to compute in the same forward as old log-probabilities."""
        return {"entropy": True} if self.objective.entropy.options.top_quantile < 1 else {}

    # Before anything is loaded.

    def setup(self, stage: str) -> None:
        """Check options and prompts, and start the workers."""
        verify_loads(self.trainer)
        refuse_stop_iteration(self.trainer)
        stop_together(self.trainer)
        if stage == "fit":
            self.last_rollouts, self.is_stepping = None, False  # of an earlier fit
        check_before_loading(self, stage)
        self.collector.set_up(getattr(self.trainer, "datamodule", None))
        self.sampler.reset()
        self.rewarder.close()  # may still be open after an exception
        data = getattr(self.trainer, "datamodule", None)
        encoding = getattr(data, "encoding", None)
        splits = getattr(encoding, "split_special_tokens", True)
        self.tooling.set_up(getattr(encoding, "chat_template_kwargs", {}), splits, data)
        self.sampler.turn_end_ids = self.tooling.turn_end_ids
        if stage != "predict":
            self.rewarder.open()

    # Models and optimizer.

    def configure_callbacks(self) -> list[pl.Callback]:
        """Prepare the loggers; summarize the run, watch the ranks, and close the engine after an exception."""
        prepare_loggers(self.trainer.loggers)
        log_every_step(self.trainer)
        timeout = self.guards.rank_timeout
        watchdogs = [] if timeout is None else [RankWatchdog(timeout)]
        closers: list[pl.Callback] = [CloseEngine()] if isinstance(self.engine, SyncedRolloutEngine) else []
        closers += [CloseRolloutsAhead()] if self.max_staleness else []
        first, *required = replace_earlier(self.trainer, [LoadModels(), *watchdogs, *closers])
        self.trainer.callbacks.insert(0, first)  # type: ignore[attr-defined]
        return [*callbacks_of_module(self.trainer), *required]

    def configure_model(self) -> None:
        """Load the models, and shard them if the strategy leaves that to the module. Idempotent."""
        if self.policy is None:
            with PROGRESS.during("Loading the models"):
                self.load_models()
        self.support.shard(self)
        check_prompts_of_model(self)

    def load_models(self) -> None:
        """Load the policy, and its frozen copy if one is used. A subclass adds models of its own."""
        self.policy = self.policy_source.load().train()
        check_adapters(self.policy, "policy", trained=True)
        self.device_choices.checkpoint_activations()
        if self.kl.ref_model_sync_steps and (has_adapters(self.policy) or not self.support.keeps_shapes):
            raise ValueError(
                f"kl.ref_model_sync_steps is {self.kl.ref_model_sync_steps}; a reference moves only with all weights "
                "trained, on one device, with ddp or fsdp2."
            )
        if has_adapters(self.policy):
            leave_frozen_parameters_out_of_checkpoints(self, "policy")
            self.run_checkpoint.reference_fingerprint = fingerprint(self.policy, frozen_only=True)
        elif self.kl_penalty.is_used:
            self.reference = frozen_copy(self.policy)
            self.run_checkpoint.reference_fingerprint = fingerprint(self.reference)
        if self.kl_penalty.is_used:
            with self.reference_policy():  # raises for an adapter without a base
                pass
        check_adapter(self.engine, self.policy)
        if self.objective.router_aux_loss_coef > 0:
            check_balanced(self.policy, f"router_aux_loss_coef={self.objective.router_aux_loss_coef}")

    @contextlib.contextmanager
    def reference_policy(self) -> Iterator[Any]:
        """The model to score with as the reference, without gradient: the copy, or the policy with its adapters off."""
        if self.reference is not None:
            yield self.reference
            return
        with adapters_off(self.policy):
            yield self.policy

    def optimized_parts(self) -> dict[str, tuple[nn.Module, OptimizerConfig]]:
        """What is trained, by the name of its parameter groups. A subclass with a critic adds it here."""
        return {"policy": (self.policy, self.optimizer_config)}

    def scored_models(self) -> dict[str, Any]:
        """Transformers models that read rollouts in training, by name; subclasses add theirs. Each shares prefixes."""
        return drop_none(policy=self.policy, reference=self.reference)

    def parity_reports(self) -> list[ParityReport]:
        """Compare the shared with the repeated prefix on each model that is trained."""
        with self.support.whole_weights(self.policy):
            return [check_parity(self.policy, backend=self.sharing.backend, padded_rows=False)]

    def configure_optimizers(self) -> Any:
        """Build one optimizer over all parts."""
        parts, fused = self.optimized_parts(), self.device_choices.fused()
        return build_optimizer(parts, lambda: self.trainer.estimated_stepping_batches, fused)

    # The start of a fit.

    def on_fit_start(self) -> None:
        """Verify that sharing prefixes changes only speed, then share them until the end of the fit.

        Raises:
            ValueError: If the module or a part that it trains is compiled, the Trainer has nothing to clip, or groups
                that cannot be split may exceed the token budget.
        """
        self.prefix_sharing.close()  # may still be open after an exception
        parts = self.optimized_parts()
        refuse_compiled({"module": self, **{f"module.{name}": part for name, (part, _) in parts.items()}})
        if self.trainer.gradient_clip_val and all(config.max_grad_norm for _, config in parts.values()):
            raise ValueError(
                f"trainer.gradient_clip_val is {self.trainer.gradient_clip_val}, but every part has its own "
                "max_grad_norm, so it would clip nothing; omit one of them."
            )
        self.micro_batcher.form_sequence_groups(self.scored_models().values())
        device_name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else None
        self.throughput.open(self.scored_models(), device_name, self.sharing.min_saved_tokens)
        self.device_choices.fuse_layers()
        self.collector.open()
        self.optimization.reset()
        self.device_choices.describe()
        for name, (part, _) in parts.items():
            refuse_dropout(name, part)
        replays = declares(self.engine, "router_replay")
        self.prefix_sharing.open(self.scored_models(), self.parity_reports, router_replay=replays)
        check_groups_fit(self)
        self.device_choices.open()

    def on_train_start(self) -> None:
        """Continue a resumed run where it stood."""
        self.run_checkpoint.continue_training()

    def on_train_epoch_start(self) -> None:
        """Log how many prompts were dropped and truncated."""
        metrics = getattr(getattr(self.trainer, "datamodule", None), "metrics", None)
        if metrics is not None:
            self.log_dict(metrics(), batch_size=1, sync_dist=True)

    # A training batch: rollouts when a new prompt batch begins, then one update.

    @property
    def updates_per_rollout(self) -> int:
        """How many times in a row the train loader yields each prompt batch."""
        return self.num_iterations * self.num_mini_batches

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        """Collect new rollouts when a new prompt batch begins.

        Raises:
            TypeError: If the batch is not a `PromptBatch`.
        """
        check_batch(batch)
        self.timer.start()
        # Lightning miscounts these when it resumes within a batch.
        self.trainer.fit_loop.epoch_loop._batches_that_stepped = self.global_step
        held, self.last_rollouts = self.last_rollouts, None
        is_next = held is not None and held.rollout_number == batch.rollout_number
        if held is None or not is_next or (batch.update_index == 0 and held.updates_done):
            self.throughput.start()
            self.random_numbers.set_aside()
            held = self.collect_rollouts(batch)
            self.random_numbers.keep()
        self.last_rollouts = held
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            # Lightning would do it too late, after the first micro-batches; in `training_step`, which FSDP1 wraps as a
            # forward, FSDP1 would keep its gradients.
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()

    def collect_rollouts(self, batch: PromptBatch) -> RolloutBuffer:
        """Sample, score and reward the rollouts of a prompt batch, and compute the targets of their updates."""
        collected = self.collector.collect(batch, self.generate)  # starts rewards of workers and async ones
        scores = self.score_rollouts_before_update(collected.buffer)
        buffer = self.collector.finish(collected)
        if not declares(self.engine, "updates_in_flight"):  # such an engine samples on other devices
            self.throughput.count("ahead" if self.max_staleness else "rollout", collected.generated)
        with self.timer.part("advantages"):
            self.prepare_updates(buffer, scores)
        self.num_tokens += buffer.num_tokens
        return buffer

    def score_rollouts_before_update(self, buffer: RolloutBuffer) -> TokenScores | None:
        """Put old and reference log-probabilities into the buffer if they are needed; return the policy's scores."""
        scores = None
        if self.needs_old_scores:
            self.throughput.count("scoring", buffer.groups)
            with self.timer.part("old_logprobs"):
                scores = self.score_rollouts(self.policy, buffer, **self.old_score_options())
            buffer.put("old_logprobs", scores.logprobs_N)
        if self.kl_penalty.is_used:
            self.throughput.count("scoring", buffer.groups, "reference")
            with self.timer.part("ref_logprobs"), self.reference_policy() as reference:
                buffer.put("ref_logprobs", self.score_rollouts(reference, buffer).logprobs_N)
        return scores

    def prepare_updates(self, buffer: RolloutBuffer, scores: TokenScores | None) -> None:
        """Put rewards per token into the buffer, and the targets computed from them; choose the tokens to train."""
        self.objective.reject(buffer, self.device)
        buffer.put("kl_penalty", self.kl_penalty.of_rewards(buffer, self.device))  # adapts the coefficient, too
        buffer.put("token_rewards", rewards_per_token(buffer) - buffer.joined("kl_penalty"))
        if (quantile := self.objective.entropy.options.top_quantile) < 1:
            assert scores is not None
            assert scores.entropy_N is not None
            mask_N = buffer.joined("loss_mask")
            gather = lambda own: torch.cat(gather_plain(own, self.device))  # noqa: E731
            buffer.put("high_entropy", high_entropy_mask(scores.entropy_N, mask_N, quantile, gather=gather))
        self.compute_targets(buffer, scores)

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Take the step, end the run if a weight is then NaN or infinite, and update the reference if due."""

        def update() -> Any:  # training_step and the last backward, which DeepSpeed's engine runs
            assert optimizer_closure is not None
            with self.micro_batcher.naming_memory():
                return optimizer_closure()

        with naming_memory(
            "the optimizer step, whose moments take two more numbers for each trained weight",
            "store them in 8 bits (optimizer.state_bits), shard them over more devices (trainer.strategy: fsdp2, "
            "deepspeed), or train an adapter (policy.adapter)",
        ):
            super().optimizer_step(epoch, batch_idx, optimizer, update)
            check_weights(self)
        # Before callbacks save checkpoints.
        if (steps := self.kl.ref_model_sync_steps) and (self.global_step + 1) % steps == 0:
            mix_into_reference(self.reference, self.policy, self.kl.ref_model_mixup_alpha)
        self.timer.mark()

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Train one mini-batch of the rollouts; return the loss of its last micro-batch, for Lightning's backward."""
        buffer = self.last_rollouts
        assert buffer is not None
        self.timer.enter("update")
        # Random draws depend on the position in the run, so a resumed run needs no state of the random numbers.
        update = batch.rollout_number, batch.update_index
        seed_torch(derive_seed("update", *update, self.seed, self.global_rank), self.device)
        objective, custom = self.objective, is_custom(self.compute_loss)
        loss, metrics = self.updater.update(
            buffer,
            buffer.members(batch.update_index),
            Accumulation.of(self.trainer),
            self.compute_loss,
            self.loss_denominators,
            # A loss that is not ours, and the routers', may need all rollouts.
            skips_idle=not custom and objective.router_aux_loss_coef == 0,
            skips_zero_advantages=self.skips_zero_advantages and objective.is_zero_without_advantages,
            whole_episodes=custom or objective.compares_tokens_of_rollouts,
        )
        metrics = self.mismatch.finish(metrics)
        if objective.entropy.adapts and metrics.get("entropy", 0) > 0:  # 0 if no token was trained
            objective.entropy.measure(metrics["entropy"])
            metrics["entropy_coef"] = objective.entropy.applied
        buffer.updates_done = batch.update_index + 1
        if buffer.updates_done == self.updates_per_rollout:
            self.micro_batcher.cache.clear()
        token_ratio = metrics.pop("prefix/token_ratio")
        shown = {"reward": buffer.metrics["reward"], "prefix/token_ratio": token_ratio or math.nan}
        of_rollouts = {name: value for name, value in (buffer.metrics | shown).items() if not math.isnan(value)}
        numbers = of_rollouts | metrics | {"num_tokens": float(self.num_tokens)}
        forget_numbers(self, self._logged_names - numbers.keys())
        self._logged_names = set(numbers)
        self.log_dict({name: numbers.pop(name) for name in shown if name in numbers}, prog_bar=True, batch_size=1)
        self.log_dict(numbers, batch_size=1)
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate the last micro-batch; Lightning calls this after `training_step`."""
        with self.micro_batcher.naming_memory("the backward of "):
            super().backward(loss, *args, **kwargs)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: gradients are zeroed before `training_step`, which runs backward itself."""

    def on_after_backward(self) -> None:
        """Stop the timer of a micro-batch that only accumulates gradients."""
        self.timer.mark()

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Finish the division of accumulated gradients; drop them all if one is not finite."""
        parts = parameters_by_part(self.optimized_parts())
        accumulated, step = self.trainer.accumulate_grad_batches, self.global_step
        norms = self.optimization.before_step(
            parts, self.support, accumulated=accumulated, device=self.device, step=step
        )
        self.log_dict(norms, batch_size=1)
        self.objective.entropy.step()
        self.is_stepping = True

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip each part that has a `max_grad_norm` by it, and the others together by the Trainer's options."""
        parts = self.optimized_parts()
        limits = {name: config.max_grad_norm for name, (_, config) in parts.items()}
        clip_gradients(parameters_by_part(parts), limits, self.support, gradient_clip_val, gradient_clip_algorithm)

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        """Log where the time went: the parts add up to the step."""
        buffer, seconds = self.last_rollouts, self.timer.seconds
        assert buffer is not None
        metrics = {f"time/{name}": value for name, value in seconds.items()}
        self.is_stepping = False
        metrics |= self.throughput.after_step(seconds, buffer, self.updates_per_rollout)
        self.log_dict(metrics, batch_size=1)

    # Validation, test and predict.

    def on_validation_start(self) -> None:
        """Save training's random state, so that validation does not advance it."""
        self.random_numbers.set_aside()

    def on_validation_end(self) -> None:
        """Restore training's random state."""
        self.random_numbers.continue_training()

    def on_predict_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample rollouts, without rewards."""
        check_batch(batch)
        seed = ("evaluation", dataloader_idx, batch_idx)
        self.evaluator.groups = self.generate(
            batch.prompts, self.evaluation_sampling, self.evaluation.num_generations, seed=seed
        )

    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> list[RolloutGroup]:
        """Return this rank's rollouts of the batch, `evaluation.num_generations` of each prompt, with their texts."""
        decode_completions(self.evaluator.groups, self.tokenizer)
        return self.evaluator.groups

    def on_validation_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample and reward rollouts; not in the step, because that runs under autocast."""
        self.on_predict_batch_start(batch, batch_idx, dataloader_idx)
        self.rewarder.start(self.evaluator.groups).wait()

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return copies of the batch's rollouts with their rewards as `groups`, and their `answers`, for callbacks."""
        answers = self.evaluator.record()
        return {"groups": private_copy(self.evaluator.groups), "answers": answers}

    def on_validation_epoch_end(self) -> None:
        """Log `val/...` or `test/...` metrics over all ranks."""
        prefix = "test" if self.trainer.testing else "val"
        metrics = self.evaluator.metrics(prefix, self.device)
        # All ranks have the same numbers; without sync_dist Lightning warns that they may differ.
        reward = metrics.pop(f"{prefix}/reward")
        self.log(f"{prefix}/reward", reward, prog_bar=True, batch_size=1, sync_dist=True)
        self.log_dict(metrics, batch_size=1, sync_dist=True)

    on_test_batch_start = on_validation_batch_start
    test_step = validation_step
    on_test_epoch_end = on_validation_epoch_end

    # The end.

    def teardown(self, stage: str) -> None:
        """Restore the models, end threads and workers, and release the engine's sampler."""
        self.micro_batcher.cache.clear()
        self.device_choices.close()
        self.collector.close()
        self.prefix_sharing.close()
        self.rewarder.close()
        self.tooling.close()
        self.sampler.close()

    # Sampling and scoring, for subclasses and for use outside of a fit.

    @property
    def support(self) -> StrategySupport:
        """How the run's strategy reaches weights and gradients."""
        if self._support is None or not self._support.serves(self._trainer):
            self._support = support_of(self._trainer)
        return self._support

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, loaded when it is first used."""
        if self._tokenizer is None:
            self._tokenizer = self.policy_source.load_tokenizer()
        return self._tokenizer

    @property
    def sampler(self) -> Sampler:
        """Samples rollouts for training and evaluation."""
        return self.collector.sampler

    @property
    def beta(self) -> float:
        """The current coefficient of the KL penalty."""
        return self.kl_penalty.coef

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """How rollouts of validation, test and predict are sampled."""
        return self.evaluation.sampling_after(self.sampling)

    @property
    def max_rollouts(self) -> int:
        """Maximum training rollouts per prompt: `num_generations`, or the leaves of the largest tree."""
        count, branching = self.num_generations, self.episodes.branching
        return count if branching is None else branching.max_rollouts(count)

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
        branching: Branching | None = None,
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt, in evaluation mode. All ranks must call it, even one without prompts.

        The images and videos of the prompts are processed here.

        Args:
            prompts: Every `num_ranks`-th prompt of the batch of all ranks.
            sampling: How to sample.
            num_generations: Rollouts of each prompt.
            seed: Determines the random numbers, together with the module's seed.
            branching: How rollouts branch; None if they do not.

        Returns:
            Groups whose `group_id` is the position of the prompt in the batch of all ranks.
        """
        return self.sampler.generate(prompts, sampling, num_generations, seed=seed, branching=branching)

    def score_rollouts(self, model: Any, buffer: RolloutBuffer, **kwargs: Any) -> TokenScores:
        """Score all rollouts of the buffer without gradient; tensors of shape [N], on the CPU."""
        return TokenScores(*self.scorer.map(model, buffer, partial(self.score, model, **kwargs)))

    def score(self, model: Any, batch: ScoringBatch, **kwargs: Any) -> TokenScores:
        """Score a batch at the sampling temperature; see `pl_grouprl.models.score`."""
        return score(model, batch, temperature=self.sampling.temperature, **kwargs)

    def call(self, function: Callable[[], T]) -> T:
        """Call a function; FSDP1 and DeepSpeed wrap this method, by its name, as they wrap `training_step`."""
        return function()

    # Checkpoints.

    def run_options(self) -> dict[str, Any]:
        """Everything that decides what is optimized, by name, as plain values."""
        return recorded_options(self)

    def saved_state(self) -> dict[str, Stateful]:
        """Parts of the state by name, in the order in which they are loaded. A subclass adds its own."""
        return self.run_checkpoint.standard_parts()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Save all parts."""
        self.run_checkpoint.save(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Load all parts.

        Raises:
            ValueError: If continuing would be wrong; see `pl_grouprl.training.checkpoint`.
        """
        self.run_checkpoint.load(checkpoint)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights, and before them the models, if a launcher has trained them in other processes.

        Raises:
            ValueError: If they do not fit. Says which module wrote the checkpoint, then torch's list.
        """
        if self.policy is None:
            self.load_models()
        try:
            return super().load_state_dict(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError(self.run_checkpoint.describe_misfit(str(error))) from None

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls,
        checkpoint_path: str | Path,
        *,
        map_location: Any = "cpu",
        strict: bool | None = None,
        weights_only: bool = True,
        **kwargs: Any,
    ) -> Self:
        """Build the module from the constructor's arguments and load a checkpoint's weights into it.

        The checkpoint is verified, and no code in it is run. It does not hold the constructor's arguments.

        Args:
            checkpoint_path: A single-file checkpoint.
            map_location: The device to move the module to.
            strict: Whether missing or unexpected weights are an error; None uses the module's `strict_loading`.
            weights_only: Must be True; accepted for compatibility with Lightning.
            **kwargs: The constructor's arguments.

        Raises:
            TypeError: If an argument of the constructor is missing.
            ValueError: If the checkpoint is damaged, a folder, from another algorithm, or does not fit.
        """
        options: dict[str, Any] = {"map_location": map_location, "strict": strict, "weights_only": weights_only}
        return module_from_checkpoint(cls, checkpoint_path, arguments=kwargs, **options)

    @property
    def trainer(self) -> pl.Trainer:
        """The Trainer of the run, which finds `ckpt_path="last"`, and by default logs, where the command line does."""
        return super().trainer

    @trainer.setter
    def trainer(self, trainer: pl.Trainer | None) -> None:
        pl.LightningModule.trainer.fset(self, trainer)  # type: ignore[attr-defined]
        if trainer is not None:  # here, because Lightning chooses the checkpoint before it calls any hook
            place_default_logger(trainer, re.sub("(?<=[a-z])(?=[A-Z])", "_", lineage(self)[-1]).lower())
            find_last(trainer)
