"""Packs groups of rollouts into few rows, none with more tokens than a budget.

Uses best-fit decreasing. If that takes more rows than the token count requires, tries to balance the groups over fewer
rows, as over ranks. Deterministic.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pl_grouprl.packing.balance import balance


@dataclass(frozen=True)
class SplitGroup:
    """A group larger than the budget: its prompt runs first, then its rollouts in slices.

    Attributes:
        group: Index of the group.
        slices: Indices of the rollouts in each slice; together all rollouts of the group, each once.
    """

    group: int
    slices: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class RowPlan:
    """Rows of whole groups, and groups that do not fit into a row.

    Attributes:
        rows: Indices of the groups in each packed row; the row with the most tokens first.
        splits: The groups larger than the budget, with their slices.
    """

    rows: tuple[tuple[int, ...], ...]
    splits: tuple[SplitGroup, ...]


def plan_rows(groups: Sequence[tuple[int, Sequence[int]]], max_tokens: int | None) -> RowPlan:
    """Pack groups into rows by their shared size: the prompt once and all rollouts, without padding.

    The row with the most tokens comes first, so rows that run on several ranks at the same time have similar sizes,
    and a budget too large for the device fails in the first micro-batch.

    Args:
        groups: Prompt length and rollout lengths of each group, as in `SharedPrefixLayout.from_groups`. Groups
            without rollouts are skipped.
        max_tokens: Maximum number of tokens per row. None puts all groups into one row.

    Returns:
        Every group with rollouts exactly once: in a row, or split if its shared size exceeds `max_tokens`. A slice has
        at most `max_tokens` rollout tokens; the prompt does not count, because it does not run again.

    Raises:
        ValueError: If a prompt alone or a rollout alone is longer than `max_tokens`, or `max_tokens` is less than 1.
    """
    nonempty = [index for index, (_, rollouts) in enumerate(groups) if len(rollouts)]
    if max_tokens is None:
        return RowPlan((tuple(nonempty),) if nonempty else (), ())
    _check_budget(max_tokens)
    sizes = {index: groups[index][0] + sum(groups[index][1]) for index in nonempty}
    fitting = [index for index in nonempty if sizes[index] <= max_tokens]
    rows = _pack_sizes([sizes[index] for index in fitting], max_tokens)
    splits = (_split(index, *groups[index], max_tokens) for index in nonempty if sizes[index] > max_tokens)
    return RowPlan(tuple(tuple(fitting[item] for item in row) for row in rows), tuple(splits))


def plan_repeated_rows(
    groups: Sequence[tuple[int, Sequence[int]]], max_tokens: int | None
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Cut groups into padded batches [B, L], where each rollout is a row with its whole prompt.

    Fills batches with the longest rollouts first, which needs the fewest batches.

    Args:
        groups: Prompt length and rollout lengths of each group. Groups without rollouts are skipped.
        max_tokens: Maximum number of tokens per batch, including padding. None puts all rollouts into one batch.

    Returns:
        For each batch, its groups as (group, indices of its rollouts), ascending. Every rollout occurs exactly once;
        the batch with the longest sequence comes first.

    Raises:
        ValueError: If a prompt with its rollout is longer than `max_tokens`, or `max_tokens` is less than 1.
    """
    lengths = {
        (group, rollout): prompt + length
        for group, (prompt, rollouts) in enumerate(groups)
        for rollout, length in enumerate(rollouts)
    }
    remaining = sorted(lengths, key=lambda unit: -lengths[unit])
    if max_tokens is None:
        return (_by_group(remaining),) if remaining else ()
    _check_budget(max_tokens)
    batches = []
    while remaining:
        longest = lengths[remaining[0]]
        if longest > max_tokens:
            group, rollout = remaining[0]
            raise ValueError(
                f"max_tokens is {max_tokens}, but group {group} with its rollout {rollout} has {longest} tokens; raise "
                "the budget, or shorten prompts or completions."
            )
        count = max_tokens // max(longest, 1) or 1
        batches.append(_by_group(remaining[:count]))
        remaining = remaining[count:]
    return tuple(batches)


def _check_budget(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; pass 1 or more, or None for no budget.")


def _by_group(units: Sequence[tuple[int, int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    chosen: dict[int, list[int]] = {}
    for group, rollout in sorted(units):
        chosen.setdefault(group, []).append(rollout)
    return tuple((group, tuple(rollouts)) for group, rollouts in chosen.items())


def _split(group: int, prompt: int, rollouts: Sequence[int], max_tokens: int) -> SplitGroup:
    if prompt > max_tokens:
        raise ValueError(
            f"max_tokens is {max_tokens}, but the prompt of group {group} alone has {prompt} tokens; raise the budget, "
            "or shorten prompts."
        )
    if max(rollouts) > max_tokens:
        rollout = max(range(len(rollouts)), key=rollouts.__getitem__)
        raise ValueError(
            f"max_tokens is {max_tokens}, but rollout {rollout} of group {group} alone has {rollouts[rollout]} tokens; "
            "raise the budget, or shorten completions."
        )
    return SplitGroup(group, tuple(_pack_sizes(rollouts, max_tokens)))


def _pack_sizes(sizes: Sequence[int], capacity: int) -> list[tuple[int, ...]]:
    """Pack sizes into bins of at most `capacity`; returns their indices, the fullest bin first."""
    bins = _best_fit(sizes, capacity)
    fewest = -(-sum(sizes) // capacity) or 1
    while fewest < len(bins):
        count = (fewest + len(bins)) // 2
        balanced = _balanced_bins(sizes, count, capacity)
        if max(_total(sizes, items) for items in balanced) <= capacity:
            bins = balanced
        else:
            fewest = count + 1
    bins.sort(key=lambda items: (-_total(sizes, items), min(items)))
    return [tuple(sorted(items)) for items in bins]


def _best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each item, largest first, into the fullest bin that has room for it."""
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, bin), ascending
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        fullest = bisect_left(rooms, (sizes[item], -1))
        if fullest < len(rooms):
            room, number = rooms.pop(fullest)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        insort(rooms, (room - sizes[item], number))
    return bins


def _balanced_bins(sizes: Sequence[int], count: int, capacity: int) -> list[list[int]]:
    """Balance items over `count` bins, until none exceeds the capacity if possible."""
    bins: list[list[int]] = [[] for _ in range(count)]
    for item, number in enumerate(balance(sizes, count, good_enough=count * capacity / sum(sizes))):
        bins[number].append(item)
    return bins


def _total(sizes: Sequence[int], items: Iterable[int]) -> int:
    return sum(sizes[item] for item in items)
