"""Assigns groups to ranks to balance their load.

A step takes as long as its slowest rank, so the quantity to minimize is the largest load over the mean.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence


def balance(costs: Sequence[float], num_ranks: int, *, good_enough: float = 1.001) -> list[int]:
    """Assign groups to ranks, keeping the largest load small.

    Assigns groups, costliest first, to the least loaded rank; then moves or swaps groups of the most loaded rank as
    long as that helps. Deterministic, so every rank computes the same assignment.

    Args:
        costs: Cost of each group, in any unit, 0 or more.
        num_ranks: Number of ranks.
        good_enough: The search ends when the largest load over the mean is at most this.

    Returns:
        The rank of each group. Every rank has a group if there are at least as many groups as ranks.

    Raises:
        ValueError: If `num_ranks` is less than 1, or a cost is negative or not finite.
    """
    _check(costs, num_ranks)
    groups_of: list[list[int]] = [[] for _ in range(num_ranks)]
    loads: list[tuple[float, int, int]] = [(0.0, 0, rank) for rank in range(num_ranks)]  # a heap: load, groups, rank
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        load, count, rank = loads[0]
        groups_of[rank].append(group)
        heapq.heapreplace(loads, (load + costs[group], count + 1, rank))
    limit = good_enough * sum(load for load, _, _ in sorted(loads, key=lambda entry: entry[2])) / num_ranks
    order = sorted((-load, rank) for load, _, rank in loads)
    while -order[0][0] > limit and _relieve(groups_of, order, costs):
        pass
    rank_of = {group: rank for rank, groups in enumerate(groups_of) for group in groups}
    return [rank_of[group] for group in range(len(costs))]


def imbalance(costs: Sequence[float], ranks: Sequence[int], num_ranks: int) -> float:
    """Largest load over the mean: 1 if all ranks have the same load, `num_ranks` if one has everything.

    Args:
        costs: Cost of each group.
        ranks: The rank of each group.
        num_ranks: Number of ranks, including those without a group.
    """
    loads = [0.0] * num_ranks
    for cost, rank in zip(costs, ranks, strict=True):
        loads[rank] += cost
    mean = sum(loads) / num_ranks
    return max(loads) / mean if mean else 1.0


def _relieve(groups_of: list[list[int]], order: list[tuple[float, int]], costs: Sequence[float]) -> bool:
    """Reduce the largest load by a move to, or swap with, the least loaded rank that allows it; returns success.

    `order` has pairs (negative load, rank), ascending: the largest load first.
    """
    load, largest = order[0]
    for other, rank in reversed(order[1:]):
        exchange = _best_exchange(groups_of[largest], groups_of[rank], other - load, costs)
        if exchange is not None:
            moved, returned = exchange
            groups_of[largest] = [group for group in groups_of[largest] if group != moved] + returned
            groups_of[rank] = [group for group in groups_of[rank] if group not in returned] + [moved]
            del order[bisect_left(order, (other, rank))], order[0]  # deletes the later element first
            for changed in (largest, rank):
                insort(order, (-sum(costs[group] for group in groups_of[changed]), changed))
            return True
    return False


def _best_exchange(
    heavy: Sequence[int], light: Sequence[int], difference: float, costs: Sequence[float]
) -> tuple[int, list[int]] | None:
    """The group to move, and the one to take in return, if any, that bring two loads closest."""
    best: tuple[int, list[int]] | None = None
    smallest = difference * (1 - 1e-9)  # ignores gains below rounding error, so the search ends
    for moved in heavy:
        after_move = difference - 2 * costs[moved]
        for returned in light:
            remaining = abs(after_move + 2 * costs[returned])
            if remaining < smallest:
                smallest, best = remaining, (moved, [returned])
        # A group moved without a swap must not leave the rank empty.
        if len(heavy) > 1 and abs(after_move) < smallest:
            smallest, best = abs(after_move), (moved, [])
    return best


def _check(costs: Sequence[float], num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more.")
    for group, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{group}] is {cost}; pass finite costs of 0 or more.")
