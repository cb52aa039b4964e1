"""What all algorithms share: rollouts, the buffer that several updates reuse, checkpoints amid them.

Legend: B rollouts, N response tokens of all rollouts one after another.
"""

from __future__ import annotations

import contextlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from pl_grouprl.algorithms.collecting import CollectingModule
from pl_grouprl.algorithms.mini_batch import MiniBatch, filler_tokens
from pl_grouprl.algorithms.override_results import check_denominators, check_loss_terms
from pl_grouprl.algorithms.passes import KeptRow, Passes, RowOptions
from pl_grouprl.algorithms.resume import compare_options, restore_rollouts
from pl_grouprl.algorithms.rollout_buffer import RolloutBuffer
from pl_grouprl.algorithms.sampling_module import check_batch
from pl_grouprl.algorithms.saved_state import Attributes, Check, OfEachRank, Stateful
from pl_grouprl.algorithms.step_terms import LossTerms, StepTerms
from pl_grouprl.attention.sequence_parallel import (
    check_sequence_parallel,
    check_sequence_parallel_size,
    sequence_mesh,
)
from pl_grouprl.data.loaders import PromptBatch
from pl_grouprl.functional.logprobs import TokenScores
from pl_grouprl.models.policy import PolicySource
from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.models.score import score
from pl_grouprl.packing import ScoringBatch
from pl_grouprl.rewards import RewardFunction, Weighted
from pl_grouprl.types import Prompt
from pl_grouprl.utilities.arguments import checked_arguments
from pl_grouprl.utilities.distributed import num_ranks
from pl_grouprl.utilities.memory import naming_memory
from pl_grouprl.utilities.modes import evaluating
from pl_grouprl.utilities.options import check_options
from pl_grouprl.utilities.random_state import seed_torch
from pl_grouprl.utilities.step_log import log_numbers


@checked_arguments
class RolloutModule(CollectingModule, ABC):
    """Trains a policy on rollouts of its own. A subclass says what is prepared after a rollout and what the loss is.

    Each prompt batch arrives `updates_per_rollout` times in a row. The first time, rollouts are sampled, rewarded and
    prepared; every time, one mini-batch of them is trained. Optimization is Lightning's automatic one: clipping,
    accumulation and precision are the Trainer's options.

    Args:
        policy: Path or hub name of a Hugging Face model, or another source of the initial policy.
        rewards: One reward function or several, with TRL's signature or verl's; see `pl_grouprl.rewards`.
        num_iterations: Passes over each batch of rollouts.
        num_mini_batches: Updates in each pass. Groups stay whole, so it is at most the number of prompts of a batch.
        max_tokens_per_micro_batch: Most tokens that go through the model at once on a rank. The groups of an update are
            packed into as many rows as that takes; a group that is larger is split by schedule: its prompt is encoded
            once and its rollouts follow in slices of so many tokens. The result is the same, except where a loss
            compares the tokens of one pass (`clip_cov`, `kl_cov`, the routers' loss). None: all at once.
        sequence_parallel_size: Ranks that share the tokens of each row in the updates (Ulysses, arXiv:2309.14509), so
            that a row may be as many times as long. It divides the number of ranks.
        **kwargs: Options of `CollectingModule`, `SamplingModule` and `PolicyModule`.

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
        num_iterations: int = 1,
        num_mini_batches: int = 1,
        max_tokens_per_micro_batch: int | None = None,
        sequence_parallel_size: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(policy, rewards, num_mini_batches=num_mini_batches, **kwargs)
        counts = {
            "num_iterations": num_iterations,
            "num_mini_batches": num_mini_batches,
            "sequence_parallel_size": sequence_parallel_size,
            "max_tokens_per_micro_batch": 1 if max_tokens_per_micro_batch is None else max_tokens_per_micro_batch,
        }
        check_options({name: (count, count >= 1, "at least 1") for name, count in counts.items()})
        self.num_iterations = num_iterations
        self.max_tokens_per_micro_batch = max_tokens_per_micro_batch
        self.sequence_parallel_size = sequence_parallel_size
        self.last_rollouts: RolloutBuffer | None = None
        self.num_tokens = 0
        self._amid_rollouts = False
        self._cycle_seconds = 0.0
        self._cycle_is_whole = False
        self._sequence_group: Any = None
        self._kept_row = KeptRow()

    # What a subclass fills in.

    def prepare_scores(self, buffer: RolloutBuffer) -> None:
        """Put into the buffer what is computed without rewards; workers may be at these meanwhile. Here nothing."""

    @abstractmethod
    def prepare(self, buffer: RolloutBuffer) -> None:
        """Put into the buffer what the updates need, such as advantages and old log-probabilities."""

    @abstractmethod
    def compute_loss(self, batch: MiniBatch) -> LossTerms:
        """Compute the loss of one mini-batch, not yet divided by its denominator."""

    def loss_denominators(self, tokens: dict[str, Tensor], rollouts: dict[str, Any]) -> dict[str, Tensor]:
        """What `compute_loss` divides by, known before it is called: needed where an update takes several passes.

        Args:
            tokens: Per-token quantities of some rollouts, by name, shape [N].
            rollouts: `rollout_index_N` and `num_rollouts`, as losses take them.

        Returns:
            By the name of each part in `LossTerms.losses`, the sum of the denominators that `compute_loss` returns.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not say what its losses are divided by, which an update of several passes has "
            "to know in advance; override loss_denominators, or leave out max_tokens_per_micro_batch and "
            "sequence_parallel_size."
        )

    # Rollouts.

    @property
    def corrects_sampling(self) -> bool:
        """Whether the loss corrects for rollouts of another policy, by the log-probabilities that the sampler gave."""
        return False

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
        check_sequence_parallel_size(self.sequence_parallel_size, self.trainer.world_size)
        if self.sequence_parallel_size > 1 and self.sharing != "shared":
            raise ValueError(
                f"sequence_parallel_size is {self.sequence_parallel_size} with sharing={self.sharing!r}; padded rows "
                "are not divided among ranks. Use sharing='shared'."
            )
        if stage == "fit":
            self._check_budget(getattr(datamodule, "prompts", {}).get("train", ()))
        accumulated = self.trainer.accumulate_grad_batches
        if stage == "fit" and self.num_iterations > 1 and accumulated > self.num_mini_batches:
            raise ValueError(
                f"accumulate_grad_batches is {accumulated} with num_mini_batches={self.num_mini_batches} and "
                f"num_iterations={self.num_iterations}: one optimizer step would add up several passes over the same "
                "rollouts, which gives what one pass gives. Set num_iterations to 1, or accumulate less."
            )

    def _check_budget(self, prompts: Sequence[Prompt]) -> None:
        """Refuse a budget that a prompt, or a rollout of the most tokens, would not fit into."""
        if self.max_tokens_per_micro_batch is None:
            return
        limit = self.max_tokens_per_micro_batch * self.sequence_parallel_size
        longest = {
            "a prompt of the training data has": max((len(prompt.token_ids) for prompt in prompts), default=0),
            "a rollout may have (sampling.max_new_tokens)": self.sampling.max_new_tokens,
        }
        if self.sharing == "repeated":
            longest = {"a prompt with its rollout may have": sum(longest.values())}
        for what, tokens in longest.items():
            if tokens > limit:
                raise ValueError(
                    f"max_tokens_per_micro_batch is {self.max_tokens_per_micro_batch} with sequence_parallel_size="
                    f"{self.sequence_parallel_size}, {limit} tokens together, but {what} {tokens}; raise one of them, "
                    "or set data.max_prompt_length or sampling.max_new_tokens lower."
                )

    def on_fit_start(self) -> None:
        """Find the peers that run rows together, and refuse models that cannot be run so."""
        if self.sequence_parallel_size > 1:
            for model in self.scored_models():
                check_sequence_parallel(model, self.sequence_parallel_size)
            mesh = sequence_mesh(self.sequence_parallel_size, self.device.type)
            self._sequence_group = mesh.get_group("sequence")
        super().on_fit_start()

    def collect_rollouts(self, batch: PromptBatch) -> RolloutBuffer:
        """Sample, reward and prepare the rollouts of a prompt batch."""
        collected = self.collect_groups(batch)
        buffer = RolloutBuffer(
            collected.groups,
            batch.rollout_number,
            self.num_mini_batches,
            self.seed,
            mini_batches=collected.mini_batches,
        )
        if not collected.sampler_reports:  # the ranks have to exchange the same figures in every step
            buffer.tokens.pop("rollout_logprobs", None)
        self.prepare_scores(buffer)
        buffer.metrics |= self.reward_groups(collected)
        buffer.mask_unrewarded()
        buffer.num_tokens = collected.num_tokens
        self.num_tokens += buffer.num_tokens
        with self._timed("advantages"):
            self.prepare(buffer)
        return buffer

    def on_train_batch_start(self, batch: PromptBatch, batch_idx: int) -> None:
        """Sample new rollouts where a new prompt batch begins.

        Raises:
            TypeError: If the batch is of a loader that knows nothing of rollouts.
        """
        check_batch(batch)
        self._clock.start()
        held = self.last_rollouts
        if batch.update_index == 0 or held is None or held.rollout_number != batch.rollout_number:
            self._cycle_seconds, self._cycle_is_whole = 0.0, True
            self.last_rollouts = self.collect_rollouts(batch)
        if batch_idx % self.trainer.accumulate_grad_batches == 0:
            # Lightning would do it behind the first passes; amid a forward FSDP1 would keep gradients of its own.
            for optimizer in self.trainer.optimizers:
                optimizer.zero_grad()

    def map_rollouts(
        self,
        model: nn.Module,
        buffer: RolloutBuffer,
        function: Callable[[ScoringBatch], Sequence[Tensor | None]],
        *,
        per_rollout: Sequence[int] = (),
    ) -> list[Any]:
        """Call a function without gradient on all rollouts of the buffer, in passes like those of an update.

        Args:
            model: What the function runs; put into evaluation mode meanwhile.
            buffer: The rollouts.
            function: Takes each part, laid out for one decoder call; returns tensors of shape [N, ...], or None.
            per_rollout: Which of those have a value per rollout, shape [B, ...], not per token.

        Returns:
            The tensors of all rollouts, in the order of the buffer, on the CPU; None where the function returned it.
        """
        memory = self._naming_memory("scoring, ")
        with memory, evaluating(model), self.trainer.precision_plugin.forward_context():
            parts = self.support.call(self, "_map_passes", buffer, function)
        numbers = [number for own, _ in parts for number in own]
        columns = enumerate(zip(*(values for _, values in parts), strict=True))
        return [
            None if own[0] is None else buffer.in_order(own, numbers, per_token=place not in per_rollout)
            for place, own in columns
        ]

    def _map_passes(
        self, buffer: RolloutBuffer, function: Callable[[ScoringBatch], Sequence[Tensor | None]]
    ) -> list[tuple[tuple[int, ...], list[Tensor | None]]]:
        """What a function gives for each pass, with the rollouts that it is about. Fillers are run and left out."""
        found = []
        for pass_ in Passes(buffer, range(len(buffer.groups)), self._row_options(1), self._kept_row):
            if isinstance(pass_, MiniBatch):
                values = [None if value is None else value.cpu() for value in function(pass_.scoring)]
                if pass_.rollout_numbers:
                    found.append((pass_.rollout_numbers, values))
        return found

    def score_rollouts(self, model: Any, buffer: RolloutBuffer, **kwargs: Any) -> TokenScores:
        """Score all rollouts of the buffer without gradient; tensors of shape [N], on the CPU."""
        return TokenScores(*self.map_rollouts(model, buffer, lambda batch: self.score(model, batch, **kwargs)))

    def score(self, model: Any, batch: ScoringBatch, **kwargs: Any) -> TokenScores:
        """Score a batch at the sampling temperature; see `pl_grouprl.models.score`."""
        return score(model, batch, temperature=self.sampling.temperature, **kwargs)

    # Updates.

    def training_step(self, batch: PromptBatch, batch_idx: int) -> Tensor:
        """Train one mini-batch of the rollouts at hand; return the loss of its last pass, to be differentiated."""
        buffer = self.last_rollouts
        assert buffer is not None
        self._clock.enter("update")
        # Dropout depends on the position in the run, so a resumed run needs no state of the random numbers.
        seed_torch(self._derive_seed("update", batch.rollout_number, batch.update_index), self.device)
        members = buffer.members(batch.update_index)
        passes = Passes(buffer, members, self._row_options(self.sequence_parallel_size), self._kept_row)
        if passes.number > 1:
            self.total_denominators(self._denominators_of(buffer, members))
        terms = StepTerms()
        with self._naming_memory():
            loss = self._run(passes, terms)
        if passes.number > 1:
            self._check_denominators(terms, buffer, members)
        metrics = terms.reduced(self.sum_over_ranks, lambda values: self.reduce_sums(values, "max"))
        buffer.updates_done = batch.update_index + 1
        if buffer.updates_done == self.updates_per_rollout:
            self._kept_row.clear()
        shown = {"reward": buffer.metrics["reward"], "prefix/token_ratio": metrics.pop("prefix/token_ratio")}
        log_numbers(self, shown, prog_bar=True)
        hidden = {name: value for name, value in buffer.metrics.items() if name not in shown}
        log_numbers(self, {**hidden, **metrics, "num_tokens": float(self.num_tokens)})
        return loss

    def _naming_memory(self, what: str = "") -> contextlib.AbstractContextManager[None]:
        """Name the option that bounds a pass's memory when a pass runs out of it."""
        return naming_memory(
            f"{what}a pass of max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} tokens (None: all groups of "
            "a mini-batch at once)",
            "lower it, which changes no result, or raise sequence_parallel_size",
        )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Differentiate a pass; Lightning calls this for the last one, after `training_step`."""
        with self._naming_memory("the backward of "):
            super().backward(loss, *args, **kwargs)

    def _run(self, passes: Passes, terms: StepTerms) -> Tensor:
        """Run passes forward and, but for the last, backward; returns the loss of that one."""
        accumulates = self.trainer.fit_loop._should_accumulate()
        for number, pass_ in enumerate(passes, start=1):
            last = number == passes.number
            with self.support.accumulating(self, last=last and not accumulates):
                loss = self._pass_loss(pass_, terms, single=passes.number == 1)
                if last:
                    return loss  # which Lightning divides by the micro-batches that it accumulates
                if isinstance(pass_, MiniBatch):  # a prefix hands on gradients that have been divided
                    loss = loss / self.trainer.accumulate_grad_batches
                with torch.autocast(self.device.type, enabled=False):
                    self.support.backward(loss)
                del loss, pass_  # with all that they hold, before the next one
        raise AssertionError("unreachable: there is a pass always")

    def _pass_loss(self, pass_: MiniBatch | PrefixPass, terms: StepTerms, *, single: bool) -> Tensor:
        if isinstance(pass_, PrefixPass):
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            return pass_.loss(loss_scale=1.0 if scaler is None else scaler.get_scale())
        own = check_loss_terms(self.compute_loss(pass_), type(self).__name__)
        scoring, counts = pass_.scoring, (0, 0)
        if pass_.rollout_numbers:  # it is no filler
            counts = scoring.num_tokens_repeated, scoring.num_tokens_run + scoring.num_prefix_tokens_run
        own.metrics["prefix/token_ratio"] = torch.tensor(counts[0]), torch.tensor(counts[1])
        if single:
            self.total_denominators({name: count for name, (_, count) in own.losses.items()})
        terms.add(own, pass_.weight)
        return self.divide(own.losses, pass_.weight)

    def _denominators_of(self, buffer: RolloutBuffer, members: Sequence[int]) -> dict[str, Tensor]:
        """What this rank's share of an update adds to the denominators."""
        if not members:
            tokens, lengths = filler_tokens({name: values[0] for name, values in buffer.tokens.items()}), [1]
        else:
            chosen = [(index, range(len(buffer.groups[index].rollouts))) for index in members]
            groups, tokens, _ = buffer.select(chosen)
            lengths = [len(rollout.token_ids) for group in groups for rollout in group.rollouts]
        index_N = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        rollouts = {"rollout_index_N": index_N, "num_rollouts": len(lengths)}
        return check_denominators(self.loss_denominators(tokens, rollouts), type(self).__name__)

    def _check_denominators(self, terms: StepTerms, buffer: RolloutBuffer, members: Sequence[int]) -> None:
        """Refuse a `compute_loss` that divides by something else than was said."""
        expected, found = self._denominators_of(buffer, members), terms.denominators()
        if self.sequence_parallel_size > 1:  # the rows of peers are among them
            return
        for name, count in found.items():
            if name not in expected or not math.isclose(
                float(count), float(expected[name]), rel_tol=1e-4, abs_tol=1e-6
            ):
                raise RuntimeError(
                    f"compute_loss of {type(self).__name__} divides {name!r} by {float(count):g}, but "
                    f"loss_denominators said {expected.get(name)}; override both alike."
                )

    def _row_options(self, sequence_ranks: int) -> RowOptions:
        group = self._sequence_group if sequence_ranks > 1 else None
        budget = self.max_tokens_per_micro_batch
        if budget is not None and group is None:  # scoring keeps no activations, so one rank runs what several train
            budget *= self.sequence_parallel_size
        return RowOptions(self.sharing, budget, self.device, group, sequence_ranks)

    def optimizer_zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: gradients are set to zero before `training_step`, which differentiates passes itself."""

    def on_after_backward(self) -> None:
        """Stop the clock of a micro-batch that only accumulates gradients."""
        self._clock.mark()

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Stop the clock when the update is done, before callbacks save checkpoints or measure."""

        def update() -> Any:  # training_step and the last pass's backward, which DeepSpeed's engine runs
            assert optimizer_closure is not None
            with self._naming_memory():
                return optimizer_closure()

        with naming_memory(
            "the optimizer step, whose moments take two more numbers for each trained weight",
            "shard them over more devices (trainer.strategy: fsdp2, deepspeed), or train an adapter (policy.adapter)",
        ):
            super().optimizer_step(epoch, batch_idx, optimizer, update)
        self._clock.mark()

    def on_train_batch_end(self, outputs: Any, batch: PromptBatch, batch_idx: int) -> None:
        """Log where the time went: the parts add up to the step."""
        buffer, seconds = self.last_rollouts, self._clock.seconds
        assert buffer is not None
        self._cycle_seconds += seconds["step"]
        metrics = {f"time/{name}": value for name, value in seconds.items()}
        # Tokens that were sampled and trained, over the time for both; unknown where a resumed run begins in between.
        if self._cycle_is_whole and buffer.updates_done == self.updates_per_rollout:
            metrics["perf/tokens_per_second"] = buffer.num_tokens / self._cycle_seconds
        log_numbers(self, metrics)

    def teardown(self, stage: str) -> None:
        """Let go of the last row."""
        self._kept_row.clear()
        super().teardown(stage)

    # Checkpoints.

    def rollout_options(self) -> dict[str, Any]:
        """Options, by name and as plain values, that unfinished rollouts in a checkpoint must be resumed under."""
        plain = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(self.sampling).items()}
        sampling = {f"sampling.{name}": value for name, value in plain.items()}
        return {"num_generations": self.num_generations, "seed": self.seed} | sampling

    def saved_state(self) -> dict[str, Stateful]:
        """Add the counter of tokens, and the rollouts of every rank where some of their updates are still to come."""
        return super().saved_state() | {
            "tokens": Attributes(self, "num_tokens"),
            "rollouts": OfEachRank(self, self._unfinished_rollouts, self._restore_rollouts),
            "rollout_ahead": OfEachRank(self, self._ahead.state_dict, self._restore_ahead),
            "options": Check(self.rollout_options, self._compare_options),
        }

    def _unfinished_rollouts(self) -> dict[str, Any] | None:
        buffer = self.last_rollouts
        if buffer is None or buffer.updates_done >= self.updates_per_rollout:
            return None
        return buffer.state_dict()

    def _restore_rollouts(self, per_rank: list[dict[str, Any] | None]) -> None:
        restored = restore_rollouts(per_rank, self.global_rank, self.num_mini_batches)
        self.last_rollouts = restored or self.last_rollouts
        self._amid_rollouts = restored is not None

    def _restore_ahead(self, per_rank: list[dict[str, Any] | None]) -> None:
        if self.rollout_ahead and len(per_rank) == num_ranks():  # otherwise it is sampled when it is due
            self._ahead.load_state_dict(per_rank[self.global_rank])

    def _compare_options(self, then: dict[str, Any], now: dict[str, Any]) -> None:
        if self.is_resumed and self._amid_rollouts:
            compare_options(then, now)
