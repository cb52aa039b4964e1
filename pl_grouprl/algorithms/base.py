"""What all algorithms share: rollouts, the buffer that several updates reuse, evaluation, checkpoints.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from pl_grouprl.algorithms.evaluation import evaluation_metrics
from pl_grouprl.algorithms.metrics import Record, count_tokens, merge_reward_metrics, rollout_metrics, summarize
from pl_grouprl.algorithms.policy_module import LossTerms, PolicyModule, evaluating
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.score import score
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.rewards import RewardFunction, Weighted, apply_rewards, check_columns, prepare_rewards
from pl_grouprl.rollout import HFRolloutEngine, RolloutEngine
from pl_grouprl.types import Prompt, RolloutGroup, SamplingConfig
from pl_grouprl.utilities.distributed import derive_seed, gather_plain, num_ranks

DEFAULT_SAMPLING = SamplingConfig()

_SPLITS_OF_STAGE = {"fit": ("train", "val"), "validate": ("val",), "test": ("test",)}


@dataclass(frozen=True)
class MiniBatch:
    """Whole groups, laid out for one decoder call, with their per-token quantities on the same axis N.

    Attributes:
        scoring: The decoder call.
        tokens: What the buffer holds, by name, on the module's device.
    """

    scoring: ScoringBatch
    tokens: dict[str, Tensor]

    @property
    def mask_N(self) -> Tensor:
        """Which tokens are trained."""
        return self.tokens["loss_mask"]


class RolloutModule(PolicyModule, ABC):
    """Trains a policy on rollouts of its own. A subclass says what is prepared after a rollout and what the loss is.

    Each prompt batch arrives `updates_per_rollout` times in a row. The first time, rollouts are sampled, rewarded and
    prepared; every time, one mini-batch of them is trained. Optimization is Lightning's automatic one: clipping,
    accumulation and precision are the Trainer's options.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        num_generations: Rollouts per prompt.
        sampling: How training rollouts are sampled. Log-probabilities are trained at its temperature.
        engine: Samples the rollouts; None is `HFRolloutEngine()`, which needs nothing but PyTorch.
        num_iterations: Passes over each batch of rollouts.
        num_mini_batches: Updates in each pass. Groups stay whole, so it is at most the number of prompts of a batch.
        val_num_generations: Rollouts per prompt in validation and test: the k of mean@k.
        val_sampling: How those are sampled; None is `sampling`.
        seed: Decides rollouts, the order of mini-batches and dropout, together with the position in the run, so that a
            resumed run continues exactly.
        **kwargs: Options of `PolicyModule`: optimizer, sharing, attention_backend, verify, max_nonfinite_steps.

    Attributes:
        last_rollouts: The latest training rollouts with their rewards and advantages.

    Raises:
        ValueError: If an option is out of range.
    """

    def __init__(
        self,
        policy: str | PolicySource,
        rewards: list[Weighted | RewardFunction] | RewardFunction,
        *,
        num_generations: int = 8,
        sampling: SamplingConfig = DEFAULT_SAMPLING,
        engine: RolloutEngine | None = None,
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        val_num_generations: int = 1,
        val_sampling: SamplingConfig | None = None,
        seed: int = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, **kwargs)
        counts = {
            "num_generations": num_generations,
            "num_iterations": num_iterations,
            "num_mini_batches": num_mini_batches,
            "val_num_generations": val_num_generations,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1.")
        prepare_rewards(rewards)
        self.rewards = rewards
        self.num_generations = num_generations
        self.sampling = sampling
        self.engine: RolloutEngine = HFRolloutEngine() if engine is None else engine
        self.num_iterations = num_iterations
        self.num_mini_batches = num_mini_batches
        self.val_num_generations = val_num_generations
        self.val_sampling = sampling if val_sampling is None else val_sampling
        self.seed = seed
        self.last_rollouts: RolloutBuffer | None = None
        self.num_tokens = 0
        self._evaluated: list[RolloutGroup] = []
        self._records: list[Record] = []
        self._seconds: dict[str, float] = {}
        self._step_start = self._update_start = self._update_end = self._cycle_seconds = 0.0

    # What a subclass fills in.

    @abstractmethod
    def prepare(self, buffer: RolloutBuffer) -> None:
        """Put into the buffer what the updates need, such as advantages and old log-probabilities."""

    @abstractmethod
    def compute_loss(self, batch: MiniBatch) -> LossTerms:
        """Compute the loss of one mini-batch, not yet divided by its denominator."""

    # Rollouts.

    @property
    def updates_per_rollout(self) -> int:
        """How many times in a row the train loader yields each prompt batch."""
        return self.num_iterations * self.num_mini_batches

    def setup(self, stage: str) -> None:
        """Refuse what cannot work, before anything is loaded."""
        batch_size = getattr(getattr(self.trainer, "datamodule", None), "batch_size", None)
        if stage == "fit" and batch_size is not None and self.num_mini_batches > batch_size:
            raise ValueError(
                f"num_mini_batches is {self.num_mini_batches} with batch_size={batch_size} prompts; groups are not "
                f"split, so it can be at most {batch_size}."
            )
        prompts = getattr(getattr(self.trainer, "datamodule", None), "prompts", {})
        for split in _SPLITS_OF_STAGE.get(stage, ()):
            check_columns(prompts.get(split, ()), self.rewards, split)

    def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingConfig, num_generations: int, *, seed: int
    ) -> list[RolloutGroup]:
        """Sample rollouts of each prompt, in evaluation mode. A rank may have no prompt to evaluate."""
        if not prompts:
            return []
        self.engine.bind(self.policy, self.tokenizer)
        with evaluating(self.policy):
            rollouts = self.engine.generate(
                [prompt.token_ids for prompt in prompts], sampling, num_generations=num_generations, seed=seed
            )
        return [
            RolloutGroup(prompt.token_ids, own, index, prompt.columns, prompt.prompt, prompt.data_source)
            for index, (prompt, own) in enumerate(zip(prompts, rollouts, strict=True))
        ]

    def collect_rollouts(self, batch: PromptBatch) -> RolloutBuffer:
        """Sample, reward and prepare the rollouts of a prompt batch."""
        seed = self._derive_seed("rollout", batch.rollout_number)
        with self._timed("rollout"):
            groups = self.generate(batch.prompts, self.sampling, self.num_generations, seed=seed)
        with self._timed("reward"):
            reward_metrics = apply_rewards(groups, self.rewards, tokenizer=self.tokenizer)
        buffer = RolloutBuffer(groups, batch.rollout_number, self.num_mini_batches, self.seed)
        per_rank = gather_plain((summarize(groups), reward_metrics), self.device)
        records = [record for own, _ in per_rank for record in own]
        buffer.metrics = merge_reward_metrics([own for _, own in per_rank]) | rollout_metrics(records)
        buffer.num_tokens = count_tokens(records)
        if math.isnan(buffer.metrics["reward"]):
            rank_zero_warn(
                "no rollout of a batch has a reward, so nothing is learned from it; see that a reward function applies "
                "and gives finite numbers (rewards/{name}/none and rewards/{name}/invalid count where not)."
            )
        self.num_tokens += buffer.num_tokens
        self.prepare(buffer)
        return buffer

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        """Sample new rollouts where a new prompt batch begins.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        _check_batch(batch)
        self._step_start = time.perf_counter()
        held = self.last_rollouts
        if batch.update_index == 0 or held is None or held.rollout_number != batch.rollout_number:
            self._seconds.clear()
            self._cycle_seconds = 0.0
            self.last_rollouts = self.collect_rollouts(batch)

    def score_rollouts(self, model: Any, buffer: RolloutBuffer) -> Tensor:
        """Score all rollouts of the buffer without gradient, a mini-batch's worth of groups at a time, shape [N]."""
        size = -(-len(buffer.groups) // self.num_mini_batches)
        parts = [buffer.groups[start : start + size] for start in range(0, len(buffer.groups), size)]
        with evaluating(model), self.trainer.precision_plugin.forward_context():
            return torch.cat([self.score(model, self._pack(part)).logprobs_N for part in parts])

    def score(self, model: Any, batch: ScoringBatch, **kwargs: Any) -> TokenScores:
        """Score a batch at the sampling temperature; see `pl_grouprl.models.score`."""
        return score(model, batch, temperature=self.sampling.temperature, **kwargs)

    # Updates.

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Return the loss of one mini-batch of the rollouts at hand."""
        buffer = self.last_rollouts
        assert buffer is not None
        self._update_start = time.perf_counter()
        # Dropout depends on the position in the run, so a resumed run needs no state of the random numbers.
        torch.manual_seed(self._derive_seed("update", batch.rollout_number, batch.update_index))
        groups, tokens = buffer.mini_batch(batch.update_index)
        mini_batch = MiniBatch(self._pack(groups), {name: own.to(self.device) for name, own in tokens.items()})
        terms = self.compute_loss(mini_batch)
        scoring = mini_batch.scoring
        token_ratio = (torch.tensor(scoring.num_tokens_repeated), torch.tensor(scoring.num_tokens_run))
        terms.metrics["prefix/token_ratio"] = token_ratio
        loss, metrics = self.divide_loss(terms)
        buffer.updates_done = batch.update_index + 1
        shown = {"reward": buffer.metrics["reward"], "prefix/token_ratio": metrics.pop("prefix/token_ratio")}
        self.log_dict(shown, prog_bar=True, batch_size=1)
        hidden = {name: value for name, value in buffer.metrics.items() if name not in shown}
        self.log_dict({**hidden, **metrics, "num_tokens": float(self.num_tokens)}, batch_size=1)
        return loss

    def on_after_backward(self) -> None:
        """Stop the clock of a micro-batch that only accumulates gradients."""
        self._update_end = time.perf_counter()

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Stop the clock when the update is done, before callbacks save checkpoints or measure."""
        super().optimizer_step(*args, **kwargs)
        self._update_end = time.perf_counter()

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        """Log where the time went."""
        buffer, end = self.last_rollouts, self._update_end
        assert buffer is not None
        seconds = {"update": end - self._update_start, "step": end - self._step_start}
        self._cycle_seconds += seconds["step"]
        metrics = {f"time/{name}": value for name, value in (self._seconds | seconds).items()}
        # Tokens that were sampled and trained, over the time for both; unknown where a resumed run begins in between.
        if "rollout" in self._seconds and buffer.updates_done == self.updates_per_rollout:
            metrics["perf/tokens_per_second"] = buffer.num_tokens / self._cycle_seconds
        self.log_dict(metrics, batch_size=1)

    # Evaluation.

    def on_validation_batch_start(self, batch: PromptBatch, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Sample the rollouts to evaluate; here rather than in the step, which runs under autocast.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        _check_batch(batch)
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

    # Checkpoints.

    def rollout_options(self) -> dict[str, Any]:
        """Options, by name and as plain values, that unfinished rollouts in a checkpoint must be resumed under."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.sampling).items()}
        sampling = {f"sampling.{name}": value for name, value in plain.items()}
        return {"num_generations": self.num_generations, "seed": self.seed} | sampling

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the counters, and the rollouts of every rank where some of their updates are still to come."""
        super().on_save_checkpoint(checkpoint)
        buffer = self.last_rollouts
        unfinished = buffer is not None and buffer.updates_done < self.updates_per_rollout
        state = buffer.state_dict() if buffer is not None and unfinished else None
        checkpoint["pl_grouprl"] |= {
            "num_tokens": self.num_tokens,
            "rollouts": gather_plain(state, self.device),
            "options": self.rollout_options(),
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore them.

        Raises:
            ValueError: If rollouts some of whose updates are still to come would be trained under other options, or
                cut into another number of mini-batches.
        """
        super().on_load_checkpoint(checkpoint)
        state = checkpoint.get("pl_grouprl", {})
        self.num_tokens = state.get("num_tokens", 0)
        rollouts = state.get("rollouts", [None])
        kept = rollouts[0] is not None and len(rollouts) == num_ranks()
        self._compare_options(state.get("options", {}), unfinished=kept)
        if rollouts[0] is None:
            return
        if len(rollouts) != num_ranks():
            rank_zero_warn(
                f"the checkpoint holds rollouts of {len(rollouts)} ranks and this run has {num_ranks()}; the prompts "
                "of that batch are sampled again for its remaining updates."
            )
            return
        buffer = RolloutBuffer.from_state_dict(rollouts[self.global_rank])
        if buffer.num_mini_batches != self.num_mini_batches:
            raise ValueError(
                f"num_mini_batches is {self.num_mini_batches}, but the checkpoint is amid rollouts that are trained "
                f"in {buffer.num_mini_batches}; keep that number, or resume where a batch of rollouts ends."
            )
        self.last_rollouts = buffer

    def _compare_options(self, then: dict[str, Any], *, unfinished: bool) -> None:
        """Refuse other options than the checkpoint's amid rollouts; elsewhere warn of them."""
        if self._trainer is None or self.trainer.state.fn != "fit":
            return
        now = self.rollout_options()
        for name in (name for name in then if name in now and then[name] != now[name]):
            if unfinished:
                raise ValueError(
                    f"{name} is {now[name]!r}, but the checkpoint is amid rollouts made with {then[name]!r}; keep that "
                    "value, or resume where a batch of rollouts ends."
                )
            rank_zero_warn(f"{name} is {now[name]!r} from here on; the checkpoint was made with {then[name]!r}.")

    def _pack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        return pack(groups, self.sharing, device=self.device)

    def _derive_seed(self, *parts: int | str) -> int:
        return derive_seed(*parts, self.seed, self.global_rank)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = time.perf_counter() - start


def _check_batch(batch: Any) -> None:
    if not isinstance(batch, PromptBatch):
        raise TypeError(
            f"the loader yields {type(batch).__name__}, but rollouts need a pl_grouprl.data.PromptBatch: prompts, and "
            "which update of their rollouts it is. Put the prompts into a PromptDataModule and pass it as datamodule; "
            "a loader of your own must yield PromptBatch objects, each module.updates_per_rollout times in a row."
        )
