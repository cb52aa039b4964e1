"""Runs the micro-batches of one update forward and backward, with the denominators of the whole step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pl_grouprl.models.prefix_pass import PrefixPass
from pl_grouprl.training.loss_sums import LossAccumulator, LossSums
from pl_grouprl.training.micro_batch import MicroBatch, dummy_tokens
from pl_grouprl.training.micro_batch_schedule import MicroBatchSchedule
from pl_grouprl.training.micro_batcher import MicroBatcher
from pl_grouprl.training.optimization import Optimization
from pl_grouprl.training.override_results import check_denominators, check_loss_sums
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run import Accumulation, Run
from pl_grouprl.utilities.distributed import reduce_over_ranks, sum_over_ranks

ComputeLoss = Callable[[MicroBatch], LossSums]
Denominators = Callable[[dict[str, Tensor], dict[str, Any]], Mapping[str, Tensor]]


class Updater:
    """Runs the micro-batches of an update.

    Args:
        run: The run.
        micro_batcher: Packs the micro-batches.
        optimization: Divides their losses.
        compute_loss: Loss sums of a micro-batch.
        loss_denominators: Their denominators, from per-token quantities alone; see `RLModule`.
        owner: Class that has these methods, for errors.
        split_idle: Splits a buffer into rollouts to encode, and those whose loss is 0; returns None, on all ranks
            alike, if `compute_loss` may need all of them.
    """

    def __init__(
        self,
        run: Run,
        micro_batcher: MicroBatcher,
        optimization: Optimization,
        compute_loss: ComputeLoss,
        loss_denominators: Denominators,
        owner: str,
        split_idle: Callable[[RolloutBuffer], tuple[RolloutBuffer, RolloutBuffer] | None] = lambda buffer: None,
    ) -> None:
        self._run = run
        self._micro_batcher = micro_batcher
        self._optimization = optimization
        self._compute_loss, self._loss_denominators, self._owner = compute_loss, loss_denominators, owner
        self._split_idle = split_idle

    def update(
        self, buffer: RolloutBuffer, members: Sequence[int], accumulation: Accumulation
    ) -> tuple[Tensor, dict[str, float]]:
        """Run all micro-batches forward and, except for the last one, backward. All ranks call it together.

        Args:
            buffer: The rollouts with their per-token quantities.
            members: Indices of the groups that are trained.
            accumulation: How this update adds up to an optimizer step.

        Returns:
            The loss of the last micro-batch, to be differentiated by the caller, and the metrics of the update.
        """
        mini_batch = buffer.only(members)
        trained_and_idle = self._split_idle(mini_batch)
        trained = buffer if trained_and_idle is None else trained_and_idle[0]
        schedule = self._micro_batcher.for_update(trained, [i for i in members if trained.groups[i].rollouts])
        has_all = (
            schedule.number == 1 and trained_and_idle is None
        )  # the micro-batch itself then gives the denominators
        expected = None if has_all else self._denominators(mini_batch)
        if expected is not None:
            self._optimization.add_denominators(expected, self._run.device)
        sums = LossAccumulator()
        with self._micro_batcher.naming_memory():
            loss = self._run_schedule(schedule, sums, accumulation, has_all=has_all)
        if trained_and_idle is not None:
            sums.add_denominators(self._denominators(trained_and_idle[1]))
        if expected is not None:
            self._check_denominators(sums, expected)
        device = self._run.device
        metrics = sums.reduced(
            lambda values: sum_over_ranks(values, device), lambda values: reduce_over_ranks(values, device, "max")
        )
        return loss, metrics

    def _run_schedule(
        self, schedule: MicroBatchSchedule, sums: LossAccumulator, accumulation: Accumulation, *, has_all: bool
    ) -> Tensor:
        support = self._run.support
        for number, micro_batch in enumerate(schedule, start=1):
            last = number == schedule.number
            with support.accumulating(self._run, last=last and accumulation.is_last):  # type: ignore[arg-type]
                if isinstance(micro_batch, PrefixPass):
                    # The gradients that its slices left are already divided by the denominators.
                    loss = micro_batch.loss(loss_scale=accumulation.loss_scale)
                else:
                    loss = self._loss(micro_batch, sums, has_all=has_all)
                if last:
                    return loss  # Lightning divides it by accumulate_grad_batches
                if isinstance(micro_batch, MicroBatch):
                    loss = loss / accumulation.mini_batches
                with torch.autocast(self._run.device.type, enabled=False):
                    support.backward(loss)
                del loss, micro_batch  # free the activations before the next forward
        raise AssertionError("unreachable: a schedule has at least one micro-batch")

    def _loss(self, micro_batch: MicroBatch, sums: LossAccumulator, *, has_all: bool) -> Tensor:
        loss_sums = check_loss_sums(self._compute_loss(micro_batch), self._owner)
        scoring, num_tokens = micro_batch.scoring, (0, 0)
        if micro_batch.rollout_numbers:  # not a dummy
            num_tokens = scoring.num_tokens_repeated, scoring.num_tokens_run + scoring.num_prefix_tokens_run
        loss_sums.metrics["prefix/token_ratio"] = torch.tensor(num_tokens[0]), torch.tensor(num_tokens[1])
        device = self._run.device
        if has_all:
            denominators = {name: count for name, (_, count) in loss_sums.losses.items()}
            self._optimization.add_denominators(denominators, device)
        sums.add(loss_sums, micro_batch.weight)
        return self._optimization.divide(loss_sums.losses, device, micro_batch.weight)

    def _denominators(self, buffer: RolloutBuffer) -> dict[str, Tensor]:
        """The denominators of a buffer's rollouts, or of the dummy if there are none."""
        if buffer.rollouts:
            tokens, lengths_E = {name: buffer.joined(name) for name in buffer.values}, buffer.episode_lengths
        else:
            tokens, lengths_E = dummy_tokens(buffer.values), torch.tensor([1])
        index_N = torch.arange(len(lengths_E)).repeat_interleave(lengths_E)
        rollouts = {"rollout_index_N": index_N, "num_rollouts": len(lengths_E)}
        return check_denominators(self._loss_denominators(tokens, rollouts), self._owner)

    def _check_denominators(self, sums: LossAccumulator, expected: Mapping[str, Tensor]) -> None:
        """Refuse a `compute_loss` whose denominators differ from those of `loss_denominators`."""
        if self._micro_batcher.sequence_parallel_size > 1:  # the sums include rows of peers
            return
        for name, count in sums.denominators().items():
            if name not in expected or not math.isclose(
                float(count), float(expected[name]), rel_tol=1e-4, abs_tol=1e-6
            ):
                raise RuntimeError(
                    f"compute_loss of {self._owner} divides {name!r} by {float(count):g}, but "
                    f"loss_denominators returned {expected.get(name)}; override both consistently."
                )
