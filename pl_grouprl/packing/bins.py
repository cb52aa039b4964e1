"""Packs sizes into few bins.

Uses best fit decreasing. If that takes more bins than the sum requires, balances the sizes over fewer, as over ranks:
if no bin is much fuller than the mean, all fit. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from pl_grouprl.packing.balance import balance


def pack_sizes(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Pack sizes into bins of at most `capacity`; returns their indices, the fullest bin first."""
    bins = _best_fit(sizes, capacity)
    fewest = -(-sum(sizes) // capacity) or 1
    while fewest < len(bins):
        count = (fewest + len(bins)) // 2
        even = _even(sizes, count, capacity)
        if max(_total(sizes, items) for items in even) <= capacity:
            bins = even
        else:
            fewest = count + 1
    bins.sort(key=lambda items: (-_total(sizes, items), min(items)))
    return [tuple(sorted(items)) for items in bins]


def _best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item, largest first, into the bin that it fills best."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fullest = bisect_left(rooms, (sizes[item], -1))
        if fullest < len(rooms):
            room, place = rooms.pop(fullest)
        else:
            room, place = capacity, len(bins)
            bins.append([])
        bins[place].append(item)
        insort(rooms, (room - sizes[item], place))
    return bins


def _even(sizes: Sequence[int], count: int, capacity: int) -> list[list[int]]:
    """Balance items over `count` bins, until all are within the capacity if possible."""
    bins: list[list[int]] = [[] for _ in range(count)]
    for item, place in enumerate(balance(sizes, count, good_enough=count * capacity / sum(sizes))):
        bins[place].append(item)
    return bins


def _total(sizes: Sequence[int], items: Iterable[int]) -> int:
    return sum(sizes[item] for item in items)
