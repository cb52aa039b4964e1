"""The side of a module that samples: rollouts of prompts, their rewards, and evaluation by them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from lightning.pytorch import Callback

from pl_grouprl.algorithms.evaluation import evaluation_metrics
from pl_grouprl.algorithms.metrics import Record, summarize
from pl_grouprl.algorithms.policy_module import PolicyModule, evaluating
from pl_grouprl.algorithms.prompt_checks import check_prompts, limits_of_source
from pl_grouprl.algorithms.sampler_check import SamplerCheck
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import (
    PendingRewards,
    RewardFunction,
    RewardWorkers,
    Weighted,
    check_columns,
    check_stoppable,
    prepare_rewards,
    start_rewards,
)
from pl_grouprl.rewards.apply import decode_completions
from pl_grouprl.rollout import HFRolloutEngine, RolloutEngine
from pl_grouprl.rollout.engine import SyncedRolloutEngine, declares
from pl_grouprl.rollout.limits import length_limits, vocabulary
from pl_grouprl.sync.weight_sync import CloseEngine, WeightSync, check_adapter
from pl_grouprl.types import Prompt, Rollout, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.annotations import ArgumentError, describe_value
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.copying import private_copy
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks
from pl_grouprl.utilities.options import check_options

DEFAULT_SAMPLING = SamplingConfig()

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


@checked_arguments
class SamplingModule(PolicyModule):
    """Samples rollouts of its policy and rewards them; validates and tests the policy by that.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        sampling: How training rollouts are sampled. Log-probabilities are trained at its temperature.
        engine: Samples the rollouts; None is `HFRolloutEngine()`, which needs nothing but PyTorch. One with a copy of
            the weights (`SyncedRolloutEngine`) is given them when they have changed, and closed at the end of each run
            (`fit`, `validate`, `test`) and after an exception; another run starts it again.
        val_num_generations: Rollouts per prompt in validation, test and predict: the k of mean@k.
        val_sampling: How those are sampled; None is `sampling`.
        reward_workers: Processes of each rank in which reward functions run side by side; 0 runs them in this one, one
            after another. Async functions and reward models stay in this one; see `RewardWorkers`.
        reward_timeout: Seconds that a call of a function in a worker, or of an async one, may take: of one group, or of
            one rollout with verl's signature. It is then killed with what it started, and has failed. None: any time.
        reward_retries: How often a call that raised is repeated.
        max_failed_share: Share of the rollouts of a rank on which a function may fail before that ends the run.
        seed: Decides rollouts, the order of mini-batches and dropout, together with the position in the run, so that a
            resumed run continues exactly.
        **kwargs: Options of `PolicyModule`: optimizer, sharing, attention_backend, verify, max_nonfinite_steps.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        sampling: SamplingConfig = DEFAULT_SAMPLING,
        engine: RolloutEngine | None = None,
        val_num_generations: int = 1,
        val_sampling: SamplingConfig | None = None,
        reward_workers: int = 0,
        reward_timeout: float | None = None,
        reward_retries: int = 1,
        max_failed_share: float = 0.5,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        check_options(
            {
                "val_num_generations": (val_num_generations, val_num_generations >= 1, "at least 1"),
                "reward_workers": (reward_workers, reward_workers >= 0, "0 (none) or larger"),
                "reward_retries": (reward_retries, reward_retries >= 0, "0 or larger"),
                "max_failed_share": (max_failed_share, 0 <= max_failed_share <= 1, "in [0, 1]"),
                "reward_timeout": (
                    reward_timeout,
                    reward_timeout is None or reward_timeout > 0,
                    "larger than 0, or None for any time",
                ),
            }
        )
        prepared = prepare_rewards(rewards)
        if reward_timeout is not None and reward_workers == 0:
            check_stoppable(prepared, reward_timeout)
        if engine is not None and not isinstance(engine, RolloutEngine):
            raise ArgumentError(
                f"engine is {describe_value(engine)}; pass an engine of pl_grouprl.rollout, an object with bind() and "
                "generate(), or None for HFRolloutEngine()."
            )
        self.rewards = rewards
        self.sampling = sampling
        self.engine: RolloutEngine = HFRolloutEngine() if engine is None else engine
        self.val_num_generations = val_num_generations
        self.val_sampling = sampling if val_sampling is None else val_sampling
        self.reward_workers = reward_workers
        self.reward_timeout = reward_timeout
        self.reward_retries = reward_retries
        self.max_failed_share = max_failed_share
        self.seed = seed
        self._workers: RewardWorkers | None = None
        self._weight_sync = WeightSync(self._timed)
        self._sampler_check = SamplerCheck()
        self._evaluated: list[RolloutGroup] = []
        self._records: list[Record] = []

    def setup(self, stage: str) -> None:
        """Refuse prompts that lack what a reward function needs, before anything is loaded."""
        super().setup(stage)
        for split, prompts in self._prompts_of(stage).items():
            check_columns(prompts, self.rewards, split)
        self._check_prompts(stage, limits_of_source(self.policy_source))
        self._weight_sync.forget()  # a former run's sampler may be gone
        self._sampler_check.forget()
        self._end_workers()  # of a run that an exception has ended
        if self.reward_workers and stage != "predict":
            self._workers = RewardWorkers(prepare_rewards(self.rewards), self.reward_workers, self.reward_timeout)

    def configure_model(self) -> None:
        """Load the models, and refuse prompts that exceed limits only the loaded models know."""
        super().configure_model()
        if self._trainer is not None and self.trainer.state.fn is not None:
            self._check_prompts(self.trainer.state.fn.value, length_limits(self.policy), vocabulary(self.policy))

    def on_train_epoch_start(self) -> None:
        """Log how many prompts were dropped and truncated."""
        super().on_train_epoch_start()
        metrics = getattr(getattr(self.trainer, "datamodule", None), "metrics", None)
        if metrics is not None:
            self.log_dict(metrics(), batch_size=1, sync_dist=True)

    def _prompts_of(self, stage: str) -> dict[str, Sequence[Prompt]]:
        """The prompts that a stage uses, by split, where the data module has them."""
        prompts = getattr(getattr(self.trainer, "datamodule", None), "prompts", {})
        return {split: prompts[split] for split in _SPLITS_OF_STAGE.get(stage, ()) if split in prompts}

    def _check_prompts(self, stage: str, limits: dict[str, int], vocab_size: int | None = None) -> None:
        for split, prompts in self._prompts_of(stage).items():
            sampling = self.sampling if split == "train" else self.val_sampling
            check_prompts(prompts, split, sampling, self.engine, limits, vocab_size)

    def load_models(self) -> None:
        """Load the policy, and refuse an engine that cannot be given its weights."""
        super().load_models()
        check_adapter(self.engine, self.policy)

    def configure_callbacks(self) -> list[Callback]:
        """Add what closes the engine after an exception."""
        own = super().configure_callbacks()
        return [*own, CloseEngine()] if isinstance(self.engine, SyncedRolloutEngine) else own

    def teardown(self, stage: str) -> None:
        """End the reward workers, and let go of the engine's sampler."""
        super().teardown(stage)
        self._end_workers()
        if isinstance(self.engine, SyncedRolloutEngine):
            self.engine.close()

    def _end_workers(self) -> None:
        if self._workers is not None:
            self._workers.close()
            self._workers = None

    def generate(
        self,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt, in evaluation mode. A rank may have no prompt, but all ranks call it.

        The images and videos of the prompts are processed here.

        Args:
            prompts: Every `num_ranks`-th prompt of the batch of all ranks.
            sampling: How to sample.
            num_generations: Rollouts of each prompt.
            seed: What names the random numbers, beside the module's seed.

        Returns:
            Groups whose `group_id` is the place of the prompt in the batch of all ranks.
        """
        if isinstance(self.engine, SyncedRolloutEngine):
            run = partial(self._generate, prompts, sampling, num_generations, seed)
            groups = self._weight_sync.sample(self, self.engine, run)
            self._sampler_check.look(self, self.engine, groups, sampling)
            return groups
        with self.support.whole_weights(self.policy):
            return self._generate(prompts, sampling, num_generations, seed) if prompts else []

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_generations: int, seed: Sequence[int | str]
    ) -> list[RolloutGroup]:
        self.engine.bind(self.policy, self.tokenizer)
        with evaluating(self.policy):
            return self.sample_with(self.engine, prompts, sampling, num_generations, seed=seed)

    def sample_with(
        self,
        engine: RolloutEngine,
        prompts: Sequence[Prompt],
        sampling: SamplingConfig,
        num_generations: int,
        *,
        seed: Sequence[int | str],
    ) -> list[RolloutGroup]:
        """Do as `generate` does, with an engine that is bound to some policy. Reads nothing that training changes."""
        prompts = [prompt.open() for prompt in prompts]
        media = [dict(prompt.media) for prompt in prompts]
        options: dict[str, Any] = {"media": media} if any(media) else {}  # engines for text need not know the word
        named = num_ranks() > 1 and declares(engine, "takes_prompt_indices")
        if named:
            options["prompt_indices"] = self._places(prompts)
        rollouts = engine.generate(
            [list(prompt.token_ids) for prompt in prompts],
            sampling,
            num_generations=num_generations,
            # Without names for the prompts, ranks would draw the same numbers for different ones.
            seed=derive_seed(*seed, self.seed, 0 if named else self.global_rank),
            **options,
        )
        return self.group(prompts, rollouts)

    def group(self, prompts: Sequence[Prompt], rollouts: Sequence[list[Rollout]]) -> list[RolloutGroup]:
        """Put rollouts together with their prompts, which are open. An engine may report numbers of NumPy."""
        for rollout in (rollout for own in rollouts for rollout in own):
            rollout.token_ids = [int(token) for token in rollout.token_ids]
            if rollout.logprobs is not None:
                rollout.logprobs = [float(logprob) for logprob in rollout.logprobs]
        return [
            RolloutGroup(prompt.token_ids, own, place, prompt.columns, prompt.prompt, prompt.data_source, prompt.media)
            for place, prompt, own in zip(self._places(prompts), private_copy(prompts), rollouts, strict=True)
        ]

    def _places(self, prompts: Sequence[Prompt]) -> list[int]:
        """Where this rank's prompts are in the batch of all ranks."""
        return list(range(self.global_rank, self.global_rank + num_ranks() * len(prompts), num_ranks()))

    def start_rewards(self, groups: Sequence[RolloutGroup]) -> PendingRewards:
        """Begin to reward rollouts; `wait` on the result finishes. See `pl_grouprl.rewards.start_rewards`."""
        return start_rewards(
            groups,
            self.rewards,
            tokenizer=self.tokenizer,
            retries=self.reward_retries,
            max_failed_share=self.max_failed_share,
            workers=self._workers,
            timeout=self.reward_timeout,
        )

    # Evaluation.

    def on_validation_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample and reward the rollouts to evaluate; not done in the step, because that runs under autocast.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        self.on_predict_batch_start(batch, batch_idx, dataloader_idx)
        self.start_rewards(self._evaluated).wait()

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return copies of the batch's rollouts with their rewards as `groups`, for callbacks."""
        self._records += summarize(self._evaluated)
        return {"groups": private_copy(self._evaluated)}

    def on_validation_epoch_end(self) -> None:
        """Log `val/...` metrics over all ranks."""
        self._log_evaluation("val")

    on_test_batch_start = on_validation_batch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Log `test/...` metrics over all ranks."""
        self._log_evaluation("test")

    def on_predict_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample rollouts as validation does, without rewards."""
        check_batch(batch)
        seed = ("evaluation", dataloader_idx, batch_idx)
        self._evaluated = self.generate(batch.prompts, self.val_sampling, self.val_num_generations, seed=seed)

    def predict_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> list[RolloutGroup]:
        """Return this rank's rollouts of the batch, `val_num_generations` of each prompt, with their texts."""
        decode_completions(self._evaluated, self.tokenizer)
        return self._evaluated

    def _log_evaluation(self, prefix: str) -> None:
        records = [record for own in gather_plain(self._records, self.device) for record in own]
        self._records = []
        metrics = evaluation_metrics(records, prefix)
        self.log(f"{prefix}/reward", metrics.pop(f"{prefix}/reward"), prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)

    def _timed(self, name: str) -> AbstractContextManager[None]:
        """Charge what runs inside to a part of a step's time, where a subclass has a clock."""
        return nullcontext()

    def _derive_seed(self, *parts: int | str) -> int:
        """A seed of this rank's own."""
        return derive_seed(*parts, self.seed, self.global_rank)


def check_batch(batch: Any) -> None:
    """Refuse batches of a loader that knows nothing of rollouts.

    Raises:
        TypeError: If it is no `PromptBatch`.
    """
    if not isinstance(batch, PromptBatch):
        raise TypeError(
            f"the loader yields {type(batch).__name__}, but rollouts need a pl_grouprl.data.PromptBatch: prompts, and "
            "which update of their rollouts it is. Put the prompts into a PromptDataModule and pass it as datamodule; "
            "a loader of your own must yield PromptBatch objects, each module.updates_per_rollout times in a row."
        )
