"""Which rank trains which group, so that all ranks take about the same time.

The ranks of a step wait for the slowest one, so what counts is the largest load over the mean.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def balance(costs: Sequence[float], num_ranks: int, *, good_enough: float = 1.001) -> list[int]:
    """Assign groups to ranks so that the largest load is small.

    The costliest group first, each to the rank with the least load; then groups move from the rank with the largest
    load to others, or change places with theirs, as long as that helps. Nothing is random: every rank finds the same.

    Args:
        costs: Of each group, in any unit, 0 or more.
        num_ranks: How many ranks there are.
        good_enough: Largest load over the mean at which the search ends.

    Returns:
        The rank of each group. Every rank has a group if there are as many groups as ranks.

    Raises:
        ValueError: If `num_ranks` is less than 1, or a cost is negative or not finite.
    """
    _check(costs, num_ranks)
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    least: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(num_ranks)]  # a heap: load, groups, rank
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        load, count, rank = least[0]
        shares[rank].append(group)
        heapq.heapreplace(least, (load + costs[group], count + 1, rank))
    enough = good_enough * sum(load for load, _, _ in sorted(least, key=lambda own: own[2])) / num_ranks
    order = sorted((-load, rank) for load, _, rank in least)
    while -order[0][0] > enough and _relieve(shares, order, costs):
        pass
    rank_of = {group: rank for rank, share in enumerate(shares) for group in share}
    return [rank_of[group] for group in range(len(costs))]


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


def _relieve(shares: list[list[int]], order: list[tuple[float, int]], costs: Sequence[float]) -> bool:
    """Make the largest load smaller with the help of the least loaded rank that can help; whether one could.

    Args:
        shares: The groups of each rank.
        order: The negative load of each rank with the rank, ascending: the largest load first.
        costs: Of each group.
    """
    load, largest = order[0]
    for other, rank in reversed(order[1:]):
        shift = _best_shift(shares[largest], shares[rank], other - load, costs)
        if shift is not None:
            given, returned = shift
            shares[largest] = [group for group in shares[largest] if group != given] + returned
            shares[rank] = [group for group in shares[rank] if group not in returned] + [given]
            del order[bisect_left(order, (other, rank))], order[0]  # the latter stands before it
            for changed in (largest, rank):
                insort(order, (-sum(costs[group] for group in shares[changed]), changed))
            return True
    return False


def _best_shift(
    heavy: Sequence[int], light: Sequence[int], difference: float, costs: Sequence[float]
) -> tuple[int, list[int]] | None:
    """Which group to give, and which one to get for it if any, so that two loads come as close as they can."""
    best: tuple[int, list[int]] | None = None
    smallest = difference * (1 - 1e-9)  # less than rounding errors is no gain: the search must end
    for given in heavy:
        half = difference - 2 * costs[given]
        for returned in light:
            remaining = abs(half + 2 * costs[returned])
            if remaining < smallest:
                smallest, best = remaining, (given, [returned])
        # Given for nothing, it must not leave the rank without any.
        if len(heavy) > 1 and abs(half) < smallest:
            smallest, best = abs(half), (given, [])
    return best


def _check(costs: Sequence[float], num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more.")
    for group, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{group}] is {cost}; pass finite costs of 0 or more.")
