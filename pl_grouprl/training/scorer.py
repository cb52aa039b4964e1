"""Scores rollouts without gradient: old and reference log-probabilities, values.

Legend: B rollouts, N response tokens of all rollouts, concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from pl_grouprl.packing import ScoringBatch
from pl_grouprl.training.micro_batch import MicroBatch
from pl_grouprl.training.micro_batcher import MicroBatcher
from pl_grouprl.training.rollout_buffer import RolloutBuffer
from pl_grouprl.training.run import Run
from pl_grouprl.utilities.modes import evaluating

ScoringFunction = Callable[[ScoringBatch], Sequence[Tensor | None]]
"""Takes the rollouts of one decoder call; returns tensors of shape [N, ...] or [B, ...], or None."""


class Scorer:
    """Calls functions on all rollouts of a buffer, in micro-batches like those of an update.

    Args:
        run: The run.
        micro_batcher: Packs the micro-batches.
    """

    def __init__(self, run: Run, micro_batcher: MicroBatcher) -> None:
        self._run = run
        self._micro_batcher = micro_batcher

    def map(
        self, model: nn.Module, buffer: RolloutBuffer, function: ScoringFunction, *, per_rollout: Sequence[int] = ()
    ) -> list[Any]:
        """Call a function on all rollouts. Collective.

        Args:
            model: The model that the function runs; in evaluation mode during the call.
            buffer: The rollouts.
            function: Called once per micro-batch.
            per_rollout: Indices of the returned tensors that are per rollout rather than per token.

        Returns:
            Each tensor for all rollouts, in buffer order, on the CPU; None if the function returned None.
        """
        with self._micro_batcher.naming_memory("scoring, "), evaluating(model), self._run.support.forward_context():
            parts = self._run.call_wrapped(partial(self._map, buffer, function))
        numbers = [number for part_numbers, _ in parts for number in part_numbers]
        columns = enumerate(zip(*(values for _, values in parts), strict=True))
        return [
            None if column[0] is None else buffer.in_order(column, numbers, per_token=place not in per_rollout)
            for place, column in columns
        ]

    def _map(
        self, buffer: RolloutBuffer, function: ScoringFunction
    ) -> list[tuple[tuple[int, ...], list[Tensor | None]]]:
        """The results and rollout numbers of each micro-batch; dummies run and are dropped."""
        results = []
        for micro_batch in self._micro_batcher.for_scoring(buffer):
            if isinstance(micro_batch, MicroBatch):
                values = [None if value is None else value.cpu() for value in function(micro_batch.scoring)]
                if micro_batch.rollout_numbers:
                    results.append((micro_batch.rollout_numbers, values))
        return results
