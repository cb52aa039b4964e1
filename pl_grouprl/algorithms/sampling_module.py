"""The side of a module that samples: rollouts of prompts, their rewards, and evaluation by them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pl_grouprl.algorithms.evaluation import evaluation_metrics
from pl_grouprl.algorithms.metrics import Record, summarize
from pl_grouprl.algorithms.policy_module import PolicyModule, evaluating
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.rewards import RewardFunction, Weighted, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.rollout import HFRolloutEngine, RolloutEngine
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed, gather_plain

DEFAULT_SAMPLING = SamplingConfig()

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


class SamplingModule(PolicyModule):
    """Samples rollouts of its policy and rewards them; validates and tests the policy by that.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        sampling: How training rollouts are sampled. Log-probabilities are trained at its temperature.
        engine: Samples the rollouts; None is `HFRolloutEngine()`, which needs nothing but PyTorch.
        val_num_generations: Rollouts per prompt in validation and test: the k of mean@k.
        val_sampling: How those are sampled; None is `sampling`.
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
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        if val_num_generations < 1:
            raise ValueError(f"val_num_generations is {val_num_generations}; it must be at least 1.")
        prepare_rewards(rewards)
        self.rewards = rewards
        self.sampling = sampling
        self.engine: RolloutEngine = HFRolloutEngine() if engine is None else engine
        self.val_num_generations = val_num_generations
        self.val_sampling = sampling if val_sampling is None else val_sampling
        self.seed = seed
        self._evaluated: list[RolloutGroup] = []
        self._records: list[Record] = []

    def setup(self, stage: str) -> None:
        """Refuse prompts that lack what a reward function needs, before anything is loaded."""
        super().setup(stage)
        prompts = getattr(getattr(self.trainer, "datamodule", None), "prompts", {})
        for split in _SPLITS_OF_STAGE.get(stage, ()):
            check_columns(prompts.get(split, ()), self.rewards, split)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_generations: int, *, seed: int
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt, in evaluation mode. A rank may have no prompt, but all ranks call it.

        The images and videos of the prompts are processed here.
        """
        with self.support.whole_weights(self.policy):
            return self._generate(prompts, sampling, num_generations, seed) if prompts else []

    def _generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_generations: int, seed: int
    ) -> list[RolloutGroup]:
        self.engine.bind(self.policy, self.tokenizer)
        prompts = [prompt.open() for prompt in prompts]
        media = [prompt.media for prompt in prompts]
        options: dict[str, Any] = {"media": media} if any(media) else {}  # engines for text need not know the word
        with evaluating(self.policy):
            rollouts = self.engine.generate(
                [prompt.token_ids for prompt in prompts],
                sampling,
                num_generations=num_generations,
                seed=seed,
                **options,
            )
        return [
            RolloutGroup(prompt.token_ids, own, index, prompt.columns, prompt.prompt, prompt.data_source, prompt.media)
            for index, (prompt, own) in enumerate(zip(prompts, rollouts, strict=True))
        ]

    # Evaluation.

    def on_validation_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample the rollouts to evaluate; here rather than in the step, which runs under autocast.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        check_batch(batch)
        seed = self._derive_seed("evaluation", dataloader_idx, batch_idx)
        self._evaluated = self.generate(batch.prompts, self.val_sampling, self.val_num_generations, seed=seed)
        apply_rewards(self._evaluated, self.rewards, tokenizer=self.tokenizer)

    def validation_step(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> dict[str, Any]:
        """Return the rollouts of the batch with their rewards, as `groups`, for callbacks to show."""
        self._records += summarize(self._evaluated)
        return {"groups": self._evaluated}

    def on_validation_epoch_end(self) -> None:
        """Log `val/...` metrics over all ranks."""
        self._log_evaluation("val")

    on_test_batch_start = on_validation_batch_start
    test_step = validation_step

    def on_test_epoch_end(self) -> None:
        """Log `test/...` metrics over all ranks."""
        self._log_evaluation("test")

    def _log_evaluation(self, prefix: str) -> None:
        records = [record for own in gather_plain(self._records, self.device) for record in own]
        self._records = []
        metrics = evaluation_metrics(records, prefix)
        self.log(f"{prefix}/reward", metrics.pop(f"{prefix}/reward"), prog_bar=True, batch_size=1)
        self.log_dict(metrics, batch_size=1)

    def _derive_seed(self, *parts: int | str) -> int:
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
