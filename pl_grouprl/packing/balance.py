"""Which rank trains which group, so that all ranks take about the same time.

The ranks of a step wait for the slowest one, so what counts is the largest load over the mean.
"""

from __future__ import annotations

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
    loads = [0.0] * num_ranks
    for group in sorted(range(len(costs)), key=lambda group: -costs[group]):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], len(shares[rank])))
        shares[rank].append(group)
        loads[rank] += costs[group]
    enough = good_enough * sum(loads) / num_ranks
    while max(loads) > enough and _relieve(shares, loads, costs):
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


def _relieve(shares: list[list[int]], loads: list[float], costs: Sequence[float]) -> bool:
    """Make the largest load smaller with the help of the least loaded rank that can help; whether one could."""
    largest, *others = sorted(range(len(loads)), key=lambda rank: -loads[rank])
    for rank in reversed(others):
        shift = _best_shift(shares[largest], shares[rank], loads[largest] - loads[rank], costs)
        if shift is not None:
            given, returned = shift
            shares[largest] = [group for group in shares[largest] if group != given] + returned
            shares[rank] = [group for group in shares[rank] if group not in returned] + [given]
            for changed in (largest, rank):
                loads[changed] = sum(costs[group] for group in shares[changed])
            return True
    return False


def _best_shift(
    heavy: Sequence[int], light: Sequence[int], difference: float, costs: Sequence[float]
) -> tuple[int, list[int]] | None:
    """Which group to give, and which one to get for it if any, so that two loads come as close as they can."""
    returns: list[list[int]] = [[group] for group in light]
    if len(heavy) > 1:  # otherwise a group given for nothing would leave the rank without any
        returns.append([])
    shifts = [(group, returned) for group in heavy for returned in returns]

    def remaining(shift: tuple[int, list[int]]) -> float:
        given, returned = shift
        return abs(difference - 2 * (costs[given] - sum(costs[group] for group in returned)))

    best = min(shifts, key=remaining, default=None)
    # Less than rounding errors is no gain: the search must end.
    return best if best is not None and remaining(best) < difference * (1 - 1e-9) else None


def _check(costs: Sequence[float], num_ranks: int) -> None:
    if num_ranks < 1:
        raise ValueError(f"num_ranks is {num_ranks}; pass 1 or more.")
    for group, cost in enumerate(costs):
        if not 0 <= cost < float("inf"):
            raise ValueError(f"costs[{group}] is {cost}; pass finite costs of 0 or more.")
