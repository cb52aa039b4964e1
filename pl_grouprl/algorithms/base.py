"""What all algorithms share: rollouts, the buffer that several updates reuse, checkpoints amid them.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import contextlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from pl_grouprl.algorithms.metrics import RewardCall, count_tokens, merge_reward_metrics, rollout_metrics, summarize
from pl_grouprl.algorithms.policy_module import LossTerms, evaluating
from pl_grouprl.algorithms.resume import compare_options, mark_epoch_unfinished, restore_rollouts
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.algorithms.sampling_module import SamplingModule, check_batch
from pl_grouprl.algorithms.selection import has_spread, leave_out_truncated, leave_untrained
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.score import score
from pl_grouprl.packing import ScoringBatch, pack
from pl_grouprl.rewards import RewardFunction, Weighted, apply_rewards
from pl_grouprl.types import Prompt, RolloutGroup
from pl_grouprl.utilities.distributed import gather_plain, num_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class MiniBatch:
    """Whole groups, laid out for one decoder call, with their per-token quantities on the same axis N.

    Attributes:
        scoring: The decoder call.
        tokens: What the buffer holds, by name, on the module's device.
        groups: The groups themselves.
    """

    scoring: ScoringBatch
    tokens: dict[str, Tensor]
    groups: Sequence[RolloutGroup]

    @property
    def mask_N(self) -> Tensor:
        """Which tokens are trained."""
        return self.tokens["loss_mask"]

    @property
    def rollouts(self) -> dict[str, Any]:
        """Which rollout each token belongs to, and their number: keyword arguments of the losses."""
        return {"rollout_index_N": self.scoring.rollout_index_N, "num_rollouts": self.scoring.num_rollouts}


class RolloutModule(SamplingModule, ABC):
    """Trains a policy on rollouts of its own. A subclass says what is prepared after a rollout and what the loss is.

    Each prompt batch arrives `updates_per_rollout` times in a row. The first time, rollouts are sampled, rewarded and
    prepared; every time, one mini-batch of them is trained. Optimization is Lightning's automatic one: clipping,
    accumulation and precision are the Trainer's options.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        num_generations: Rollouts per prompt.
        num_iterations: Passes over each batch of rollouts.
        num_mini_batches: Updates in each pass. Groups stay whole, so it is at most the number of prompts of a batch.
        mask_truncated_completions: Do not train rollouts that were cut at `max_new_tokens`. Their rewards count in the
            statistics of their group all the same.
        dynamic_sampling: Train only groups whose rewards differ (DAPO, arXiv:2503.14476, section 3.2): prompts that
            give nothing to learn are replaced by others of the training data.
        max_generation_batches: How often prompts are sampled for one batch of rollouts under `dynamic_sampling`, the
            first time included. If groups are still missing then, the batch is smaller.
        **kwargs: Options of `SamplingModule` and `PolicyModule`.

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
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        mask_truncated_completions: bool = False,
        dynamic_sampling: bool = False,
        max_generation_batches: int = 5,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, **kwargs)
        counts = {
            "num_generations": num_generations,
            "num_iterations": num_iterations,
            "num_mini_batches": num_mini_batches,
            "max_generation_batches": max_generation_batches,
        }
        for name, count in counts.items():
            if count < 1:
                raise ValueError(f"{name} is {count}; it must be at least 1.")
        if dynamic_sampling and num_generations < 2:
            raise ValueError("dynamic_sampling=True with num_generations=1 would drop every prompt; pass at least 2.")
        self.num_generations = num_generations
        self.num_iterations = num_iterations
        self.num_mini_batches = num_mini_batches
        self.mask_truncated_completions = mask_truncated_completions
        self.dynamic_sampling = dynamic_sampling
        self.max_generation_batches = max_generation_batches
        self.last_rollouts: RolloutBuffer | None = None
        self.num_tokens = 0
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
        super().setup(stage)
        datamodule = getattr(self.trainer, "datamodule", None)
        batch_size = getattr(datamodule, "batch_size", None)
        if stage == "fit" and batch_size is not None and self.num_mini_batches > batch_size:
            raise ValueError(
                f"num_mini_batches is {self.num_mini_batches} with batch_size={batch_size} prompts; groups are not "
                f"split, so it can be at most {batch_size}."
            )
        accumulated = self.trainer.accumulate_grad_batches
        if stage == "fit" and self.num_iterations > 1 and accumulated > self.num_mini_batches:
            raise ValueError(
                f"accumulate_grad_batches is {accumulated} with num_mini_batches={self.num_mini_batches} and "
                f"num_iterations={self.num_iterations}: one optimizer step would add up several passes over the same "
                "rollouts, which gives what one pass gives. Set num_iterations to 1, or accumulate less."
            )
        if stage == "fit" and self.dynamic_sampling and not hasattr(datamodule, "draw_extra"):
            raise ValueError(
                "dynamic_sampling=True needs more prompts than a batch holds; pass a PromptDataModule as datamodule."
            )

    def collect_rollouts(self, batch: PromptBatch) -> RolloutBuffer:
        """Sample, reward and prepare the rollouts of a prompt batch."""
        generated, calls = self._sample(batch.prompts, batch.rollout_number)
        groups = generated
        selection: dict[str, float] = {}
        if self.dynamic_sampling:
            groups, selection = self._replace_uniform_groups(batch, generated, calls)
        if self.mask_truncated_completions:
            leave_out_truncated(groups)
        buffer = RolloutBuffer(groups, batch.rollout_number, self.num_mini_batches, self.seed)
        sampler_reports = "rollout_logprobs" in buffer.tokens
        per_rank = gather_plain((summarize(generated), calls, sampler_reports), self.device)
        if not all(reports for *_, reports in per_rank):  # the ranks have to exchange the same figures in every step
            buffer.tokens.pop("rollout_logprobs", None)
        records = [record for own, *_ in per_rank for record in own]
        reward_metrics = merge_reward_metrics([call for _, own, _ in per_rank for call in own])
        buffer.metrics = reward_metrics | rollout_metrics(records) | selection
        buffer.num_tokens = count_tokens(records)
        if math.isnan(buffer.metrics["reward"]):
            rank_zero_warn(
                "no rollout of a batch has a reward, so nothing is learned from it; see that a reward function applies "
                "and gives finite numbers (rewards/{name}/none and rewards/{name}/invalid count where not)."
            )
        self.num_tokens += buffer.num_tokens
        self.prepare(buffer)
        return buffer

    def _sample(
        self, prompts: Sequence[Prompt], rollout_number: int, attempt: int = 0
    ) -> tuple[list[RolloutGroup], list[RewardCall]]:
        """Sample and reward rollouts of prompts; returns the metrics of the reward functions beside the groups."""
        if not prompts:
            return [], []
        seed = self._derive_seed("rollout", rollout_number, *([attempt] if attempt else []))
        with self._timed("rollout"):
            groups = self.generate(prompts, self.sampling, self.num_generations, seed=seed)
        with self._timed("reward"):
            metrics = apply_rewards(groups, self.rewards, tokenizer=self.tokenizer)
        return groups, [(sum(len(group.rollouts) for group in groups), metrics)]

    def _replace_uniform_groups(
        self, batch: PromptBatch, generated: list[RolloutGroup], calls: list[RewardCall]
    ) -> tuple[list[RolloutGroup], dict[str, float]]:
        """Keep groups whose rewards differ, and sample other prompts for the rest; extends both lists."""
        kept, attempt = [group for group in generated if has_spread(group)], 1
        while attempt < self.max_generation_batches:
            missing = len(batch.prompts) - len(kept)
            if not self.sum_over_ranks([torch.tensor(missing)])[0]:
                break
            prompts = self.trainer.datamodule.draw_extra(  # type: ignore[attr-defined]
                missing, rollout_number=batch.rollout_number, attempt=attempt
            )
            groups, own_calls = self._sample(prompts, batch.rollout_number, attempt)
            generated += groups
            calls += own_calls
            kept += [group for group in groups if has_spread(group)]
            attempt += 1
        counts = self.sum_over_ranks([torch.tensor(len(kept)), torch.tensor(len(generated))])
        names = ("dynamic_sampling/kept_groups", "dynamic_sampling/generated_groups")
        metrics = dict(zip(names, counts, strict=True)) | {"dynamic_sampling/generation_batches": float(attempt)}
        return kept or [leave_untrained(generated[0])], metrics

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        """Sample new rollouts where a new prompt batch begins.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        check_batch(batch)
        self._step_start = time.perf_counter()
        held = self.last_rollouts
        if batch.update_index == 0 or held is None or held.rollout_number != batch.rollout_number:
            self._seconds.clear()
            self._cycle_seconds = 0.0
            self.last_rollouts = self.collect_rollouts(batch)

    def map_rollouts(self, model: nn.Module, buffer: RolloutBuffer, function: Callable[[ScoringBatch], T]) -> list[T]:
        """Call a function without gradient on all rollouts of the buffer, a mini-batch's worth of groups at a time.

        Args:
            model: What the function runs; put into evaluation mode meanwhile.
            buffer: The rollouts.
            function: Takes each part, laid out for one decoder call.
        """
        size = -(-len(buffer.groups) // self.num_mini_batches)
        parts = [buffer.groups[start : start + size] for start in range(0, len(buffer.groups), size)]
        with evaluating(model), self.trainer.precision_plugin.forward_context():
            return [function(self._pack(part)) for part in parts]

    def score_rollouts(self, model: Any, buffer: RolloutBuffer, **kwargs: Any) -> TokenScores:
        """Score all rollouts of the buffer without gradient; tensors of shape [N]."""
        parts = self.map_rollouts(model, buffer, lambda batch: self.score(model, batch, **kwargs))
        fields = [None if own[0] is None else torch.cat(own) for own in zip(*parts, strict=True)]
        return TokenScores(*fields)  # type: ignore[arg-type]

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
        on_device = {name: own.to(self.device) for name, own in tokens.items()}
        mini_batch = MiniBatch(self._pack(groups), on_device, groups)
        terms = self.compute_loss(mini_batch)
        scoring = mini_batch.scoring
        token_ratio = (torch.tensor(scoring.num_tokens_repeated), torch.tensor(scoring.num_tokens_run))
        terms.metrics["prefix/token_ratio"] = token_ratio
        loss, metrics = self.divide_loss(terms)
        for name in terms.extremes:
            if math.isinf(metrics[name]):  # nothing is trained on any rank, so there is no extreme
                del metrics[name]
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

    # Checkpoints.

    def rollout_options(self) -> dict[str, Any]:
        """Options, by name and as plain values, that unfinished rollouts in a checkpoint must be resumed under."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.sampling).items()}
        sampling = {f"sampling.{name}": value for name, value in plain.items()}
        return {"num_generations": self.num_generations, "seed": self.seed} | sampling

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the counters, and the rollouts of every rank where some of their updates are still to come."""
        super().on_save_checkpoint(checkpoint)
        mark_epoch_unfinished(checkpoint)
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
        per_rank = state.get("rollouts", [None])
        if self._trainer is not None and self.trainer.state.fn == "fit":
            amid_rollouts = per_rank[0] is not None and len(per_rank) == num_ranks()
            compare_options(state.get("options", {}), self.rollout_options(), amid_rollouts=amid_rollouts)
        restored = restore_rollouts(per_rank, self.global_rank, self.num_mini_batches)
        self.last_rollouts = restored or self.last_rollouts

    def _pack(self, groups: Sequence[RolloutGroup]) -> ScoringBatch:
        return pack(groups, self.sharing, device=self.device)

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start
