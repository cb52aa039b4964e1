"""Which groups of rollouts share one packed row, so that no row has more tokens than a budget and few rows are needed.

Rows are packed by best fit decreasing; where that needs more rows than the tokens do, rows are filled one after another
to the last token that the remaining groups can reach. Nothing is random: every rank plans alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SplitGroup:
    """A group larger than the budget: its prompt is a pass of its own, and its rollouts follow in slices.

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
        rows: Indices of the groups that share one packed row, for each row; the row with the most tokens first.
        splits: The groups larger than the budget, with their slices.
    """

    rows: tuple[tuple[int, ...], ...]
    splits: tuple[SplitGroup, ...]


def plan_rows(groups: Sequence[tuple[int, Sequence[int]]], max_tokens: int | None) -> RowPlan:
    """Pack groups into rows by their shared size: the prompt once and all rollouts, without padding.

    Rows come with the most tokens first, so that the rows of several ranks that run at the same time are alike, and so
    that a budget too large for the device shows in the first pass.

    Args:
        groups: For each group the length of its prompt and the lengths of its rollouts, as
            `SharedPrefixLayout.from_groups` takes them. A group without rollouts takes no part.
        max_tokens: Most tokens of a row. None: all groups in one row.

    Returns:
        Every group with rollouts exactly once: in a row, or split if its shared size is beyond `max_tokens`. A slice
        has at most `max_tokens` tokens of rollouts; the prompt is not counted there, because it is not run again.

    Raises:
        ValueError: If a prompt alone or a rollout alone is longer than `max_tokens`, or `max_tokens` is less than 1.
    """
    taking_part = [index for index, (_, rollouts) in enumerate(groups) if len(rollouts)]
    if max_tokens is None:
        return RowPlan((tuple(taking_part),) if taking_part else (), ())
    _check_budget(max_tokens)
    sizes = {index: groups[index][0] + sum(groups[index][1]) for index in taking_part}
    fitting = [index for index in taking_part if sizes[index] <= max_tokens]
    rows = _pack_sizes([sizes[index] for index in fitting], max_tokens)
    splits = (_split(index, *groups[index], max_tokens) for index in taking_part if sizes[index] > max_tokens)
    return RowPlan(tuple(tuple(fitting[place] for place in row) for row in rows), tuple(splits))


def plan_repeated_rows(
    groups: Sequence[tuple[int, Sequence[int]]], max_tokens: int | None
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Cut groups into padded batches [B, L], where each rollout is a row with its whole prompt.

    Rollouts of like length come together. Taking them from the longest down, as many as fit each time, needs the
    fewest batches that are possible.

    Args:
        groups: Prompt length and rollout lengths of each group. A group without rollouts takes no part.
        max_tokens: Most tokens of a batch, padding included. None: all rollouts in one batch.

    Returns:
        For each batch the groups that it has rollouts of, ascending, each as (group, indices of its rollouts,
        ascending). Every rollout exactly once; the batch with the longest sequence first.

    Raises:
        ValueError: If a prompt with its rollout is longer than `max_tokens`, or `max_tokens` is less than 1.
    """
    lengths = {
        (group, rollout): prompt + own
        for group, (prompt, rollouts) in enumerate(groups)
        for rollout, own in enumerate(rollouts)
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
    """Indices of the sizes, in bins of at most `capacity`; the fullest bin first."""
    bins = _best_fit(sizes, capacity)
    if len(bins) > -(-sum(sizes) // capacity):
        bins = min(bins, _fill(sizes, capacity), key=len)
    bins.sort(key=lambda items: (-sum(sizes[item] for item in items), min(items)))
    return [tuple(sorted(items)) for items in bins]


def _largest_first(sizes: Sequence[int]) -> list[int]:
    return sorted(range(len(sizes)), key=lambda item: -sizes[item])


def _best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Each item, the largest first, into the bin that it fills best."""
    bins: list[list[int]] = []
    rooms: list[int] = []
    for item in _largest_first(sizes):
        fitting = [place for place, room in enumerate(rooms) if room >= sizes[item]]
        if fitting:
            place = min(fitting, key=rooms.__getitem__)
        else:
            place = len(bins)
            bins.append([])
            rooms.append(capacity)
        bins[place].append(item)
        rooms[place] -= sizes[item]
    return bins


def _fill(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """One bin after another: the largest item that is left, and those of the others that leave least room."""
    remaining = _largest_first(sizes)
    bins = []
    while remaining:
        first, *others = remaining
        chosen = {first, *_best_subset(others, sizes, capacity - sizes[first])}
        bins.append([item for item in remaining if item in chosen])
        remaining = [item for item in remaining if item not in chosen]
    return bins


def _best_subset(items: Sequence[int], sizes: Sequence[int], room: int) -> list[int]:
    """The items whose sizes add up to most within `room`: bit s of an integer says that the sum s can be reached."""
    within = (1 << (room + 1)) - 1
    reachable = [1]
    for item in items:
        reachable.append(reachable[-1] | (reachable[-1] << sizes[item]) & within)
    best = reachable[-1].bit_length() - 1
    chosen = []
    for item, before in zip(reversed(items), reversed(reachable[:-1]), strict=True):
        # An item is taken only where the sum cannot be reached by those before it, which are larger.
        if not before >> best & 1:
            chosen.append(item)
            best -= sizes[item]
    return chosen
