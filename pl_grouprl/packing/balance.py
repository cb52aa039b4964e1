"""Which rank trains which group, so that all ranks take about the same time.

The ranks of a step wait for the slowest one, so what counts is the largest load over the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_GOOD_ENOUGH = 1.001
"""Largest load over the mean at which the search for better assignments ends."""


def balance(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Assign groups to ranks so that the largest load is small.

    The costliest group first, each to the rank with the least load; then groups move from the rank with the largest
    load to others, or change places with theirs, as long as that helps. Nothing is random: every rank finds the same.

    Args:
        costs: Of each group, in any unit, 0 or more.
        num_ranks: How many ranks there are.

    Returns:
        The rank of each group. Every rank has a group if there are as many groups as ranks.

    Raises:
        ValueError: If `num_ranks` is less than 1, or a cost is negative or not finite.
    """
    _check(costs, num_ranks)
    ranks = [0] * len(costs)
    loads = [0.0] * num_ranks
    counts = [0] * num_ranks
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], counts[rank]))
        ranks[group] = rank
        loads[rank] += costs[group]
        counts[rank] += 1
    while (step := _best_step(costs, ranks, loads)) is not None:
        _take(step, costs, ranks, loads)
    return ranks


def imbalance(costs: Sequence[float], ranks: Sequence[int], num_ranks: int) -> float:
    """Largest load of a rank over the mean load: 1 where all ranks have the same, `num_ranks` where one has all.

    Args:
        costs: Of each group.
        ranks: The rank of each group.
        num_ranks: How many ranks there are, those without a group included.
    """
    loads = [0.0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    mean = sum(loads) / num_ranks
    return max(loads) / mean if mean else 1.0


class _Step(NamedTuple):
    """A group goes to another rank; in return one of that rank's groups comes back, or none."""

    largest: float
    group: int
    rank: int
    returned: int | None


def _best_step(costs: Sequence[float], ranks: Sequence[int], loads: Sequence[float]) -> _Step | None:
    """The step away from the rank with the largest load after which the larger of both loads is smallest."""
    heaviest = max(range(len(loads)), key=loads.__getitem__)
    if loads[heaviest] * len(loads) <= _GOOD_ENOUGH * sum(loads):
        return None
    own = [group for group, rank in enumerate(ranks) if rank == heaviest]
    best: _Step | None = None
    # A move must leave a group behind. None stands for a move; the others are exchanged.
    partners: list[tuple[int, int | None]] = [(rank, group) for group, rank in enumerate(ranks) if rank != heaviest]
    if len(own) > 1:
        partners += [(rank, None) for rank in range(len(loads)) if rank != heaviest]
    for group in own:
        for rank, returned in partners:
            shifted = costs[group] - (0.0 if returned is None else costs[returned])
            largest = max(loads[heaviest] - shifted, loads[rank] + shifted)
            if largest < (loads[heaviest] * (1 - 1e-9) if best is None else best.largest):
                best = _Step(largest, group, rank, returned)
    return best


def _take(step: _Step, costs: Sequence[float], ranks: list[int], loads: list[float]) -> None:
    left = ranks[step.group]
    shifted = costs[step.group]
    ranks[step.group] = step.rank
    if step.returned is not None:
        shifted -= costs[step.returned]
        ranks[step.returned] = left
    loads[left] -= shifted
    loads[step.rank] += shifted


def _check(costs: Sequence[float], num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more.")
    for group, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{group}] is {cost}; pass finite costs of 0 or more.")
