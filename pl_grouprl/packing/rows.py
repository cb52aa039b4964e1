"""Packs groups of rollouts into few rows, none with more tokens than a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from pl_grouprl.packing.bins import pack_sizes
from pl_grouprl.packing.splits import SplitGroup, split_group
from pl_grouprl.packing.trie import Trie, separate

GroupShape = tuple[int, Sequence[int] | Trie]
"""Tokens of a prompt, and those of each rollout, or the trie of what they have in common."""


@dataclass(frozen=True)
class RowPlan:
    """Rows of whole groups, and groups that do not fit into a row.

    Attributes:
        rows: Indices of the groups in each packed row; the row with the most tokens first.
        splits: The groups larger than the budget, with their slices.
    """

    rows: tuple[tuple[int, ...], ...]
    splits: tuple[SplitGroup, ...]


def plan_rows(groups: Sequence[GroupShape], max_tokens: int | None) -> RowPlan:
    """Pack groups into rows by their shared size: each token that rollouts share once, without padding.

    The row with the most tokens comes first, so rows that run on several ranks at the same time have similar sizes,
    and a budget too large for the device fails in the first micro-batch.

    Args:
        groups: The groups. Those without rollouts are skipped.
        max_tokens: Most tokens of a row. None puts all groups into one row.

    Returns:
        Every group with rollouts exactly once: in a row, or split if its shared size exceeds `max_tokens`. A slice has
        at most `max_tokens` tokens; the path that it continues does not count, because it does not run again.

    Raises:
        ValueError: If a prompt alone or a rollout alone is longer than `max_tokens`, or `max_tokens` is less than 1.
    """
    tries = [own if isinstance(own, Trie) else separate(own) for _, own in groups]
    nonempty = [index for index, trie in enumerate(tries) if trie.leaves]
    if max_tokens is None:
        return RowPlan((tuple(nonempty),) if nonempty else (), ())
    _check_budget(max_tokens)
    sizes = {index: groups[index][0] + tries[index].num_tokens for index in nonempty}
    fitting = [index for index in nonempty if sizes[index] <= max_tokens]
    rows = pack_sizes([sizes[index] for index in fitting], max_tokens)
    large = (index for index in nonempty if sizes[index] > max_tokens)
    splits = (split_group(index, groups[index][0], tries[index], max_tokens) for index in large)
    return RowPlan(tuple(tuple(fitting[place] for place in row) for row in rows), tuple(splits))


def plan_repeated_rows(
    groups: Sequence[tuple[int, Sequence[int]]],
    max_tokens: int | None,
    episodes: Sequence[Sequence[int]] | None = None,
) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
    """Cut groups into padded batches [B, L], where each rollout is a row with its whole prompt.

    Fills batches with the longest rollouts first, which needs the fewest batches.

    Args:
        groups: Prompt length and rollout lengths of each group. Groups without rollouts are skipped.
        max_tokens: Maximum number of tokens per batch, including padding. None puts all rollouts into one batch.
        episodes: For each group, the sizes of runs of rollouts that must stay in one batch; None if none must.

    Returns:
        For each batch, its groups as (group, indices of its rollouts), ascending. Every rollout occurs exactly once;
        the batch with the longest sequence comes first.

    Raises:
        ValueError: If a prompt with its rollout, or rollouts that must stay together (padding included), are longer
            than `max_tokens`, or `max_tokens` is less than 1.
    """
    lengths = {
        (group, rollout): prompt + length
        for group, (prompt, rollouts) in enumerate(groups)
        for rollout, length in enumerate(rollouts)
    }
    units = _units(groups, episodes)
    units.sort(key=lambda unit: -max(lengths[rollout] for rollout in unit))
    if max_tokens is None:
        return (_by_group([rollout for unit in units for rollout in unit]),) if units else ()
    _check_budget(max_tokens)
    batches: list[list[tuple[int, int]]] = []
    room = 0  # rollouts that still fit into the last batch, which is as wide as its first rollout
    for unit in units:
        if len(unit) > room:
            longest = max(lengths[rollout] for rollout in unit)
            if longest * len(unit) > max_tokens:
                raise ValueError(_too_long(unit, longest, max_tokens))
            room = max_tokens // max(longest, 1) or 1
            batches.append([])
        batches[-1] += unit
        room -= len(unit)
    return tuple(_by_group(batch) for batch in batches)


def _units(
    groups: Sequence[tuple[int, Sequence[int]]], episodes: Sequence[Sequence[int]] | None
) -> list[list[tuple[int, int]]]:
    """Runs of rollouts that must stay together, each rollout as (group, rollout)."""
    units = []
    for group, (_, rollouts) in enumerate(groups):
        ends = accumulate([1] * len(rollouts) if episodes is None else episodes[group], initial=0)
        units += [[(group, rollout) for rollout in range(*span)] for span in pairwise(ends)]
    return units


def _too_long(unit: Sequence[tuple[int, int]], longest: int, max_tokens: int) -> str:
    (group, rollout), count = unit[0], len(unit)
    what = f"its rollout {rollout} has {longest}" if count == 1 else f"{count} rows of an episode has {longest * count}"
    return (
        f"max_tokens is {max_tokens}, but group {group} with {what} tokens; raise the budget, or shorten prompts or "
        "completions."
    )


def _check_budget(max_tokens: int) -> None:
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; pass 1 or more, or None for no budget.")


def _by_group(units: Sequence[tuple[int, int]]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    chosen: dict[int, list[int]] = {}
    for group, rollout in sorted(units):
        chosen.setdefault(group, []).append(rollout)
    return tuple((group, tuple(rollouts)) for group, rollouts in chosen.items())
