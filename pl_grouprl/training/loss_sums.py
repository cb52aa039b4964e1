"""Losses and metrics of an optimizer step as undivided sums, which add up over micro-batches and ranks.

Sums stay on their device until the end of the step, so no micro-batch synchronizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class LossSums(NamedTuple):
    """A loss before division; those of all ranks and micro-batches add up to the loss of the step.

    Attributes:
        losses: By optimized part, the sum of its loss over the micro-batch, with gradient, and this micro-batch's
            share of the step's denominator. A part whose denominators are all 0 in a step is not updated.
        metrics: Detached sums and counts, by the name their ratio is logged under.
        extremes: Detached values, by names ending in `/min` or `/max`; the extreme over ranks is logged.
    """

    losses: dict[str, tuple[Tensor, Tensor]]
    metrics: dict[str, tuple[Tensor, Tensor]]
    extremes: dict[str, Tensor] = {}  # noqa: RUF012 (a NamedTuple's default is never mutated)


class LossAccumulator:
    """Adds up the loss sums of a step's micro-batches on this rank."""

    def __init__(self) -> None:
        self._losses: dict[str, list[Tensor]] = {}
        self._metrics: dict[str, list[Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    def add(self, loss_sums: LossSums, weight: float = 1.0) -> None:
        """Add the sums of a micro-batch.

        Args:
            loss_sums: What `compute_loss` returned.
            weight: This rank's share of a micro-batch that several ranks compute together.
        """
        for sums, pairs in ((self._losses, loss_sums.losses), (self._metrics, loss_sums.metrics)):
            for name, pair in pairs.items():
                added = [part.detach().float() * weight for part in pair]
                sums[name] = [a + b for a, b in zip(sums[name], added, strict=True)] if name in sums else added
        for name, value in loss_sums.extremes.items():
            before = self._extremes.get(name, value.detach())
            pick = torch.minimum if name.endswith("/min") else torch.maximum
            self._extremes[name] = pick(before, value.detach())

    def add_denominators(self, counts: Mapping[str, Tensor]) -> None:
        """Add the denominators of rollouts that are in no micro-batch, because their loss is 0."""
        for name, (_, count) in self._losses.items():
            count += counts[name].to(count.device)

    def denominators(self) -> dict[str, Tensor]:
        """This rank's share of each part's denominator."""
        return {name: count for name, (_, count) in self._losses.items()}

    def reduced(
        self, add_up: Callable[[list[Tensor]], list[float]], largest: Callable[[Tensor], Tensor]
    ) -> dict[str, float]:
        """Metrics of the step over all ranks, with the loss among them.

        Args:
            add_up: Sums scalars over ranks.
            largest: Takes the elementwise maximum over ranks.
        """
        pairs = [*self._losses.values(), *self._metrics.values()]
        sums = add_up([part for pair in pairs for part in pair])
        ratios = [total / (count or 1.0) for total, count in zip(sums[::2], sums[1::2], strict=True)]
        metrics = {"loss": sum(ratios[: len(self._losses)])}
        metrics |= dict(zip(self._metrics, ratios[len(self._losses) :], strict=True))
        if self._extremes:
            values = [value.float() for value in self._extremes.values()]
            local = torch.stack([value.to(values[0].device) for value in values]).cpu()
            signs = torch.tensor([-1.0 if name.endswith("/min") else 1.0 for name in self._extremes])
            found = (signs * largest(signs * local)).tolist()
            # Infinite if no rank trained anything.
            metrics |= {name: v for name, v in zip(self._extremes, found, strict=True) if not math.isinf(v)}
        return metrics
